"""Write a segmentation as OME-TIFF."""

from __future__ import annotations

import itertools
import math
import os
import random
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from tifffile import TiffWriter

from service.core.buffers import release_pages
from service.core.volume import Array, OutputKind, Segmentation, VoxelSize
from service.formats import imagej_writer, tiff_template
from service.formats.tiff_template import Streams, TiffTemplate

Compress = Callable[[Array], Streams | None]
"""Compresses planes [Z, Y, X] to zlib streams; None leaves planes of this kind to zlib."""

# A classic TIFF has 32-bit offsets, and might not hold its pages beyond this many bytes of pixels.
_CLASSIC_BYTES = 2**32 - 2**26
# Files up to this size and number of pages are made in memory.
_SMALL_BYTES, _SMALL_PAGES = 4 * 2**20, 2**10
# Bytes of planes that are compressed in one call, if that is more than one plane.
_BLOCK_BYTES = 2**22
# Number of blocks that are compressed at the same time, while earlier ones are written.
_BLOCKS_AHEAD = 2
# Number of pages between two releases of a mapped array's memory.
_RELEASE_EVERY = 64


class _Form(NamedTuple):
    """Everything that decides about a file but its pixels, UUID and number of objects."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: OutputKind
    names: tuple[str, ...]
    voxel_size: VoxelSize | None
    counted: bool

    @classmethod
    def of(cls, segmentation: Segmentation) -> Self:
        shape, dtype, counted = segmentation.pixels.shape, segmentation.pixels.dtype, segmentation.count is not None
        return cls(shape, dtype, segmentation.kind, segmentation.names, segmentation.voxel_size, counted)

    @property
    def pages(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def is_small(self) -> bool:
        """Whether a file of this form is made in memory."""
        return math.prod(self.shape) * self.dtype.itemsize <= _SMALL_BYTES and self.pages <= _SMALL_PAGES


def write(
    segmentation: Segmentation, path: Path, *, bigtiff: bool | None = None, compress: Compress = lambda _pixels: None
) -> None:
    """Write labels, classes [Z, Y, X] or probabilities [K, Z, Y, X] as OME-TIFF; `path` appears only once complete.

    One page per plane, Deflate at its fastest level and no predictor, which every reader opens. BigTIFF, unless chosen,
    only where a classic TIFF might be too small. The voxel size goes to PhysicalSizeX, Y, Z in um, to the resolution
    tags, and to a second description for ImageJ's own reader.
    """
    form = _Form.of(segmentation)
    if bigtiff is None:
        bigtiff = segmentation.pixels.nbytes > _CLASSIC_BYTES
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("w+b") as file:
            if not bigtiff and (content := encode(segmentation, compress)) is not None:
                file.write(content)
            else:
                pixels = segmentation.pixels
                can_compress = pixels.ndim == 3 and compress(pixels[:1]) is not None
                pages = _compress_blocks(pixels, compress) if can_compress else pixels
                _write_pages(file, form, pages, _make_uuid(), bigtiff=bigtiff)
                imagej_writer.append_description(file, imagej_writer.describe(segmentation))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def encode(segmentation: Segmentation, compress: Compress = lambda _pixels: None) -> bytes | None:
    """Return the bytes that `write` writes, or None where the file is too large to be made in memory."""
    form = _Form.of(segmentation)
    if not form.is_small:
        return None
    streams = compress(segmentation.pixels) or _compress_by_zlib(segmentation.pixels)
    return _template(form).render(streams, _make_uuid(), imagej_writer.describe(segmentation))


def _make_uuid() -> str:
    """Return a random UUID. It need not be unpredictable, so no system call is spent on it."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@lru_cache(maxsize=32)
def _template(form: _Form) -> TiffTemplate:
    segmentation = Segmentation(
        # The template needs only the shape of the pixels.
        np.broadcast_to(np.zeros((), form.dtype), form.shape),
        form.kind,
        form.voxel_size,
        np.iinfo(np.uint32).max if form.counted else None,
        form.names,
    )

    def write(stream: BinaryIO) -> None:
        pages = itertools.repeat(b"\0", form.pages)
        _write_pages(stream, form, pages, tiff_template.UUID_PLACEHOLDER, bigtiff=False)

    return TiffTemplate.prepare(write, imagej_writer.describe(segmentation))


def _write_pages(file: BinaryIO, form: _Form, pixels: Array | Iterator[bytes], number: str, *, bigtiff: bool) -> None:
    """Write a TIFF with this UUID from an array, or from pages that are compressed already."""
    pages = _planes(pixels) if isinstance(pixels, np.ndarray) else pixels
    is_array = pages is not pixels
    has_channels = len(form.shape) == 4
    # XML cannot carry control characters.
    names = ["".join(filter(str.isprintable, name)) for name in form.names]
    metadata: dict[str, object] = {
        "UUID": number,
        "Creator": "StackSeg",
        "axes": "CZYX" if has_channels else "ZYX",
        "Name": form.kind,
        "Channel": {"Name": names if has_channels else form.kind},
    }
    resolution = None
    if form.voxel_size is not None:
        for axis, edge in zip("ZYX", form.voxel_size, strict=True):
            metadata |= {f"PhysicalSize{axis}": edge, f"PhysicalSize{axis}Unit": "µm"}
        resolution = (1e4 / form.voxel_size.x, 1e4 / form.voxel_size.y)
    with TiffWriter(file, ome=True, bigtiff=bigtiff) as writer:
        writer.write(
            pages,
            shape=form.shape,
            dtype=form.dtype,
            photometric="minisblack",
            compression="adobe_deflate",
            compressionargs={"level": 1},
            rowsperstrip=None if is_array else form.shape[-2],
            resolution=resolution,
            resolutionunit="CENTIMETER" if resolution else None,
            metadata=metadata,
            software="StackSeg",
            maxworkers=len(os.sched_getaffinity(0)) if is_array else 1,
        )


def _planes(pixels: Array) -> Iterator[Array]:
    """Yield the planes [Y, X] of an array, and keep only a few planes of a mapped one in memory."""
    for number, index in enumerate(np.ndindex(pixels.shape[:-2])):
        if number % _RELEASE_EVERY == 0:
            release_pages(pixels)
        yield pixels[index]


def _compress_blocks(pixels: Array, compress: Compress) -> Iterator[bytes]:
    """Yield the compressed planes of [Z, Y, X]; the next few blocks are compressed in threads meanwhile."""
    count = max(_BLOCK_BYTES // pixels[0].nbytes, 1)
    blocks = (pixels[begin : begin + count] for begin in range(0, len(pixels), count))

    def compress_block(planes: Array) -> Streams:
        return compress(planes) or _compress_by_zlib(planes)

    with ThreadPoolExecutor(_BLOCKS_AHEAD, "compress") as threads:
        pending = deque(threads.submit(compress_block, block) for block in itertools.islice(blocks, _BLOCKS_AHEAD))
        while pending:
            streams, ends = pending.popleft().result()
            release_pages(pixels)
            for start, end in itertools.pairwise((0, *ends.tolist())):
                yield streams[start:end].tobytes()
            pending.extend(threads.submit(compress_block, block) for block in itertools.islice(blocks, 1))


def _compress_by_zlib(pixels: Array) -> Streams:
    """Compress little-endian planes by zlib, which is faster than tifffile's encoder for small ones."""
    little = pixels.dtype.newbyteorder("<")
    streams = [zlib.compress(np.ascontiguousarray(plane, little).data, 1) for plane in _planes(pixels)]
    return np.frombuffer(b"".join(streams), np.uint8), np.cumsum([len(stream) for stream in streams])
