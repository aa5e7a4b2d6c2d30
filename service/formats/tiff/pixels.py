"""Location of the selected pixels in a file, and decoding of those that are compressed or scattered.

Uncompressed pixels at regular distances are never copied: a `Placement` locates them, and the volume maps the file.
Others are decoded page by page, in as many threads as there are cores, with no more pages than threads in memory.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from tifffile import TiffFile, TiffPage

from service.core.errors import BadFile, BadParameter, TooLarge
from service.core.hardware import host
from service.core.quantities import VoxelSize
from service.core.types import Array, StackShape, Volume
from service.formats.axes import Layout, Part
from service.formats.tiff.ifd import Structure
from service.formats.tiff.series import Page, StoredImage, translate_errors

T = TypeVar("T")

# Volumes up to this size are decoded by one thread.
_SINGLE_THREAD_BYTES = 2**20
# Asked before any file is parsed: a process that is confined then cannot ask any more.
_WORKERS = host.usable_cores()

Store = Callable[[int, tuple[int, int, int], Array], None]
"""store(channel, (z0, y0, x0), block): take over a block [z, y, x] of a channel, by its number among the selected ones.

Several threads call it.
"""

_STRIP_BYTE_COUNTS, _TILE_BYTE_COUNTS = 279, 325


def make_file(folder: Path, nbytes: int) -> IO[bytes]:
    """Make a file without a name in a folder, which is made where it is missing; nothing is left of it once closed."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the caller's
    file.truncate(nbytes)
    return file


def map_file(file: Path | int) -> mmap.mmap:
    """Map a whole file, copy-on-write, several times as fast as `numpy.memmap`. Raises ValueError for an empty one.

    `file` is a path, or a descriptor, which stays open.
    """
    if isinstance(file, int):
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    with file.open("rb", buffering=0) as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True)
class Placement:
    """Location of pixels [C, Z, Y, X] in a file: offset and strides in bytes, dtype with its byte order."""

    dtype: str
    offset: int
    shape: StackShape
    strides: StackShape

    @classmethod
    def dense(cls, dtype: np.dtype[Any], shape: StackShape) -> Placement:
        """Locate pixels that fill a whole file in C order."""
        _, z, y, x = shape
        size = dtype.itemsize
        return cls(dtype.str, 0, shape, (z * y * x * size, y * x * size, x * size, size))

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def map_volume(
        self,
        content: mmap.mmap | bytearray,
        voxel_size: VoxelSize | None,
        channels: tuple[str, ...],
        notes: tuple[str, ...],
    ) -> Volume:
        """Return the volume in the content of a whole file, mapped or in memory.

        Slabs are views, or copies where the stored byte order is not native or pixels are not aligned.
        Raises ValueError where the placement reaches beyond the file.
        """
        pixels: Array = np.ndarray(self.shape, np.dtype(self.dtype), content, self.offset, self.strides)
        native = pixels.dtype.newbyteorder("=")

        def read(z0: int, z1: int) -> Array:
            return np.require(pixels[:, z0:z1], native, ["ALIGNED"])

        return Volume(self.shape, native, read, voxel_size, channels, notes)

    def stream_volume(
        self, file: int, voxel_size: VoxelSize | None, channels: tuple[str, ...], notes: tuple[str, ...]
    ) -> Volume:
        """Return a volume that reads each slab from an open file into new memory, through a descriptor of its own.

        Reading a slab raises BadFile where the file has become shorter. Raises ValueError where the placement reaches
        beyond the file.
        """
        stored = np.dtype(self.dtype)
        native = stored.newbyteorder("=")
        if min(self.offset, *self.strides) < 0 or self.offset + self._extent(0) > os.fstat(file).st_size:
            raise ValueError("the pixels lie outside of the file")
        file = os.dup(file)
        is_direct = stored == native and self.strides[2:] == Placement.dense(native, self.shape).strides[2:]

        def read(z0: int, z1: int) -> Array:
            slab = np.empty((self.shape[0], z1 - z0, *self.shape[2:]), native)
            block = np.empty(0 if is_direct else self._extent(2), np.uint8)
            for channel, z in np.ndindex(slab.shape[:2]):
                start = self.offset + channel * self.strides[0] + (z0 + z) * self.strides[1]
                _read_all(file, slab[channel, z] if is_direct else block, start)
                if not is_direct:
                    slab[channel, z] = np.ndarray(self.shape[2:], stored, block, 0, self.strides[2:])
            return slab

        weakref.finalize(read, os.close, file)
        return Volume(self.shape, native, read, voxel_size, channels, notes)

    def _extent(self, axis: int) -> int:
        """Return the bytes from the first to the end of the last pixel, over the axes from this one on."""
        steps = zip(self.shape[axis:], self.strides[axis:], strict=True)
        return sum((length - 1) * stride for length, stride in steps) + np.dtype(self.dtype).itemsize


def _read_all(file: int, into: Array, offset: int) -> None:
    rest = memoryview(into.data).cast("B")
    while rest:
        count = os.preadv(file, [rest], offset)
        if not count:
            raise BadFile("The file became shorter while it was read; send the request again once it is complete.")
        rest, offset = rest[count:], offset + count


def native_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a volume: as stored, in native byte order, uint8 (0 and 1) for 1-bit pixels."""
    native = stored.newbyteorder("=")
    return np.dtype(np.uint8) if native.kind == "b" else native


def part_shape(layout: Layout, part: Part) -> StackShape:
    """Return (C, Z, Y, X) of the selected part."""
    return len(part.channels), layout.length("Z"), layout.length("Y"), layout.length("X")


def check(image: StoredImage, structure: Structure, layout: Layout, part: Part, limit_bytes: int) -> None:
    """Check every page and offset that decoding uses, before any pixel is read.

    Raises TooLarge where the selection, or one page on the way to it, decodes to more than `limit_bytes`, and BadFile
    where a plane lies outside the file or has no pixels in it, and BadParameter where Y and X are not within a page.
    """
    needed = math.prod(part_shape(layout, part)) * native_dtype(image.dtype).itemsize
    check_size(max(needed, 0 if image.whole else image.page.nbytes), limit_bytes)
    if image.whole:
        _check_inside(image.page.dataoffsets[0] + math.prod(image.shape) * image.dtype.itemsize, structure, 0)
        return
    if len(image.pages) * image.page.size != math.prod(layout.shape):
        raise BadFile("The planes in the file do not add up to the stack that its metadata describe.")
    for index, stored in enumerate(image.pages):
        _check_page(image, stored, index, structure)
    # What holds for one time point holds for all.
    if locate(image, layout, replace(part, time=part.time or 0)) is None:
        _check_axes(image, layout)


def check_size(nbytes: int, limit_bytes: int, what: str = "The selected volume") -> None:
    """Raise TooLarge where `what` decodes to more than the limit."""
    if nbytes > limit_bytes:
        raise TooLarge(
            f"{what} decodes to {_format_bytes(nbytes)}; this service reads up to {_format_bytes(limit_bytes)}. Select"
            " a channel or a time point, crop it, or reduce it."
        )


def _check_axes(image: StoredImage, layout: Layout) -> None:
    """Raise BadParameter unless Y and X lie within a page, as pages are decoded one by one into planes."""
    inner = layout.axes[_count_outer(image, layout) :]
    if not {*"YX"} <= {*inner}:
        raise BadParameter(
            f"axes={layout.axes} has the pages of this file hold {inner or 'single pixels'}; each must hold Y and X."
            " Correct axes, or save the stack uncompressed."
        )


def _check_page(image: StoredImage, page: Page, index: int, structure: Structure) -> None:
    if page is image.page and 0 in _stated_lengths(page):
        raise BadFile(f"Plane {index} is said to take no bytes in the file. Export the file again.")
    if image.page.is_contiguous:
        if not page.dataoffsets:
            raise BadFile(f"Plane {index} has no pixels in the file.")
        stated = max(page.databytecounts[:1], default=0) if len(page.dataoffsets) == 1 else 0
        _check_inside(page.dataoffsets[0] + max(image.page.nbytes, stated), structure, index)
        return
    segments = math.prod(image.page.chunked)
    if min(len(page.dataoffsets), len(page.databytecounts)) < segments or 0 in page.dataoffsets[:segments]:
        raise BadFile(f"Plane {index} lacks some of its {segments} strips or tiles. Export the file again.")
    _check_inside(max(map(sum, zip(page.dataoffsets, page.databytecounts, strict=False))), structure, index)


def _stated_lengths(page: TiffPage) -> tuple[int, ...]:
    """Return the bytes of each strip or tile from the tag; tifffile would read 0 as the whole rest of the file."""
    tag = page.tags.get(_STRIP_BYTE_COUNTS) or page.tags.get(_TILE_BYTE_COUNTS)
    return () if tag is None else tuple(np.atleast_1d(tag.value).tolist())


def _check_inside(end: int, structure: Structure, index: int) -> None:
    if end > structure.size:
        raise BadFile(
            f"The file is cut short: plane {index} ends at byte {end}, but the file has {structure.size} bytes."
            " Copy or export it again."
        )


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count} bytes"


def locate(image: StoredImage, layout: Layout, part: Part) -> Placement | None:
    """Locate the selected pixels in the file, None where they are compressed or not at regular distances."""
    if part.time is None or not image.page.is_final or image.dtype.kind not in "uif":
        return None
    starts = [page.dataoffsets[0] for page in image.pages]
    pitch = _pitch(starts)
    if pitch is None:
        return None
    stride = _strides(image, layout, pitch)
    channel = _channel_stride(layout, part, stride)
    if channel is None:
        return None
    c, s = divmod(part.channels[0], layout.length("S"))
    first = {"T": part.time, "C": c, "S": s}
    offset = starts[0] + sum(index * stride.get(axis, 0) for axis, index in first.items())
    strides = (channel, stride.get("Z", 0), stride["Y"], stride["X"])
    return Placement(image.dtype.str, offset, part_shape(layout, part), strides)


def count_decoded_bytes(image: StoredImage, layout: Layout, part: Part) -> int:
    """Return the bytes that `decode` decompresses or copies on the way to the selected part, whole tiles and pages."""
    if image.whole:
        return math.prod(layout.shape) * image.dtype.itemsize
    page = image.page
    # A page may be far smaller than its tiles are.
    tiles = math.prod(page.chunked) * math.prod(page.chunks) * image.dtype.itemsize
    stored = tiles if page.is_tiled else page.nbytes
    return stored * sum(1 for _ in _frames(layout, part, _count_outer(image, layout)))


def _pitch(starts: Sequence[int]) -> int | None:
    """Return the distance of consecutive pages, 0 for a single one, None where it is irregular or negative."""
    distances = {b - a for a, b in itertools.pairwise(starts)} or {0}
    pitch = distances.pop()
    return None if distances or pitch < 0 else pitch


def _strides(image: StoredImage, layout: Layout, pitch: int) -> dict[str, int]:
    """Return the stride of every axis in bytes: within a page dense, across pages by their distance."""
    outer = _count_outer(image, layout)
    steps = [
        pitch * math.prod(layout.shape[index + 1 : outer])
        if index < outer
        else image.dtype.itemsize * math.prod(layout.shape[index + 1 :])
        for index in range(len(layout.shape))
    ]
    return dict(zip(layout.axes, steps, strict=True))


def _channel_stride(layout: Layout, part: Part, stride: dict[str, int]) -> int | None:
    """Return the stride of the selected channels in bytes, 0 for a single one, None where it is irregular."""
    samples = layout.length("S")
    if len(part.channels) == 1:
        return 0
    if samples == 1:
        return stride["C"]
    if layout.length("C") == 1 or stride["C"] == samples * stride["S"]:
        return stride["S"]
    return None


def _count_outer(image: StoredImage, layout: Layout) -> int:
    """Count the first dimensions of the layout, those across pages. Raises BadFile where a page splits one."""
    size = math.prod(layout.shape) if image.whole else image.page.size
    for outer in range(len(layout.shape) + 1):
        if math.prod(layout.shape[outer:]) == size:
            return outer
    raise BadFile("The axes of the stack run across the borders of its pages, which is not supported.")


def decode(tiff: TiffFile, image: StoredImage, layout: Layout, part: Part, store: Store) -> None:
    """Decode the selected part, each voxel once, and pass it to `store` in blocks [z, Y, X] of `native_dtype`.

    Raises BadFile, BadParameter, TooLarge.
    """
    lock = threading.RLock()
    dtype = native_dtype(image.dtype)
    _check_axes(image, layout)
    outer = _count_outer(image, layout)
    frames = list(_frames(layout, part, outer))
    is_single = len(frames) == 1

    def decode_frame(frame: _Frame) -> None:
        with translate_errors("decoding its pixels"):
            if image.whole:
                pixels = tiff.filehandle.read_array(image.dtype, math.prod(layout.shape), image.page.dataoffsets[0])
            else:
                pixels = image.pages[frame.index].asarray(lock=lock, maxworkers=_WORKERS if is_single else 1)
            pixels = pixels.reshape(layout.shape[outer:]).astype(dtype, copy=False)
        for channel, block in _blocks(pixels, layout, part, frame):
            store(channel, (frame.z, 0, 0), block)

    run_in_threads(decode_frame, frames, math.prod(part_shape(layout, part)) * dtype.itemsize)


def run_in_threads(decode: Callable[[T], None], parts: Sequence[T], nbytes: int, most: int = _WORKERS) -> None:
    """Decode the parts of a volume of this size, in as many threads as there are cores, or at `most`."""
    if min(len(parts), most) == 1 or nbytes <= _SINGLE_THREAD_BYTES:
        # Handing over the GIL takes longer than decoding such small planes.
        for part in parts:
            decode(part)
        return
    with ThreadPoolExecutor(min(_WORKERS, most)) as pool:
        for _ in pool.map(decode, parts):
            pass


@dataclass(frozen=True)
class _Frame:
    """One page to decode: its number, the axes inside it, and the position of its first voxel."""

    index: int
    axes: str
    channel: int
    sample: int
    z: int


def _frames(layout: Layout, part: Part, outer: int) -> Iterator[_Frame]:
    """Yield the pages that hold a part of the selection."""
    samples = layout.length("S")
    wanted = {divmod(number, samples) for number in part.channels}
    for index, position in enumerate(np.ndindex(layout.shape[:outer])):
        at = dict(zip(layout.axes, position, strict=False))
        if at.get("T", part.time) != part.time:
            continue
        if any(at.get("C", c) == c and at.get("S", s) == s for c, s in wanted):
            yield _Frame(index, layout.axes[outer:], at.get("C", 0), at.get("S", 0), at.get("Z", 0))


def _blocks(pixels: Array, layout: Layout, part: Part, frame: _Frame) -> Iterator[tuple[int, Array]]:
    """Yield the selected channels of a decoded page: (number among the selected, [z, Y, X])."""
    axes = frame.axes
    if "T" in axes:
        pixels = pixels.take(part.time or 0, axis=axes.index("T"))
        axes = axes.replace("T", "")
    for axis in "CSZ":
        if axis not in axes:
            pixels = pixels[np.newaxis]
            axes = axis + axes
    pixels = pixels.transpose([axes.index(axis) for axis in "CSZYX"])
    for position, number in enumerate(part.channels):
        c, s = divmod(number, layout.length("S"))
        c, s = c - frame.channel, s - frame.sample
        if 0 <= c < pixels.shape[0] and 0 <= s < pixels.shape[1]:
            yield position, np.ascontiguousarray(pixels[c, s])
