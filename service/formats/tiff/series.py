"""Choose the image in a TIFF and locate its planes: OME-TIFF, ImageJ, TIFFs from microscope vendors, and plain pages.

tifffile parses tags and containers. Its results are checked against the pages of the file. Other files are
never opened.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
from tifffile import TIFF, TiffFile, TiffFrame, TiffPage, TiffPageSeries

from service.core.errors import BadFile, TooLarge
from service.core.quantities import TimeInterval
from service.formats import sampling
from service.formats.sampling import Calibration
from service.formats.tiff import calibration, metadata, ome
from service.formats.tiff.ifd import Structure

Page = TiffPage | TiffFrame

# tifffile logs defects and works around them. This module rejects files with defects instead.
logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)

# Errors that tifffile, its codecs and NumPy raise for damaged files.
_DECODING_ERRORS = (
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


@dataclass(frozen=True)
class StoredImage:
    """One image as stored in the file.

    axes              one letter per stored dimension, slowest first, including dimensions of length 1
    shape             length of each stored dimension
    pages             pages in C order of the leading dimensions, all with the same layout
    is_contiguous     whether all pixels follow the first page's offset without gaps; if so, `pages` has only that page
    metadata_problem  clause that explains why the container's metadata cannot be used, or ""
    channel_names     channel names in the file; there may be fewer or more names than channels
    colors            channel colors as in `Description.colours`; there may be fewer or more colors than channels
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

    @property
    def page(self) -> TiffPage:
        """Page whose tags apply to all pages."""
        return _get_keyframe(self.pages)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the pixels, in the byte order of the file."""
        return np.dtype(self.page.dtype).newbyteorder(self.page.parent.byteorder)


def _get_keyframe(pages: Sequence[Page]) -> TiffPage:
    page = pages[0].keyframe
    if page is None:
        raise BadFile("The file is damaged: a page has no tags. Export it again.")
    return page


@contextmanager
def translate_errors(activity: str) -> Iterator[None]:
    """Translate errors from tifffile, its codecs and NumPy to BadFile, and MemoryError to TooLarge."""
    try:
        yield
    except MemoryError as error:
        raise TooLarge(
            f"{activity.capitalize()} exceeds the memory limit for one file. Crop or downsample the stack."
        ) from error
    except _DECODING_ERRORS as error:
        reason = " ".join(str(error).split())[:160]
        raise BadFile(f"The file is damaged or not supported: {activity} failed ({reason or error!r}).") from error


def open_pages(stream: BinaryIO) -> TiffFile:
    """Open a TIFF from a stream without its path, so that tifffile cannot find or open neighboring files."""
    # OME-XML and NDTiff refer to other files, NDPI has its own page offsets, and EER requires a codec.
    return TiffFile(stream, name="stack.tif", is_ome=False, is_ndtiff=False, is_ndpi=False, is_eer=False)


def find_image(tiff: TiffFile, structure: Structure, *, use_metadata: bool = True) -> StoredImage:
    """Find the image in a file. If there are several, choose the largest, or the first of several equally large ones.

    If `use_metadata` is false, a container whose metadata cannot be used is read as plain pages. Calls must be
    wrapped in `translate_errors`. Raises BadFile if planes are missing or differ, or the pixel type is not supported.
    """
    image = _read_container(tiff, structure)
    if image.metadata_problem and not use_metadata:
        names, colors, interval = metadata.find_details(tiff)
        image = replace(
            _read_plain_pages(tiff, structure),
            container=image.container,
            channel_names=names,
            colors=colors,
            time_interval=interval,
        )
    _check_same_layout([page.offset for page in image.pages], structure)
    _check_decodable(image.page)
    return replace(
        image,
        calibration=calibration.find_calibration(tiff, image.page, image.calibration),
        notes=(*image.notes, *metadata.get_pixel_value_notes(image.page)),
    )


def _read_container(tiff: TiffFile, structure: Structure) -> StoredImage:
    description = tiff.pages.first.description
    if tiff.is_mmstack:
        return _read_with_tifffile(tiff, structure, "mmstack")
    if tiff.pages.first.is_ome:
        try:
            return _read_ome(tiff, structure, ome.parse(description, len(structure.offsets)))
        except ome.UnusableOme as error:
            return replace(_read_plain_pages(tiff, structure), container="OME-TIFF", metadata_problem=str(error))
    if "<OME" in description[:2000]:
        raise BadFile("The OME-XML in the file is truncated. Export the file again.")
    for kind in metadata.CONTAINER_NAMES:
        if getattr(tiff, f"is_{kind}"):
            return _read_with_tifffile(tiff, structure, kind)
    return _read_plain_pages(tiff, structure)


def _read_ome(tiff: TiffFile, structure: Structure, images: Sequence[ome.OmeImage]) -> StoredImage:
    image = max(images, key=lambda image: math.prod(image.shape) * image.size_y * image.size_x)
    pages = _get_pages(tiff, structure, image.page_indices)
    page = _get_keyframe(pages)
    stored_lengths = dict(zip(page.axes, page.shape, strict=True))
    expected_lengths = {"Y": image.size_y, "X": image.size_x, "S": image.samples_per_pixel}
    if any(stored_lengths.get(axis, 1) != length for axis, length in expected_lengths.items()):
        raise BadFile(
            f"The OME-XML declares planes of size {expected_lengths}, but the pages have the size"
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
        notes=_make_choice_notes(len(images), image.name),
    )


def _read_with_tifffile(tiff: TiffFile, structure: Structure, kind: str) -> StoredImage:
    container = metadata.CONTAINER_NAMES[kind]
    expected_count = metadata.count_expected_planes(tiff, kind)
    _check_complete(tiff, structure, expected_count, container)
    if kind == "imagej":
        _check_same_layout(structure.offsets, structure)
    candidates = [series for series in _list_series(tiff, kind) if math.prod(series.shape)]
    metadata_problem = f"its metadata ({container}) contradicts its pages"
    if not candidates or candidates[0].kind != kind:
        return replace(_read_plain_pages(tiff, structure), container=container, metadata_problem=metadata_problem)
    series = max(candidates, key=lambda series: math.prod(series.shape))
    is_contiguous = series.dataoffset is not None
    axes, shape = _get_dimensions(series)
    return StoredImage(
        container=container,
        axes=axes,
        shape=shape,
        pages=(series.keyframe,) if is_contiguous else _require_all_pages(list(series)),
        is_contiguous=is_contiguous,
        metadata_problem=metadata_problem if kind == "imagej" and 1 < expected_count < len(structure.offsets) else "",
        channel_names=metadata.read_channel_names(tiff, kind),
        colors=metadata.read_channel_colors(tiff, kind),
        calibration=calibration.read_container_calibration(tiff, series.keyframe, kind),
        time_interval=metadata.find_time_interval(tiff, kind),
        notes=_make_choice_notes(len(candidates), series.name),
    )


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


def _read_plain_pages(tiff: TiffFile, structure: Structure) -> StoredImage:
    """Group pages with the same layout into images and return the largest. Reduced copies and masks are ignored."""
    indices_by_layout: dict[bytes, list[int]] = {}
    for index, offset in enumerate(structure.offsets):
        indices_by_layout.setdefault(structure.layouts[offset], []).append(index)
    images = [_get_pages(tiff, structure, indices) for indices in indices_by_layout.values()]
    images = [
        pages for pages in images if not (_get_keyframe(pages).is_reduced or _get_keyframe(pages).is_mask)
    ] or images
    pages = max(images, key=lambda pages: len(pages) * _count_pixels(_get_keyframe(pages)))
    page, page_count = _get_keyframe(pages), len(pages)
    return StoredImage(
        container="TIFF",
        axes="I" * (page_count > 1) + page.axes,
        shape=(page_count,) * (page_count > 1) + page.shape,
        pages=pages,
        notes=_make_choice_notes(len(images), ""),
    )


def _make_choice_notes(image_count: int, image_name: str) -> tuple[str, ...]:
    if image_count == 1:
        return ()
    return (
        f"The file contains {image_count} images. The largest{f', {image_name!r},' if image_name else ''} is used.",
    )


def _count_pixels(page: TiffPage) -> int:
    return math.prod(n for axis, n in zip(page.axes, page.shape, strict=True) if axis != "S")


def _get_pages(tiff: TiffFile, structure: Structure, indices: Sequence[int]) -> tuple[Page, ...]:
    _check_same_layout([structure.offsets[index] for index in indices], structure)
    tiff.pages.useframes = True
    tiff.pages.set_keyframe(indices[0])
    return tuple(tiff.pages[index] for index in indices)


def _require_all_pages(pages: Sequence[Page | None]) -> tuple[Page, ...]:
    present_pages = tuple(page for page in pages if page is not None)
    if len(present_pages) < len(pages):
        missing_count = len(pages) - len(present_pages)
        raise BadFile(f"The file lacks {missing_count} of {len(pages)} planes. Export the whole image as one file.")
    return present_pages


def _check_complete(tiff: TiffFile, structure: Structure, expected_count: int, container: str) -> None:
    """Raise BadFile if planes are missing. tifffile would read a truncated stack as a single plane."""
    page, stored_count = tiff.pages.first, len(structure.offsets)
    if stored_count == 1 and page.is_final and page.nbytes:
        stored_count = max(1, (structure.size - page.dataoffsets[0]) // page.nbytes)
    if expected_count > stored_count:
        raise BadFile(
            f"The metadata ({container}) declares {expected_count} planes, but the file has {stored_count}. The file is"
            " truncated or damaged. Copy or export it again."
        )


def _check_same_layout(offsets: Sequence[int], structure: Structure) -> None:
    """Raise BadFile if planes have different layouts. tifffile would decode all of them with the first one's tags."""
    layout = structure.layouts.get(offsets[0])
    for index, offset in enumerate(offsets):
        if structure.layouts.get(offset, layout) != layout:
            raise BadFile(
                f"Plane {index} differs from the first plane in size, data type or compression. Save the stack again"
                " with planes of the same size and type."
            )


def _check_decodable(page: TiffPage) -> None:
    if page.dtype is None or np.dtype(page.dtype).kind not in "buif":
        pixel_type = np.dtype(page.dtype).name if page.dtype is not None else f"{page.bitspersample}-bit"
        raise BadFile(
            f"The pixel type {pixel_type} is not supported. Save the stack as 8-, 16- or 32-bit integers or floats."
        )
    if page.compression != 1 and page.compression not in TIFF.DECOMPRESSORS:
        name = getattr(page.compression, "name", page.compression)
        raise BadFile(f"Compression {name} is not supported. Save the file uncompressed or with Deflate, LZW or Zstd.")
