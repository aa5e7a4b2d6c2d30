"""Read stacks: TIFF, OME-Zarr in folders and zip archives, and the formats of microscope vendors.

Files are validated before any pixels are decoded. Read untrusted files with `service.formats.sandbox.reader` instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np

from service.core.errors import BadParameter
from service.core.types import Array, Description, Selection, Volume
from service.formats.axes import select_scene
from service.formats.open_stack import OpenStack
from service.formats.placement import Placement, VolumeLocation, make_block_writer, make_temporary_file, map_file
from service.formats.tiff import reader as tiff_reader
from service.formats.vendor import reader as vendor_reader
from service.formats.zarr import reader as zarr_reader
from service.formats.zarr.reader import ZarrStack
from service.formats.zarr.store import FolderStore, Store, ZipStore, open_file

_ZIP_SIGNATURE = b"PK\x03\x04"

Source = Path | int | Store
"""Path of a file or folder, descriptor of an open file, or a Zarr store."""


def inspect(file: Source, selection: Selection, max_volume_bytes: int, *, keep_open: bool = False) -> Description:
    """Describe a file and the selected part without decoding pixels.

    A descriptor is closed unless `keep_open` is set. If the file has several time points and none is selected, this is
    reported in `Description.problem`.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    with _open(file, selection, max_volume_bytes, keep_open=keep_open) as stack:
        return stack.describe(selection)


def read(path: Path | Store, selection: Selection, max_volume_bytes: int, scratch: Path | None = None) -> Volume:
    """Read the selected channels and time point as a volume [C, Z, Y, X].

    The dtype is the stored one in native byte order, or uint8 for 1-bit pixels. Uncompressed pixels with
    constant strides are memory-mapped, so the file must not be deleted before the volume is released. Other pixels are
    decoded to memory, or to a file in the folder `scratch`.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    if scratch is not None:
        return _read_to_file(path, selection, max_volume_bytes, scratch)
    with _open(path, selection, max_volume_bytes) as stack:
        placement = stack.placement
        if placement is not None and isinstance(path, Path):
            return placement.map_volume(map_file(path), *stack.get_volume_metadata(selection))
        decoded: Array = np.empty(stack.shape, stack.dtype)
        stack.decode(make_block_writer(decoded))
        return Volume(
            stack.shape, decoded.dtype, lambda z0, z1: decoded[:, z0:z1], *stack.get_volume_metadata(selection)
        )


@contextmanager
def open_blocks(path: Path, selection: Selection) -> Iterator[ZarrStack]:
    """Open the selected part of an OME-Zarr image to read it block by block. Raises the same errors as `inspect`."""
    with ExitStack() as files:
        if not path.is_dir():
            raise BadParameter(f"{path} is not an OME-Zarr folder. Block-wise processing requires one.")
        yield zarr_reader.open_stack(_open_folder(path, files), selection, None)


def extract(
    file: Source, selection: Selection, max_volume_bytes: int, make_output: Callable[[int], int], max_decoded_bytes: int
) -> VolumeLocation | Description:
    """Locate the selected pixels in the file, or decode them to another file.

    `make_output` receives the size of the decoded pixels in bytes and returns the descriptor of a file of that size. It
    is called only if pixels have to be decoded. The descriptors of both files are closed. If more than
    `max_decoded_bytes` would have to be decoded, nothing is decoded and the description is returned. Raises the same
    errors as `read` and `make_output`.
    """
    with _open(file, selection, max_volume_bytes) as stack:
        if stack.placement is None and stack.decoded_bytes > max_decoded_bytes:
            return stack.describe(selection)
        return _extract(stack, selection, make_output)


def extract_any_size(
    file: Source, selection: Selection, max_volume_bytes: int, make_output: Callable[[int], int]
) -> VolumeLocation:
    """Locate or decode the selected pixels like `extract`, without a limit on the size of the decoded pixels."""
    with _open(file, selection, max_volume_bytes) as stack:
        return _extract(stack, selection, make_output)


def _extract(stack: OpenStack, selection: Selection, make_output: Callable[[int], int]) -> VolumeLocation:
    placement = stack.placement
    if placement is not None:
        return VolumeLocation(placement, *stack.get_volume_metadata(selection), is_decoded=False)
    placement = Placement.make_dense(stack.dtype, stack.shape)
    with os.fdopen(make_output(placement.nbytes), "r+b", buffering=0) as output:

        def write_block(channel: int, start: tuple[int, int, int], block: Array) -> None:
            # Bytes are contiguous in the output only within a row, a plane or the whole block, depending on whether the
            # block spans complete rows and planes.
            separate_axis_count = 2 if block.shape[2] < stack.shape[3] else int(block.shape[1] < stack.shape[2])
            for index in np.ndindex(block.shape[:separate_axis_count]):
                block_start = np.add(start, (*index, 0, 0, 0)[:3])
                _write_all(output.fileno(), block[index], np.dot((channel, *block_start), placement.strides))

        stack.decode(write_block)
    # Some notes are known only after decoding.
    return VolumeLocation(placement, *stack.get_volume_metadata(selection), is_decoded=True)


def _read_to_file(path: Path | Store, selection: Selection, max_volume_bytes: int, scratch: Path) -> Volume:
    with ExitStack() as files:
        outputs = []

        def make_output(nbytes: int) -> int:
            outputs.append(files.enter_context(make_temporary_file(scratch, nbytes)))
            return os.dup(outputs[0].fileno())

        with _open(path, selection, max_volume_bytes) as stack:
            location = _extract(stack, selection, make_output)
        content = map_file(path if isinstance(path, Path) and not location.is_decoded else outputs[0].fileno())
    return location.placement.map_volume(content, location.voxel_size, location.channels, location.notes)


def _write_all(descriptor: int, block: Array, offset: int) -> None:
    unwritten_part = memoryview(block.data).cast("B")
    while unwritten_part:
        written_bytes = os.pwrite(descriptor, unwritten_part, offset)
        unwritten_part, offset = unwritten_part[written_bytes:], offset + written_bytes


@contextmanager
def _open(file: Source, selection: Selection, max_volume_bytes: int, *, keep_open: bool = False) -> Iterator[OpenStack]:
    """Detect the format of a file or folder from its content, and open it as a stack."""
    with ExitStack() as files:
        source = _open_source(file, files, keep_open=keep_open)
        store = _open_archive(source) if isinstance(source, BufferedReader) else source
        if store is not None:
            stack: OpenStack = zarr_reader.open_stack(store, selection, max_volume_bytes)
        elif isinstance(source, BufferedReader):
            stack = _open_stream(source, selection, max_volume_bytes)
        if selection.scene is not None and not stack.scenes:
            select_scene(("",), selection.scene)
        stack.check_plane_count(selection)
        yield stack


def _open_stream(stream: BinaryIO, selection: Selection, max_volume_bytes: int) -> OpenStack:
    vendor_format = vendor_reader.find_format(stream)
    if vendor_format is not None:
        return vendor_reader.open_stack(stream, vendor_format, selection, max_volume_bytes)
    return tiff_reader.open_stack(stream, selection, max_volume_bytes)


def _open_source(file: Source, files: ExitStack, *, keep_open: bool) -> Store | BufferedReader:
    """Return a store unchanged, open a folder as a store, and open any other path or descriptor as a file."""
    if isinstance(file, int):
        return files.enter_context(os.fdopen(file, "rb", closefd=not keep_open))
    if not isinstance(file, Path):
        return file
    return _open_folder(file, files) if file.is_dir() else files.enter_context(file.open("rb"))


def _open_folder(path: Path, files: ExitStack) -> Store:
    """Return the store in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    files.callback(os.close, descriptor)
    return FolderStore(partial(open_file, descriptor))


def _open_archive(stream: BinaryIO) -> Store | None:
    """Return the store in a zip archive, or None for any other file. Rewind the stream."""
    # The process that passed the descriptor may have moved its position.
    stream.seek(0)
    archive = ZipStore(stream) if stream.read(len(_ZIP_SIGNATURE)) == _ZIP_SIGNATURE else None
    stream.seek(0)
    return archive if archive is not None and archive.has_zarr else None
