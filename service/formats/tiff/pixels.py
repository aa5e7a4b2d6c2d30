"""Location of the selected pixels in a TIFF, and decoding of those that are compressed or scattered.

Pixels are decoded page by page, in as many threads as there are cores, with no more pages than threads in memory.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tifffile import TiffFile, TiffPage

from service.core.errors import BadFile, BadParameter
from service.core.hardware import host
from service.core.types import Array
from service.formats import axes
from service.formats.axes import Layout, Part
from service.formats.placement import Placement, StoreBlock, check_size, native_dtype
from service.formats.tiff.ifd import Structure
from service.formats.tiff.series import Page, StoredImage, translate_errors

_STRIP_BYTE_COUNTS, _TILE_BYTE_COUNTS = 279, 325


def check(image: StoredImage, structure: Structure, layout: Layout, part: Part, limit_bytes: int) -> None:
    """Check every page and offset that decoding uses, before any pixel is read.

    Raises TooLarge where the selection, or one page on the way to it, decodes to more than `limit_bytes`, and BadFile
    where a plane lies outside the file or has no pixels in it, and BadParameter where Y and X are not within a page.
    """
    needed = math.prod(axes.part_shape(layout, part)) * native_dtype(image.dtype).itemsize
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


def _check_axes(image: StoredImage, layout: Layout) -> None:
    """Raise BadParameter unless Y and X lie within a page, as pages are decoded one by one into planes."""
    inner = layout.axes[_count_outer(image, layout) :]
    if not {*"YX"} <= {*inner}:
        raise BadParameter(
            f"axes={layout.axes} has the pages of this file hold {inner or 'single pixels'}; each must hold Y and X."
            " Correct axes, or save the stack uncompressed.",
            parameter="axes",
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
    return Placement(image.dtype.str, offset, axes.part_shape(layout, part), strides)


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


def decode(tiff: TiffFile, image: StoredImage, layout: Layout, part: Part, store: StoreBlock) -> None:
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
                pixels = image.pages[frame.index].asarray(lock=lock, maxworkers=host.CORES if is_single else 1)
            pixels = pixels.reshape(layout.shape[outer:]).astype(dtype, copy=False)
        for channel, block in _blocks(pixels, layout, part, frame):
            store(channel, (frame.z, 0, 0), block)

    host.run_in_threads(decode_frame, frames, math.prod(axes.part_shape(layout, part)) * dtype.itemsize)


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
    letters = frame.axes
    if "T" in letters:
        pixels = pixels.take(part.time or 0, axis=letters.index("T"))
        letters = letters.replace("T", "")
    pixels = axes.expand(pixels, letters)
    for number, place in axes.find_channels(layout, part, (frame.channel, frame.sample), pixels):
        yield number, np.ascontiguousarray(pixels[place])
