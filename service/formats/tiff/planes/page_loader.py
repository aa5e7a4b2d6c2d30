"""Find the planes among the pages of a TIFF, and detect pages that differ.

Pages of one size and data type are the planes of one stack, whatever else differs between them: compression, strips,
color interpretation, descriptions. Each page is decoded with its own tags. Reduced copies and masks are not planes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from tifffile import TiffFile, TiffFrame, TiffPage

from service.core.errors import BadFile
from service.formats.tiff.ifd import Structure

Page = TiffPage | TiffFrame

# Number of different page formats and of page ranges that an error message lists.
_MAX_LISTED_FORMATS = 3
_MAX_LISTED_RANGES = 3


class PageFormat(NamedTuple):
    """Axes, shape and data type of a page. Pages with the same format can be the planes of one stack."""

    axes: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def from_page(cls, page: Page) -> PageFormat:
        """Return the format of a page."""
        keyframe = get_keyframe(page)
        dtype = f"{keyframe.bitspersample}-bit" if keyframe.dtype is None else np.dtype(keyframe.dtype).name
        return cls(keyframe.axes, tuple(keyframe.shape), dtype)

    def __str__(self) -> str:
        lengths = " x ".join(str(n) for axis, n in zip(self.axes, self.shape, strict=True) if axis != "S")
        sample_count = math.prod(n for axis, n in zip(self.axes, self.shape, strict=True) if axis == "S")
        samples = f" with {sample_count} samples ({self.axes})" if "S" in self.axes else ""
        return f"{lengths} pixels{samples} of type {self.dtype}"


def get_keyframe(page: Page) -> TiffPage:
    """Return the page whose tags apply to a page. Raises BadFile if there is none."""
    keyframe = page.keyframe
    if keyframe is None:
        raise BadFile("The file is damaged: a page has no tags. Export it again.")
    return keyframe


def load_pages(tiff: TiffFile, structure: Structure, indices: Iterable[int]) -> tuple[Page, ...]:
    """Read pages by their indices. Pages with the same layout share the tags of the first of them."""
    keyframes: dict[bytes, TiffPage] = {}
    return tuple(_load_page(tiff, structure, index, keyframes) for index in indices)


def _load_page(tiff: TiffFile, structure: Structure, index: int, keyframes: dict[bytes, TiffPage]) -> Page:
    offset = structure.offsets[index]
    layout = structure.layouts[offset]
    keyframe = keyframes.get(layout)
    if keyframe is not None:
        # The number of strips is not a part of the layout. If it differs, `TiffFrame` raises RuntimeError.
        try:
            frame = TiffFrame(tiff, index, offset=offset, keyframe=keyframe)
        except RuntimeError:
            frame = None
        if frame is not None and _has_same_strip_distances(frame, keyframe):
            return frame
    if index == 0:
        page = tiff.pages.first
    else:
        tiff.filehandle.seek(offset)
        page = TiffPage(tiff, index)
    return keyframes.setdefault(layout, page) if keyframe is None else page


def _has_same_strip_distances(frame: TiffFrame, keyframe: TiffPage) -> bool:
    """Return whether a page is contiguous if the page with its tags is. tifffile assumes this."""
    if len(keyframe.dataoffsets) == 1 or not keyframe.is_contiguous:
        return True
    return all(
        a - frame.dataoffsets[0] == b - keyframe.dataoffsets[0]
        for a, b in zip(frame.dataoffsets, keyframe.dataoffsets, strict=True)
    )


def restore_own_tags(tiff: TiffFile, structure: Structure, pages: Sequence[Page]) -> tuple[Page, ...]:
    """Replace pages that would be decoded with the tags of a page of another layout. Raises BadFile if formats differ.

    tifffile assigns the tags of the first page of an image to all its pages.
    """
    layouts = structure.layouts
    first_layout = layouts.get(get_keyframe(pages[0]).offset)
    if all(layouts.get(page.offset, first_layout) == first_layout for page in pages):
        return tuple(pages)
    indices = {offset: index for index, offset in enumerate(structure.offsets)}
    keyframes: dict[bytes, TiffPage] = {}
    loaded_pages = tuple(
        _load_page(tiff, structure, indices[page.offset], keyframes) if page.offset in indices else page
        for page in pages
    )
    require_same_format(loaded_pages)
    return loaded_pages


def find_planes(tiff: TiffFile, structure: Structure) -> tuple[Page, ...]:
    """Return all pages except reduced copies and masks. If all pages are reduced copies or masks, return them."""
    pages = load_pages(tiff, structure, range(len(structure.offsets)))
    return tuple(page for page in pages if not _is_reduced_or_mask(page)) or pages


def count_planes(tiff: TiffFile, structure: Structure) -> int:
    """Return the number of planes like `find_planes`, without reading pages if all have the same layout."""
    if len(set(structure.layouts.values())) == 1:
        return len(structure.offsets)
    return len(find_planes(tiff, structure))


def _is_reduced_or_mask(page: Page) -> bool:
    keyframe = get_keyframe(page)
    return bool(keyframe.is_reduced or keyframe.is_mask)


def group_by_format(pages: Iterable[Page]) -> dict[PageFormat, list[Page]]:
    """Group pages by their format."""
    groups: dict[PageFormat, list[Page]] = {}
    formats: dict[int, PageFormat] = {}
    for page in pages:
        keyframe = get_keyframe(page)
        if id(keyframe) not in formats:
            formats[id(keyframe)] = PageFormat.from_page(keyframe)
        groups.setdefault(formats[id(keyframe)], []).append(page)
    return groups


def require_same_format(pages: Iterable[Page]) -> None:
    """Raise BadFile unless all pages have the same size and data type."""
    groups = group_by_format(pages)
    if len(groups) == 1:
        return
    descriptions = [f"{_format_numbers(group)}: {page_format}" for page_format, group in groups.items()]
    more = f"; and {len(groups) - _MAX_LISTED_FORMATS} more formats" if len(groups) > _MAX_LISTED_FORMATS else ""
    raise BadFile(
        "The pages of the file differ in size or type, so they are not the planes of one stack"
        f" ({'; '.join(descriptions[:_MAX_LISTED_FORMATS])}{more}). Save the planes as a file without the other pages."
    )


def _format_numbers(pages: Sequence[Page]) -> str:
    """Return the numbers of pages, such as "pages 0 to 4, 7"."""
    numbers = sorted(page.index for page in pages)
    # Consecutive numbers have the same distance from their positions.
    ranges = [
        [number for _, number in group]
        for _, group in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ]
    texts = [f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0]) for numbers in ranges]
    more = " and others" if len(texts) > _MAX_LISTED_RANGES else ""
    return f"page{'s' * (len(numbers) > 1)} {', '.join(texts[:_MAX_LISTED_RANGES])}{more}"
