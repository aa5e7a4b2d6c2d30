"""Locate the selected pixels in a TIFF, and decode pixels that are compressed or scattered across the file.

Pages are decoded in as many threads as there are cores. Each thread holds one page in memory.
"""

from __future__ import annotations

import bisect
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
from service.formats.axes import Layout, StackPart
from service.formats.placement import Placement, StoreBlock, check_size, get_native_dtype
from service.formats.tiff.ifd import Structure
from service.formats.tiff.planes.page_loader import Page, get_keyframe
from service.formats.tiff.planes.stored_image import StoredImage, check_sub_pages, translate_errors


def check_image(image: StoredImage, structure: Structure, layout: Layout, part: StackPart, limit_bytes: int) -> None:
    """Validate every page and offset that decoding uses, before any pixels are read.

    Raises TooLarge if the selection, or a single page of it, decodes to more than `limit_bytes`, BadFile if a plane has
    no pixels or is outside the file, or if other pages may be planes, and BadParameter if Y and X are not in a page.
    """
    check_sub_pages(image.page)
    selection_bytes = math.prod(axes.get_part_shape(layout, part)) * get_native_dtype(image.dtype).itemsize
    check_size(max(selection_bytes, 0 if image.is_contiguous else image.page.nbytes), limit_bytes)
    if image.is_contiguous:
        _check_inside_file(image.page.dataoffsets[0] + math.prod(image.shape) * image.dtype.itemsize, structure, 0)
        return
    if len(image.pages) * image.page.size != math.prod(layout.shape):
        raise BadFile(
            "The planes in the file do not match the size of the stack in its metadata. Export the file again."
        )
    for index, page in enumerate(image.pages):
        _check_page(page, index, structure)
    _check_byte_counts(image, structure)
    # All time points have the same layout, so it is enough to check one.
    if locate(image, layout, replace(part, time=part.time or 0)) is None:
        _check_axes(image, layout)


def _check_axes(image: StoredImage, layout: Layout) -> None:
    """Raise BadParameter unless Y and X lie within a page, because each page is decoded to complete planes."""
    inner_axes = layout.axes[_count_outer_axes(image, layout) :]
    if not {*"YX"} <= {*inner_axes}:
        raise BadParameter(
            f"axes={layout.axes} is not possible: each page of this file would contain"
            f" {inner_axes or 'a single pixel'}, but it must contain Y and X. Correct the axes, or save the stack"
            " uncompressed.",
            parameter="axes",
        )


def _check_page(page: Page, index: int, structure: Structure) -> None:
    keyframe = get_keyframe(page)
    if structure.byte_counts.get(page.offset) == 0:
        raise BadFile(f"Plane {index} has no pixels in the file: its byte count is 0. Export the file again.")
    if keyframe.is_contiguous:
        if not page.dataoffsets:
            raise BadFile(f"Plane {index} has no pixels in the file. Export the file again.")
        byte_count = max(page.databytecounts[:1], default=0) if len(page.dataoffsets) == 1 else 0
        _check_inside_file(page.dataoffsets[0] + max(keyframe.nbytes, byte_count), structure, index)
        return
    segment_count = math.prod(keyframe.chunked)
    segments = list(zip(page.dataoffsets, page.databytecounts, strict=False))[:segment_count]
    if len(segments) < segment_count or not all(map(all, segments)):
        raise BadFile(
            f"Some of the {segment_count} strips or tiles of plane {index} are missing. Export the file again."
        )
    _check_inside_file(max(map(sum, zip(page.dataoffsets, page.databytecounts, strict=False))), structure, index)


def _check_byte_counts(image: StoredImage, structure: Structure) -> None:
    """Raise BadFile if an uncompressed plane has fewer bytes than pixels, and other data follows.

    Some programs store byte counts that are too small, although the pixels are complete. Then no other data begins
    where the pixels should be.
    """
    incomplete_pages = [
        (index, page)
        for index, page in enumerate(image.pages)
        if page.is_contiguous and structure.byte_counts.get(page.offset, page.nbytes) < page.nbytes
    ]
    if not incomplete_pages:
        return
    starts = sorted({*structure.offsets, *itertools.chain(*(page.dataoffsets for page in image.pages))})
    for index, page in incomplete_pages:
        following = starts[bisect.bisect_right(starts, page.dataoffsets[0]) :][:1]
        if following and following[0] < page.dataoffsets[0] + page.nbytes:
            raise BadFile(
                f"Plane {index} is incomplete: it has {structure.byte_counts[page.offset]} of {page.nbytes} bytes."
                " Export the file again."
            )


def _check_inside_file(end: int, structure: Structure, index: int) -> None:
    if end > structure.size:
        raise BadFile(
            f"The file is truncated: plane {index} ends at byte {end}, but the file has {structure.size} bytes."
            " Copy or export it again."
        )


def locate(image: StoredImage, layout: Layout, part: StackPart) -> Placement | None:
    """Locate the selected pixels in the file. Return None if they are compressed or do not have constant strides."""
    is_final = all(page.is_final for page in image.keyframes)
    if part.time is None or not is_final or image.dtype.kind not in "uif":
        return None
    page_offsets = [page.dataoffsets[0] for page in image.pages]
    page_distance = _find_page_distance(page_offsets)
    if page_distance is None:
        return None
    axis_strides = _compute_strides(image, layout, page_distance)
    channel_stride = _find_channel_stride(layout, part, axis_strides)
    if channel_stride is None:
        return None
    c, s = divmod(part.channels[0], layout.get_length("S"))
    indices = {"T": part.time, "C": c, "S": s}
    offset = page_offsets[0] + sum(index * axis_strides.get(axis, 0) for axis, index in indices.items())
    strides = (channel_stride, axis_strides.get("Z", 0), axis_strides["Y"], axis_strides["X"])
    return Placement(image.dtype.str, offset, axes.get_part_shape(layout, part), strides)


def count_decoded_bytes(image: StoredImage, layout: Layout, part: StackPart) -> int:
    """Return the number of bytes that `decode` decompresses or copies: whole tiles or pages."""
    if image.is_contiguous:
        return math.prod(layout.shape) * image.dtype.itemsize
    page_bytes = max(_count_page_bytes(page) for page in image.keyframes)
    return page_bytes * sum(1 for _ in _iterate_pages(layout, part, _count_outer_axes(image, layout)))


def _count_page_bytes(page: TiffPage) -> int:
    # A page can be much smaller than its tiles.
    tile_bytes = math.prod(page.chunked) * math.prod(page.chunks) * np.dtype(page.dtype).itemsize
    return tile_bytes if page.is_tiled else page.nbytes


def _find_page_distance(page_offsets: Sequence[int]) -> int | None:
    """Return the distance between consecutive pages in bytes (0 for one page), or None if irregular or negative."""
    distances = {b - a for a, b in itertools.pairwise(page_offsets)} or {0}
    page_distance = distances.pop()
    return None if distances or page_distance < 0 else page_distance


def _compute_strides(image: StoredImage, layout: Layout, page_distance: int) -> dict[str, int]:
    """Return the stride of each axis in bytes: contiguous within a page, multiples of the page distance outside it."""
    outer_count = _count_outer_axes(image, layout)
    strides = [
        page_distance * math.prod(layout.shape[index + 1 : outer_count])
        if index < outer_count
        else image.dtype.itemsize * math.prod(layout.shape[index + 1 :])
        for index in range(len(layout.shape))
    ]
    return dict(zip(layout.axes, strides, strict=True))


def _find_channel_stride(layout: Layout, part: StackPart, axis_strides: dict[str, int]) -> int | None:
    """Return the stride of the selected channels in bytes, 0 for a single channel, or None if it is irregular."""
    sample_count = layout.get_length("S")
    if len(part.channels) == 1:
        return 0
    if sample_count == 1:
        return axis_strides["C"]
    if layout.get_length("C") == 1 or axis_strides["C"] == sample_count * axis_strides["S"]:
        return axis_strides["S"]
    return None


def _count_outer_axes(image: StoredImage, layout: Layout) -> int:
    """Count the leading axes that run across pages. Raises BadFile if an axis is only partly within a page."""
    page_size = math.prod(layout.shape) if image.is_contiguous else image.page.size
    for outer_count in range(len(layout.shape) + 1):
        if math.prod(layout.shape[outer_count:]) == page_size:
            return outer_count
    raise BadFile("The pages of the file do not match the axes of the stack. Export the file again.")


def decode(tiff: TiffFile, image: StoredImage, layout: Layout, part: StackPart, store_block: StoreBlock) -> None:
    """Decode each voxel of the selected part once, and pass blocks [z, Y, X] to `store_block` in the volume's dtype.

    Raises BadFile, BadParameter, TooLarge.
    """
    lock = threading.RLock()
    dtype = get_native_dtype(image.dtype)
    _check_axes(image, layout)
    outer_count = _count_outer_axes(image, layout)
    pages_to_decode = list(_iterate_pages(layout, part, outer_count))
    is_single_page = len(pages_to_decode) == 1

    def decode_page(page_to_decode: _PageToDecode) -> None:
        with translate_errors("decoding the pixels"):
            if image.is_contiguous:
                pixels = tiff.filehandle.read_array(image.dtype, math.prod(layout.shape), image.page.dataoffsets[0])
            else:
                pixels = image.pages[page_to_decode.index].asarray(
                    lock=lock, maxworkers=host.CORE_COUNT if is_single_page else 1
                )
            pixels = pixels.reshape(layout.shape[outer_count:]).astype(dtype, copy=False)
        for channel, block in _select_blocks(pixels, layout, part, page_to_decode):
            store_block(channel, (page_to_decode.z, 0, 0), block)

    host.run_in_threads(decode_page, pages_to_decode, math.prod(axes.get_part_shape(layout, part)) * dtype.itemsize)


@dataclass(frozen=True)
class _PageToDecode:
    """A page to decode: its index, the axes inside it, and the channel, sample and plane where it begins."""

    index: int
    axes: str
    channel: int
    sample: int
    z: int


def _iterate_pages(layout: Layout, part: StackPart, outer_count: int) -> Iterator[_PageToDecode]:
    """Yield the pages that contain a part of the selection."""
    sample_count = layout.get_length("S")
    selected_channels = {divmod(channel_number, sample_count) for channel_number in part.channels}
    for index, position in enumerate(np.ndindex(layout.shape[:outer_count])):
        indices = dict(zip(layout.axes, position, strict=False))
        if indices.get("T", part.time) != part.time:
            continue
        if any(indices.get("C", c) == c and indices.get("S", s) == s for c, s in selected_channels):
            yield _PageToDecode(
                index, layout.axes[outer_count:], indices.get("C", 0), indices.get("S", 0), indices.get("Z", 0)
            )


def _select_blocks(
    pixels: Array, layout: Layout, part: StackPart, page_to_decode: _PageToDecode
) -> Iterator[tuple[int, Array]]:
    """Yield (position in the selection, pixels [z, Y, X]) for each selected channel of a decoded page."""
    letters = page_to_decode.axes
    if "T" in letters:
        pixels = pixels.take(part.time or 0, axis=letters.index("T"))
        letters = letters.replace("T", "")
    pixels = axes.expand_to_cszyx(pixels, letters)
    for channel, index in axes.find_channels(layout, part, (page_to_decode.channel, page_to_decode.sample), pixels):
        yield channel, np.ascontiguousarray(pixels[index])
