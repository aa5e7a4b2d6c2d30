"""Choose the image in a TIFF and locate its planes: OME-TIFF, ImageJ, TIFFs from microscope vendors, and plain pages.

tifffile parses tags and containers. Its results are checked against the pages of the file. Other files are
never opened.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np
from tifffile import TiffFile, TiffPage, TiffPageSeries

from service.core.errors import BadFile
from service.core.types import Selection
from service.formats import sampling
from service.formats.axes import select_scene
from service.formats.sampling import Calibration
from service.formats.tiff import calibration, metadata
from service.formats.tiff.ifd import Structure
from service.formats.tiff.imagej_metadata import PROVENANCE_NAMESPACE, make_gray_value_notes
from service.formats.tiff.ome import document, parser
from service.formats.tiff.ome.parser import OmeImage
from service.formats.tiff.planes import page_loader
from service.formats.tiff.planes.decompression import check_compression, ignore_padding
from service.formats.tiff.planes.page_loader import Page, PageFormat, get_keyframe
from service.formats.tiff.planes.page_names import interpret_page_tags
from service.formats.tiff.planes.stored_image import (
    DeclaredStack,
    StoredImage,
    add_metadata,
    arrange_planes,
    count_stored_planes,
    is_in_page_order,
    list_stored_planes,
    load_pages_at,
    make_choice_notes,
    needs_own_order,
    read_micromanager_pages,
    read_micromanager_tags,
    read_plain_pages,
    read_scanimage_pages,
    read_separate_pages,
)

# tifffile logs defects and works around them. This module rejects files with defects instead.
# tifffile decodes integers of these sizes from the most significant bit on. Few programs write them in this order.
_UNSUPPORTED_BITS = frozenset(range(17, 32)) - {24}

# Compressions of images with 1 bit per pixel (CCITT).
_BILEVEL_COMPRESSIONS = (2, 3, 4)

logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)
ignore_padding()


def open_pages(stream: BinaryIO) -> TiffFile:
    """Open a TIFF from a stream without its path, so that tifffile cannot find or open neighboring files."""
    # OME-XML and NDTiff refer to other files, NDPI has its own page offsets, and EER requires a codec.
    return TiffFile(stream, name="stack.tif", is_ome=False, is_ndtiff=False, is_ndpi=False, is_eer=False)


def find_image(tiff: TiffFile, structure: Structure, selection: Selection) -> StoredImage:
    """Find the image in a file. If there are several, choose the largest, or the first of several equally large ones.

    If the selection has axes, a container whose metadata cannot be used is read as plain pages. Calls must be
    wrapped in `translate_errors`. Raises BadFile if planes are missing or differ, or the pixel type is not supported.
    """
    image = _read_container(tiff, structure, selection)
    if image.metadata_problem and selection.axes is not None:
        plain_image = replace(
            read_plain_pages(tiff, structure), container=image.container, channel_names=image.channel_names
        )
        image = _add_details(plain_image, tiff)
    if not image.is_contiguous:
        image = replace(image, pages=page_loader.restore_own_tags(tiff, structure, image.pages))
    _check_pages(image.keyframes)
    if f'"{PROVENANCE_NAMESPACE}"' in tiff.pages.first.description:
        image = replace(
            image, notes=(*image.notes, "The file is a result of StackSeg. Segment the original image instead.")
        )
    page_notes = dict.fromkeys(note for page in image.keyframes for note in metadata.get_page_notes(page))
    notes = (*image.notes, *page_notes, *make_gray_value_notes(tiff.imagej_metadata or {}))
    return replace(image, calibration=_find_calibration(image, tiff), notes=notes)


def _find_calibration(image: StoredImage, tiff: TiffFile) -> Calibration:
    if image.calibration.get_voxel_size() is not None:
        return image.calibration
    details = document.read_details(tiff.pages.first.description)
    ome_calibration = sampling.parse_calibration(details.physical_sizes, details.physical_size_units, "OME-XML")
    return calibration.find_calibration(tiff, image.page, (image.calibration, ome_calibration))


def _add_details(image: StoredImage, tiff: TiffFile) -> StoredImage:
    """Return an image whose axes are unknown with the channels and the time interval of the file."""
    details = document.read_details(tiff.pages.first.description)
    names, colors = details.channel_names, tuple(map(metadata.parse_ome_color, details.colors))
    interval = sampling.parse_time_interval(*details.time_increment)
    for kind in metadata.CONTAINER_NAMES:
        if getattr(tiff, f"is_{kind}"):
            names = names or metadata.read_channel_names(tiff, kind)
            colors = colors or metadata.read_channel_colors(tiff, kind)
            interval = interval or metadata.find_time_interval(tiff, kind)
    return replace(image, channel_names=names or image.channel_names, colors=colors, time_interval=interval)


def _read_container(tiff: TiffFile, structure: Structure, selection: Selection) -> StoredImage:
    description = tiff.pages.first.description
    if tiff.is_mmstack:
        return _read_with_tifffile(tiff, structure, "mmstack", selection)
    if tiff.pages.first.is_ome:
        return _read_ome(tiff, structure, selection)
    if parser.has_unreadable_document(tiff.pages.first):
        return _read_unusable_ome(tiff, structure, "its OME-XML is not stored as text in UTF-8. Export it again")
    if "<OME" in description[:2000]:
        raise BadFile("The OME-XML in the file is truncated. Export the file again.")
    if metadata.read_micromanager_summary(tiff):
        return read_micromanager_pages(tiff, structure, selection)
    for kind in metadata.CONTAINER_NAMES:
        if getattr(tiff, f"is_{kind}"):
            return _read_with_tifffile(tiff, structure, kind, selection)
    read_pages = read_micromanager_tags if metadata.has_micromanager_positions(tiff) else _read_tagged_pages
    return read_pages(tiff, structure)


def _read_tagged_pages(tiff: TiffFile, structure: Structure) -> StoredImage:
    """Read plain pages, and find out from their tags whether they are channels."""
    image = read_plain_pages(tiff, structure)
    names = interpret_page_tags(image.pages)
    axes = f"C{image.axes[1:]}" if names.are_channels else image.axes
    return replace(image, axes=axes, channel_names=names.channel_names, metadata_problem=names.problem)


def _read_ome(tiff: TiffFile, structure: Structure, selection: Selection) -> StoredImage:
    first_page = tiff.pages.first
    try:
        images = parser.parse(
            first_page.description,
            len(structure.offsets),
            first_page.samplesperpixel,
            allow_incomplete=selection.allow_incomplete,
        )
        image = _choose_ome_image(images, selection)
        if selection.axes is not None and not image.matches(first_page):
            return _read_unusable_ome(tiff, structure, "its OME-XML contradicts its pages")
    except document.InconsistentOme as error:
        if selection.axes is None:
            raise BadFile(str(error), **error.advice) from error
        return _read_unusable_ome(tiff, structure, str(error))
    except document.UnusableOme as error:
        return _read_unusable_ome(tiff, structure, str(error))
    return _read_ome_image(tiff, structure, images, image, selection)


def _read_unusable_ome(tiff: TiffFile, structure: Structure, problem: str) -> StoredImage:
    return replace(read_plain_pages(tiff, structure), container="OME-TIFF", metadata_problem=problem)


def _choose_ome_image(images: Sequence[OmeImage], selection: Selection) -> OmeImage:
    """Return the selected image, or the largest one by default. Raises BadParameter."""
    if selection.scene is not None:
        return images[select_scene([image.name for image in images], selection.scene)]
    return max(images, key=lambda image: math.prod(image.shape) * image.size_y * image.size_x)


def _read_ome_image(
    tiff: TiffFile,
    structure: Structure,
    images: Sequence[OmeImage],
    image: OmeImage,
    selection: Selection,
) -> StoredImage:
    is_plane_choice_needed = selection.scene is None and parser.are_single_planes(images)
    if is_plane_choice_needed and len(images) == page_loader.count_planes(tiff, structure):
        problem = f"its OME-XML describes {len(images)} images of one plane each"
        return _read_unusable_ome(tiff, structure, problem)
    pages = page_loader.load_pages(tiff, structure, image.page_indices)
    page = get_keyframe(pages[0])
    described_count, plane_count = _count_described_planes(tiff, structure, images, page)
    if described_count < plane_count:
        problem = f"its OME-XML describes only {described_count} of {plane_count} planes of the same size and type"
        return _read_unusable_ome(tiff, structure, problem)
    if not image.matches(page):
        stored_lengths = dict(zip(page.axes, page.shape, strict=True))
        raise BadFile(
            f"The OME-XML declares planes of size {image.page_lengths}, but the pages have the size"
            f" {stored_lengths}. Export the file again."
        )
    return StoredImage(
        container="OME-TIFF",
        axes=image.axes + page.axes,
        shape=image.shape + page.shape,
        pages=pages,
        channel_names=image.channel_names,
        colors=tuple(map(metadata.parse_ome_color, image.colors)),
        calibration=sampling.parse_calibration(image.physical_sizes, image.physical_size_units, "OME-XML"),
        time_interval=sampling.parse_time_interval(*image.time_increment),
        notes=(() if selection.scene is not None else _make_choice_notes(images, image)) + image.get_notes(page),
        scenes=tuple(image.name for image in images) if len(images) > 1 else (),
    )


def _count_described_planes(
    tiff: TiffFile, structure: Structure, images: Sequence[OmeImage], page: TiffPage
) -> tuple[int, int]:
    """Count the planes with the format of a page that the OME-XML describes, and those that the file has."""
    described_counts = [image.stored_count for image in images if image.matches(page)]
    if sum(image.stored_count for image in images) >= len(structure.offsets):
        return sum(described_counts), sum(described_counts)
    planes = page_loader.group_by_format(page_loader.find_planes(tiff, structure))
    return sum(described_counts), len(planes.get(PageFormat.from_page(page), ()))


def _make_choice_notes(images: Sequence[OmeImage], image: OmeImage) -> tuple[str, ...]:
    notes = make_choice_notes(len(images), image.name)
    return tuple(f"{note} To use another one, set scene to its name or index." for note in notes)


def _read_with_tifffile(tiff: TiffFile, structure: Structure, kind: str, selection: Selection) -> StoredImage:
    declared = DeclaredStack(kind, *metadata.read_declared_dimensions(tiff, kind))
    if kind == "scanimage" and (image := read_scanimage_pages(tiff, structure, selection)) is not None:
        return image
    if kind == "mmstack":
        positions, offsets = metadata.read_micromanager_index(tiff, declared.axes)
        if len(positions) < declared.plane_count:
            return arrange_planes(tiff, declared, positions, load_pages_at(tiff, structure, offsets), selection)
    elif count_stored_planes(tiff, structure) < declared.plane_count:
        stored_pages = list_stored_planes(tiff, structure)
        positions = np.stack(np.unravel_index(np.arange(len(stored_pages)), declared.shape), axis=1)
        return arrange_planes(tiff, declared, positions, stored_pages, selection)
    if kind in {"imagej", "shaped"} and needs_own_order(tiff, structure, declared):
        return read_separate_pages(tiff, structure, declared, selection)
    return _read_series(tiff, structure, kind, declared.plane_count, selection)


def _read_series(
    tiff: TiffFile, structure: Structure, kind: str, expected_count: int, selection: Selection
) -> StoredImage:
    """Return the largest image that tifffile finds in the file."""
    candidates = [series for series in _list_series(tiff, kind) if math.prod(series.shape)]
    if not candidates or candidates[0].kind != kind:
        return _read_contradicted_pages(tiff, structure, kind)
    # An index of planes may list only a part of the pages.
    described_count = sum(math.prod(series.shape) // max(1, series.keyframe.size) for series in candidates)
    if described_count < page_loader.count_planes(tiff, structure):
        return add_metadata(_read_contradicted_pages(tiff, structure, kind), tiff, kind)
    series = max(candidates, key=lambda series: math.prod(series.shape))
    pages, is_contiguous = _load_pages(tiff, structure, series, expected_count)
    axes, shape = _get_dimensions(series)
    image = StoredImage(
        container=metadata.CONTAINER_NAMES[kind],
        axes=axes,
        shape=shape,
        pages=pages,
        is_contiguous=is_contiguous,
        notes=make_choice_notes(len(candidates), series.name),
    )
    return add_metadata(_check_metamorph(image, tiff, selection) if kind == "stk" else image, tiff, kind)


def _check_metamorph(image: StoredImage, tiff: TiffFile, selection: Selection) -> StoredImage:
    """Return an image with the axis of the planes of a MetaMorph file, and with what contradicts it."""
    # tifffile requires a distance of the first plane as well.
    axes = f"Z{image.axes[1:]}" if metadata.is_stk_stack(tiff) else image.axes
    # With the `axes` of the request, the planes are not read as plain pages, because only the first has a page.
    problem = metadata.find_stk_problem(tiff) if selection.axes is None else ""
    return replace(image, axes=axes, metadata_problem=problem)


def _load_pages(
    tiff: TiffFile, structure: Structure, series: TiffPageSeries, expected_count: int
) -> tuple[tuple[Page, ...], bool]:
    """Return the pages of an image, or the first one if the pixels follow it, and whether they do."""
    if series.dataoffset is None:
        return _require_all_pages(list(series)), False
    if len(structure.offsets) == expected_count and not is_in_page_order(tiff, structure):
        return page_loader.load_pages(tiff, structure, range(expected_count)), False
    return (series.keyframe,), True


def _read_contradicted_pages(tiff: TiffFile, structure: Structure, kind: str) -> StoredImage:
    container = metadata.CONTAINER_NAMES[kind]
    problem = f"its metadata ({container}) contradicts its pages"
    return replace(read_plain_pages(tiff, structure), container=container, metadata_problem=problem)


# tifffile 2026.5 can select the kind of series and keep dimensions of length 1. The last version that supports
# Python 3.11 cannot.
def _list_series(tiff: TiffFile, kind: str) -> Sequence[TiffPageSeries]:
    """Return the images of a container. Older versions of tifffile may return images of a different kind."""
    return tiff.series(kind=kind, squeeze=False) if callable(tiff.series) else tiff.series


def _get_dimensions(series: TiffPageSeries) -> tuple[str, tuple[int, ...]]:
    """Return axes and shape, including dimensions of length 1."""
    if hasattr(series, "get_axes") and hasattr(series, "get_shape"):
        return series.get_axes(squeeze=False), tuple(series.get_shape(squeeze=False))
    return series.axes, tuple(series.shape)


def _require_all_pages(pages: Sequence[Page | None]) -> tuple[Page, ...]:
    present_pages = tuple(page for page in pages if page is not None)
    if len(present_pages) < len(pages):
        missing_count = len(pages) - len(present_pages)
        raise BadFile(f"The file lacks {missing_count} of {len(pages)} planes. Export the whole image as one file.")
    return present_pages


def _check_pages(pages: Sequence[TiffPage]) -> None:
    for page in pages:
        _check_decodable(page)
    if len({metadata.is_inverted(page) for page in pages}) > 1:
        raise BadFile("Some pages are stored inverted, with 0 as white, and others are not. Export the stack again.")


def _check_decodable(page: TiffPage) -> None:
    if page.dtype is None or np.dtype(page.dtype).kind not in "buif":
        pixel_type = np.dtype(page.dtype).name if page.dtype is not None else f"{page.bitspersample}-bit"
        raise BadFile(
            f"The pixel type {pixel_type} is not supported. Save the stack as 8-, 16- or 32-bit integers or floats."
        )
    is_subsampled = page.compression == 1 and page.is_subsampled
    if is_subsampled or (page.dtype.kind in "ui" and page.bitspersample in _UNSUPPORTED_BITS):
        pixel_format = "subsampled colors" if is_subsampled else f"integers of {page.bitspersample} bits"
        raise BadFile(
            f"The pages have {pixel_format}, which are not supported. Save the stack as 8-, 16- or 32-bit integers or"
            " floats."
        )
    if "BitsPerSample" not in page.tags:
        _check_default_bits(page)
    check_compression(page)


def _check_default_bits(page: TiffPage) -> None:
    """Raise BadFile unless a page without BitsPerSample is stored with 1 bit per pixel, which is the default."""
    packed_bytes = math.prod(page.shape) // page.imagewidth * -(-page.imagewidth // 8)
    is_packed = page.compression == 1 and not page.is_tiled and sum(page.databytecounts) <= packed_bytes
    if not is_packed and page.compression not in _BILEVEL_COMPRESSIONS:
        raise BadFile(
            "The pages lack the tag BitsPerSample, and their sizes do not show that they have 1 bit per pixel, which is"
            " its default. Export the file again."
        )
