"""Read stacks: TIFFs (`formats.tiff`), and OME-Zarr in folders and zip archives (`formats.zarr`).

Everything is checked before a pixel is decoded. Files that cannot be trusted are read through
`service.formats.sandbox.reader`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np

from service.core.errors import BadParameter
from service.core.types import Array, Description, Selection, Volume
from service.formats.open_stack import OpenStack
from service.formats.placement import Extract, Placement, make_file, map_file, store_into
from service.formats.tiff import reader as tiff_reader
from service.formats.zarr import reader as zarr_reader
from service.formats.zarr.reader import ZarrStack
from service.formats.zarr.store import FolderStore, Store, ZipStore, open_file

_ZIP = b"PK\x03\x04"

Source = Path | int | Store
"""A file or folder by its path, an open file, or a store of Zarr."""


def inspect(file: Source, selection: Selection, limit_bytes: int, *, keep: bool = False) -> Description:
    """Describe a file and the selected part without decoding pixels.

    A descriptor is closed, unless it is to be kept open. Several time points without a choice are told as `problem`.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    with _open(file, selection, limit_bytes, keep=keep) as stack:
        return stack.describe(selection)


def read(path: Path | Store, selection: Selection, limit_bytes: int, scratch: Path | None = None) -> Volume:
    """Read the selected channels and time point as [C, Z, Y, X] in native byte order, dtype as stored (1-bit: uint8).

    Uncompressed pixels at regular distances are mapped, so the file must outlive the volume; others are decoded to
    memory, or to a file in the folder `scratch`.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    if scratch is not None:
        return _read_to_file(path, selection, limit_bytes, scratch)
    with _open(path, selection, limit_bytes) as stack:
        placement = stack.placement
        if placement is not None and isinstance(path, Path):
            return placement.map_volume(map_file(path), *stack.facts(selection))
        decoded: Array = np.empty(stack.shape, stack.dtype)
        stack.decode(store_into(decoded))
        return Volume(stack.shape, decoded.dtype, lambda z0, z1: decoded[:, z0:z1], *stack.facts(selection))


@contextmanager
def open_blocks(path: Path, selection: Selection) -> Iterator[ZarrStack]:
    """Open the selected part of an OME-Zarr image of any size, to read it box by box. Raises what `inspect` raises."""
    with ExitStack() as files:
        if not path.is_dir():
            raise BadParameter(f"{path} is no folder of OME-Zarr, which alone is read block by block.")
        yield zarr_reader.open_stack(_open_folder(path, files), selection, sys.maxsize)


def extract(
    file: Source, selection: Selection, limit_bytes: int, make_output: Callable[[int], int], small_bytes: int
) -> Extract | Description:
    """Locate the selected pixels in the file itself, or decode them to another one.

    `make_output` takes the bytes of the decoded pixels and returns the descriptor of a file of that length; it is
    called only where pixels have to be decoded. Descriptors are closed. Where more than `small_bytes` would have to be
    decoded, nothing is, and the description is returned. Raises the errors of `read`, and those of `make_output`.
    """
    with _open(file, selection, limit_bytes) as stack:
        if stack.placement is None and stack.decoded_bytes > small_bytes:
            return stack.describe(selection)
        return _extract(stack, selection, make_output)


def extract_all(file: Source, selection: Selection, limit_bytes: int, make_output: Callable[[int], int]) -> Extract:
    """Locate or decode the selected pixels, as `extract` does, however many there are to decode."""
    with _open(file, selection, limit_bytes) as stack:
        return _extract(stack, selection, make_output)


def _extract(stack: OpenStack, selection: Selection, make_output: Callable[[int], int]) -> Extract:
    facts, placement = stack.facts(selection), stack.placement
    if placement is not None:
        return Extract(placement, *facts, decoded=False)
    placement = Placement.dense(stack.dtype, stack.shape)
    with os.fdopen(make_output(placement.nbytes), "r+b", buffering=0) as output:

        def store(channel: int, start: tuple[int, int, int], block: Array) -> None:
            # Of blocks with a part of X rows lie apart, of those with a part of Y planes.
            apart = 2 if block.shape[2] < stack.shape[3] else int(block.shape[1] < stack.shape[2])
            for place in np.ndindex(block.shape[:apart]):
                at = np.add(start, (*place, 0, 0, 0)[:3])
                _write_all(output.fileno(), block[place], np.dot((channel, *at), placement.strides))

        stack.decode(store)
    return Extract(placement, *facts, decoded=True)


def _read_to_file(path: Path | Store, selection: Selection, limit_bytes: int, scratch: Path) -> Volume:
    with ExitStack() as files:
        outputs = []

        def make_output(nbytes: int) -> int:
            outputs.append(files.enter_context(make_file(scratch, nbytes)))
            return os.dup(outputs[0].fileno())

        with _open(path, selection, limit_bytes) as stack:
            found = _extract(stack, selection, make_output)
        content = map_file(path if isinstance(path, Path) and not found.decoded else outputs[0].fileno())
    return found.placement.map_volume(content, found.voxel_size, found.channels, found.notes)


def _write_all(descriptor: int, block: Array, offset: int) -> None:
    data = memoryview(block.data).cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@contextmanager
def _open(file: Source, selection: Selection, limit_bytes: int, *, keep: bool = False) -> Iterator[OpenStack]:
    """Open a file or a folder as what its content says that it is."""
    with ExitStack() as files:
        opened = _open_source(file, files, keep=keep)
        store = _open_archive(opened) if isinstance(opened, BufferedReader) else opened
        if store is not None:
            yield zarr_reader.open_stack(store, selection, limit_bytes)
        elif isinstance(opened, BufferedReader):
            yield tiff_reader.open_stack(opened, selection, limit_bytes)


def _open_source(file: Source, files: ExitStack, *, keep: bool) -> Store | BufferedReader:
    """Return a store, also that in a folder, or else an open file."""
    if isinstance(file, int):
        return files.enter_context(os.fdopen(file, "rb", closefd=not keep))
    if not isinstance(file, Path):
        return file
    return _open_folder(file, files) if file.is_dir() else files.enter_context(file.open("rb"))


def _open_folder(file: Path, files: ExitStack) -> Store:
    """Return the store in a folder."""
    folder = os.open(file, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    files.callback(os.close, folder)
    return FolderStore(partial(open_file, folder))


def _open_archive(stream: BinaryIO) -> Store | None:
    """Return the store in a zip archive, None for any other file, which is as it was."""
    # Whoever sent the descriptor may have read or written before.
    stream.seek(0)
    is_zip = stream.read(len(_ZIP)) == _ZIP
    stream.seek(0)
    archive = ZipStore(stream) if is_zip else None
    return archive if archive is not None and archive.holds_zarr else None
