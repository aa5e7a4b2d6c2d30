"""Segmentation -> OME-TIFF."""

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
from service.formats import imagej, tiff_template
from service.formats.tiff_reader import RELEASED_PAGES
from service.formats.tiff_template import Streams, TiffTemplate

Compress = Callable[[Array], Streams | None]
# Beyond this many bytes of pixels a classic TIFF, whose offsets have 32 bits, might not hold its pages.
_CLASSIC_BYTES = 2**32 - 2**26
# Bytes of planes that are compressed in one call, if that is more than one plane.
_BLOCK_BYTES = 2**22
# So many blocks are compressed at the same time, while earlier ones are written.
_AHEAD = 2


class _Form(NamedTuple):
    """Everything about a segmentation that files of such are alike in."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: OutputKind
    names: tuple[str, ...]
    voxel_size: VoxelSize | None
    counted: bool

    @classmethod
    def of(cls, made: Segmentation) -> Self:
        shape, dtype = made.pixels.shape, made.pixels.dtype
        return cls(shape, dtype, made.kind, made.names, made.voxel_size, made.count is not None)

    @property
    def pages(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def is_small(self) -> bool:
        """Whether a file of it is made in memory."""
        return math.prod(self.shape) * self.dtype.itemsize <= _SMALL_BYTES and self.pages <= _SMALL_PAGES


def write(
    segmentation: Segmentation, path: Path, *, bigtiff: bool | None = None, compress: Compress = lambda _pixels: None
) -> None:
    """Write labels, classes [Z, Y, X] or probabilities [K, Z, Y, X] as OME-TIFF; `path` appears only once complete.

    One page per plane, Deflate at its fastest level and no predictor, which every reader opens. BigTIFF, unless chosen,
    only where a classic TIFF might be too small. The voxel size goes to PhysicalSizeX, Y, Z in um, to the resolution
    tags, and to a second description for ImageJ's own reader, which knows no OME-XML. `compress` as in `encoded`; what
    it leaves is compressed by the writer of the pages, in strips.
    """
    form = _Form.of(segmentation)
    if bigtiff is None:
        bigtiff = segmentation.pixels.nbytes > _CLASSIC_BYTES
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("w+b") as file:
            if not bigtiff and (content := encoded(segmentation, compress)) is not None:
                file.write(content)
            else:
                pixels = segmentation.pixels
                _write(file, form, _streams(pixels, compress) or pixels, _number(), bigtiff=bigtiff)
                imagej.append(file, imagej.for_imagej(segmentation))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def encoded(segmentation: Segmentation, compress: Compress = lambda _pixels: None) -> bytes | None:
    """The file that `write` writes, where it is small; None: too large to be made in memory.

    compress  gives the zlib streams of the planes and where each of them ends, or None, which leaves that to zlib
    """
    form = _Form.of(segmentation)
    if not form.is_small:
        return None
    streams = compress(segmentation.pixels) or _compressed(segmentation.pixels)
    return _stencil(form).filled(streams, _number(), imagej.for_imagej(segmentation))


def _number() -> str:
    """A UUID of a file's own: nobody has to be unable to guess it, so it needs no call of the system."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@lru_cache(maxsize=32)
def _stencil(form: _Form) -> TiffTemplate:
    made = Segmentation(
        # Of the pixels only the shape matters.
        np.broadcast_to(np.zeros((), form.dtype), form.shape),
        form.kind,
        form.voxel_size,
        np.iinfo(np.uint32).max if form.counted else None,
        form.names,
    )

    def write(stream: BinaryIO) -> None:
        _write(stream, form, itertools.repeat(b"\0", form.pages), tiff_template.NUMBER, bigtiff=False)

    return TiffTemplate.cut(write, imagej.for_imagej(made))


def _write(file: BinaryIO, form: _Form, pixels: Array | Iterator[bytes], number: str, *, bigtiff: bool) -> None:
    """Pixels as they are, or pages compressed by then, in a file with this UUID."""
    pages = _pages(pixels) if isinstance(pixels, np.ndarray) else pixels
    plain = pages is not pixels
    planes = len(form.shape) == 3
    metadata: dict[str, object] = {
        "UUID": number,
        "Creator": "StackSeg",
        "axes": "ZYX" if planes else "CZYX",
        "Name": form.kind,
        "Channel": {"Name": form.kind if planes else [_printable(name) for name in form.names]},
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
            rowsperstrip=None if plain else form.shape[-2],
            resolution=resolution,
            resolutionunit="CENTIMETER" if resolution else None,
            metadata=metadata,
            software="StackSeg",
            maxworkers=len(os.sched_getaffinity(0)) if plain else 1,
        )


def _pages(pixels: Array) -> Iterator[Array]:
    """The planes [Y, X] of an array of any shape; of one that lies on disk, a few at a time are in memory."""
    for number, index in enumerate(np.ndindex(pixels.shape[:-2])):
        if number % RELEASED_PAGES == 0:
            release_pages(pixels)
        yield pixels[index]


def _streams(pixels: Array, compress: Compress) -> Iterator[bytes] | None:
    """Planes [Z, Y, X] as `compress` makes them, one after the other; None where it leaves them to others."""
    if pixels.ndim != 3 or compress(pixels[:1]) is None:
        return None
    return _one_by_one(pixels, compress)


def _one_by_one(pixels: Array, compress: Compress) -> Iterator[bytes]:
    count = max(_BLOCK_BYTES // pixels[0].nbytes, 1)
    blocks = (pixels[begin : begin + count] for begin in range(0, len(pixels), count))
    for streams, ends in _ahead(lambda planes: compress(planes) or _compressed(planes), blocks):
        release_pages(pixels)
        for start, end in itertools.pairwise((0, *ends.tolist())):
            yield streams[start:end].tobytes()


def _ahead(compressed: Callable[[Array], Streams], blocks: Iterator[Array]) -> Iterator[Streams]:
    """What comes of each, in order; that of the next few is made in threads meanwhile."""
    with ThreadPoolExecutor(_AHEAD, "compress") as crew:
        coming = deque(crew.submit(compressed, block) for block in itertools.islice(blocks, _AHEAD))
        while coming:
            yield coming.popleft().result()
            coming.extend(crew.submit(compressed, block) for block in itertools.islice(blocks, 1))


def _compressed(pixels: Array) -> Streams:
    """Compress planes by zlib, which is faster than the writer's encoder for small ones; little-endian."""
    little = pixels.dtype.newbyteorder("<")
    streams = [zlib.compress(np.ascontiguousarray(plane, little).data, 1) for plane in _pages(pixels)]
    return np.frombuffer(b"".join(streams), np.uint8), np.cumsum([len(stream) for stream in streams])


def _printable(name: str) -> str:
    """Without the control characters that XML cannot carry."""
    return "".join(letter for letter in name if letter.isprintable())


_SMALL_BYTES, _SMALL_PAGES = 4 * 2**20, 2**10
