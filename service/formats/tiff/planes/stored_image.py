"""An image as stored in a TIFF, and images whose pages are arranged without tifffile.

These are plain pages, pages that were written one by one or differ in their tags, and stacks with missing planes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from tifffile import TiffFile, TiffFrame, TiffPage

from service.core.errors import BadFile, TooLarge
from service.core.quantities import TimeInterval
from service.core.types import Array, Selection
from service.formats import sampling
from service.formats.sampling import Calibration
from service.formats.tiff import calibration, metadata
from service.formats.tiff.ifd import Structure
from service.formats.tiff.planes import missing, page_loader, scanimage
from service.formats.tiff.planes.page_loader import Page, get_keyframe

# Errors that tifffile, its codecs and NumPy raise for damaged files.
DECODING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


@contextmanager
def translate_errors(activity: str) -> Iterator[None]:
    """Translate errors from tifffile, its codecs and NumPy to BadFile, and MemoryError to TooLarge."""
    try:
        yield
    except MemoryError as error:
        raise TooLarge(
            f"{activity.capitalize()} exceeds the memory limit for one file. Crop or downsample the stack."
        ) from error
    except DECODING_ERRORS as error:
        reason = " ".join(str(error).split())[:160]
        raise BadFile(f"The file is damaged or not supported: {activity} failed ({reason or error!r}).") from error


@dataclass(frozen=True)
class StoredImage:
    """One image as stored in the file.

    axes              one letter per stored dimension, slowest first, including dimensions of length 1
    shape             length of each stored dimension
    pages             pages in C order of the leading dimensions, all with the same size and data type
    is_contiguous     whether all pixels follow the first page's offset without gaps; if so, `pages` has only that page
    metadata_problem  clause that explains why the container's metadata cannot be used, or ""
    channel_names     channel names in the file; there may be fewer or more names than channels
    colors            channel colors as in `Description.colours`; there may be fewer or more colors than channels
    scenes            names of the images from which one can be selected, as in `Description.scenes`
    """

    container: str
    axes: str
    shape: tuple[int, ...]
    pages: tuple[Page, ...]
    is_contiguous: bool = False
    metadata_problem: str = ""
    channel_names: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    calibration: Calibration = sampling.UNKNOWN_CALIBRATION
    time_interval: TimeInterval | None = None
    notes: tuple[str, ...] = ()
    scenes: tuple[str, ...] = ()

    @property
    def page(self) -> TiffPage:
        """First page. Its size and data type apply to all pages."""
        return get_keyframe(self.pages[0])

    @property
    def keyframes(self) -> tuple[TiffPage, ...]:
        """Pages whose tags apply to the pages, without duplicates."""
        return tuple({id(page.keyframe): get_keyframe(page) for page in self.pages}.values())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the pixels, in the byte order of the file."""
        return np.dtype(self.page.dtype).newbyteorder(self.page.parent.byteorder)


def read_plain_pages(tiff: TiffFile, structure: Structure) -> StoredImage:
    """Return all planes as one image. Raises BadFile if planes differ in size or data type.

    In whole-slide images, the largest image is used. The other pages are overviews.
    """
    planes = page_loader.find_planes(tiff, structure)
    if not (tiff.is_svs or tiff.is_qpi):
        page_loader.require_same_format(planes)
    groups = [tuple(group) for group in page_loader.group_by_format(planes).values()]
    pages = max(groups, key=lambda group: len(group) * _count_pixels(get_keyframe(group[0])))
    page, page_count = get_keyframe(pages[0]), len(pages)
    return StoredImage(
        container="TIFF",
        axes="I" * (page_count > 1) + page.axes,
        shape=(page_count,) * (page_count > 1) + page.shape,
        pages=pages,
        notes=make_choice_notes(len(groups), ""),
    )


def check_sub_pages(page: TiffPage) -> None:
    """Raise BadFile if a page refers to other planes of its size. Usually, it refers to reduced copies of itself."""
    sub_pages: list[TiffPage] = []
    with suppress(*DECODING_ERRORS):
        sub_pages += [sub_page.aspage() for sub_page in page.pages or ()]
    count = len(page_loader.group_by_format(sub_pages).get(page_loader.PageFormat.from_page(page), ()))
    if count and not page.is_reduced:
        raise BadFile(
            f"The first page of the file refers to {count} other images of the same size (SubIFDs), which are not read."
            " They may be planes of the stack. Save the planes as one page each."
        )


def make_choice_notes(image_count: int, image_name: str) -> tuple[str, ...]:
    """Return the note about the choice of the largest image, if there are several."""
    if image_count == 1:
        return ()
    return (
        f"The file contains {image_count} images. The largest{f', {image_name!r},' if image_name else ''} is used.",
    )


def _count_pixels(page: TiffPage) -> int:
    return math.prod(n for axis, n in zip(page.axes, page.shape, strict=True) if axis != "S")


def add_metadata(image: StoredImage, tiff: TiffFile, kind: str) -> StoredImage:
    """Return an image with the metadata of its container."""
    return replace(
        image,
        container=metadata.get_container_name(tiff, kind),
        channel_names=metadata.read_channel_names(tiff, kind),
        colors=metadata.read_channel_colors(tiff, kind),
        calibration=calibration.read_container_calibration(tiff, image.page, kind),
        time_interval=metadata.find_time_interval(tiff, kind),
    )


class DeclaredStack(NamedTuple):
    """The planes that the metadata of a container declares.

    kind   kind of the container, a key of `metadata.CONTAINER_NAMES`
    axes   axes of the planes, slowest first
    shape  lengths of these axes
    """

    kind: str
    axes: str
    shape: tuple[int, ...]

    @property
    def plane_count(self) -> int:
        """Number of declared planes."""
        return math.prod(self.shape)


def needs_own_order(tiff: TiffFile, structure: Structure, declared: DeclaredStack) -> bool:
    """Return whether tifffile might lose pages, or decode them with the tags of another page.

    tifffile reads each page with its own description as an image, and uses the tags of the first page for all pages.
    """
    if len(set(structure.layouts.values())) > 1:
        return declared.kind == "imagej" or tiff.pages.first.subifds is None
    page_count = len(structure.offsets)
    if declared.kind == "shaped":
        return 1 < page_count != declared.plane_count
    return 1 < declared.plane_count < page_count


def read_separate_pages(
    tiff: TiffFile, structure: Structure, declared: DeclaredStack, selection: Selection
) -> StoredImage:
    """Read pages that were written one by one, or that differ in their tags."""
    kind, axes, shape = declared
    image = read_plain_pages(tiff, structure)
    container, page_axes, page_shape = metadata.CONTAINER_NAMES[kind], image.page.axes, image.page.shape
    plane_count, expected_count = len(image.pages), math.prod(shape)
    headers = metadata.read_shaped_headers(image.pages) if kind == "shaped" else []
    described_counts = _count_described_planes(image, headers) or {expected_count}
    image_count, remainder = divmod(plane_count, expected_count)
    is_series = bool(headers) and described_counts == {expected_count} != {1} and not remainder
    if plane_count == expected_count:
        image = replace(image, axes=axes + page_axes, shape=shape + page_shape)
    elif is_series and selection.axes != "Z" + page_axes:
        image = replace(image, axes=f"I{axes}{page_axes}", shape=(image_count, *shape, *page_shape))
    elif described_counts != {1}:
        problem = f"its metadata ({container}) contradicts its pages, because it describes only a part of them"
        image = replace(image, metadata_problem=problem)
    return add_metadata(image, tiff, kind)


def _count_described_planes(image: StoredImage, headers: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the numbers of planes of the images that the headers describe."""
    if any(header.get("truncated") for header in headers):
        raise BadFile("The file has several images with several planes per page. Save the planes as one stack.")
    return {math.prod(header["shape"]) // max(1, image.page.size) for header in headers}


def arrange_planes(
    tiff: TiffFile,
    declared: DeclaredStack,
    positions: Array,
    pages: Sequence[Page],
    selection: Selection,
) -> StoredImage:
    """Arrange pages by their positions along the declared axes.

    Raises BadFile if planes are missing, unless the selection allows it.
    """
    kind, axes, shape = declared
    flat_positions, first_indices = np.unique(np.ravel_multi_index(tuple(positions.T), shape), return_index=True)
    positions, pages = positions[first_indices], [pages[index] for index in first_indices]
    page_loader.require_same_format(pages)
    declared_count, stored_count, notes = math.prod(shape), len(flat_positions), list[str]()
    if stored_count < declared_count:
        container = metadata.get_container_name(tiff, kind)
        lengths = missing.crop_to_complete(axes, shape, positions)
        if not (selection.allow_incomplete and all(lengths)):
            raise missing.make_incomplete_error(container, declared_count, stored_count)
        is_used = np.all(positions < np.array(lengths), axis=1)
        pages = [pages[index] for index in np.flatnonzero(is_used)]
        shape = lengths
        notes.append(missing.make_incomplete_note(container, declared_count, stored_count, len(pages)))
    page = get_keyframe(pages[0])
    image = StoredImage("", axes + page.axes, shape + page.shape, tuple(pages), notes=tuple(notes))
    return add_metadata(image, tiff, kind)


def read_micromanager_pages(tiff: TiffFile, structure: Structure, selection: Selection) -> StoredImage:
    """Read a Micro-Manager file without an index of its planes: an NDTiff, or an acquisition that did not end."""
    pages = read_plain_pages(tiff, structure).pages
    axes, shape, positions = metadata.read_micromanager_positions(tiff, pages)
    if positions is None:
        declared_count = math.prod(shape)
        problem = f"its metadata ({metadata.get_container_name(tiff, 'mmstack')}) does not describe its pages"
        if len(pages) < declared_count and not selection.allow_incomplete:
            container = metadata.get_container_name(tiff, "mmstack")
            raise missing.make_incomplete_error(container, declared_count, len(pages))
        image = add_metadata(read_plain_pages(tiff, structure), tiff, "mmstack")
        return replace(image, metadata_problem=problem)
    return arrange_planes(tiff, DeclaredStack("mmstack", axes, shape), positions, pages, selection)


def read_micromanager_tags(tiff: TiffFile, structure: Structure) -> StoredImage:
    """Read pages of Micro-Manager in a file without its header. All positions must occur, because none are declared."""
    image = read_plain_pages(tiff, structure)
    axes, shape, positions = metadata.read_micromanager_positions(tiff, image.pages)
    if positions is None or math.prod(shape) != len(positions):
        return replace(image, metadata_problem="the positions in its pages (Micro-Manager) are not those of one stack")
    return arrange_planes(tiff, DeclaredStack("mmstack", axes, shape), positions, image.pages, Selection())


def read_scanimage_pages(tiff: TiffFile, structure: Structure, selection: Selection) -> StoredImage | None:
    """Read a ScanImage file, or return None if its header does not specify the order of the pages."""
    layout = scanimage.parse_layout(calibration.read_scanimage_header(tiff))
    if layout is None:
        return None
    image = read_plain_pages(tiff, structure)
    if not scanimage.starts_with_volume(layout, tiff.pages.first.description):
        problem = "its metadata (ScanImage TIFF) says that the file begins in the middle of a volume"
        return add_metadata(replace(image, metadata_problem=problem), tiff, "scanimage")
    axes, shape, positions, indices = scanimage.find_positions(layout, len(image.pages))
    pages = [image.pages[index] for index in indices]
    return arrange_planes(tiff, DeclaredStack("scanimage", axes, shape), positions, pages, selection)


def is_in_page_order(tiff: TiffFile, structure: Structure) -> bool:
    """Return whether the pixels of the last page are where they are in a file with contiguous pixels.

    tifffile does not read the positions of the pages of large stacks.
    """
    if len(structure.offsets) == 1:
        return True
    last_index = len(structure.offsets) - 1
    first_page, last_page = page_loader.load_pages(tiff, structure, [0, last_index])
    return bool(last_page.dataoffsets[:1] == (first_page.dataoffsets[0] + last_index * first_page.nbytes,))


def load_pages_at(tiff: TiffFile, structure: Structure, offsets: Sequence[int]) -> tuple[Page, ...]:
    """Return the pages whose directories are at these offsets."""
    indices = {offset: index for index, offset in enumerate(structure.offsets)}
    if not set(offsets) <= set(indices):
        raise BadFile("The index of the planes points to pages that do not exist. Export the file again.")
    return page_loader.load_pages(tiff, structure, [indices[offset] for offset in offsets])


def count_stored_planes(tiff: TiffFile, structure: Structure) -> int:
    """Count the planes in the file. ImageJ and tifffile may store all planes after the tags of a single page."""
    page = tiff.pages.first
    if len(structure.offsets) == 1 and page.is_final and page.nbytes:
        return max(1, (structure.size - page.dataoffsets[0]) // page.nbytes)
    return page_loader.count_planes(tiff, structure)


def list_stored_planes(tiff: TiffFile, structure: Structure) -> Sequence[Page]:
    """Return the planes that `count_stored_planes` counts."""
    page, count = tiff.pages.first, count_stored_planes(tiff, structure)
    if len(structure.offsets) > 1 or count == 1:
        return page_loader.find_planes(tiff, structure)
    offsets = range(page.dataoffsets[0], structure.size, page.nbytes)[:count]
    frames = [
        TiffFrame(tiff, index, dataoffsets=(offset,), databytecounts=(page.nbytes,), keyframe=page)
        for index, offset in enumerate(offsets)
    ]
    return [page, *frames[1:]]
