"""Choice of the image in a TIFF, and its planes in the file: OME-TIFF, ImageJ, vendors, plain pages.

tifffile reads tags and containers. Its results are checked here against the pages that exist, and no other file is
followed.
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
from service.formats.tiff import metadata, ome
from service.formats.tiff.ifd import Structure

Page = TiffPage | TiffFrame

# tifffile logs defects that it works around; here such files are refused with an error instead.
logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)

# Errors of tifffile, its codecs and NumPy for bad files.
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

    axes, shape  as stored, slowest first, dimensions of length 1 included
    pages        in C order of the leading dimensions, all of one layout
    whole        whether all pixels follow the first page's offset without a gap; `pages` is that one page
    doubt        clause why the container's description cannot be used, "" where it can
    channels     names, as many as the file gives
    colours      of the channels as in `Description`, as many as the file gives
    """

    container: str
    axes: str
    shape: tuple[int, ...]
    pages: tuple[Page, ...]
    whole: bool = False
    doubt: str = ""
    channels: tuple[str, ...] = ()
    colours: tuple[str, ...] = ()
    calibration: Calibration = sampling.NOTHING
    time_interval: TimeInterval | None = None
    notes: tuple[str, ...] = ()

    @property
    def page(self) -> TiffPage:
        """The page whose tags hold for all pages."""
        return _keyframe(self.pages)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the pixels, in the byte order of the file."""
        return np.dtype(self.page.dtype).newbyteorder(self.page.parent.byteorder)


def _keyframe(pages: Sequence[Page]) -> TiffPage:
    page = pages[0].keyframe
    if page is None:
        raise BadFile("The file is damaged: a page without tags.")
    return page


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn errors of tifffile, its codecs and NumPy into BadFile, and lack of memory into TooLarge."""
    try:
        yield
    except MemoryError as error:
        raise TooLarge(f"{doing.capitalize()} needs more memory than one file may use.") from error
    except _DECODING_ERRORS as error:
        text = " ".join(str(error).split())[:160]
        raise BadFile(f"The file is damaged or of an unknown kind: {doing} failed ({text or error!r}).") from error


def open_pages(stream: BinaryIO) -> TiffFile:
    """Open a TIFF from a stream, without its path, so that tifffile can neither find nor open files beside it."""
    # OME-XML and NDTiff name other files, NDPI has offsets of pages of its own, and EER a codec.
    return TiffFile(stream, name="stack.tif", is_ome=False, is_ndtiff=False, is_ndpi=False, is_eer=False)


def find_image(tiff: TiffFile, structure: Structure, *, trust: bool = True) -> StoredImage:
    """Find the image of a file: of several the largest, of equals the first.

    With `trust` false a container whose description cannot be used is read as plain pages. Callers wrap it in
    `translate_errors`. Raises BadFile where planes are missing, differ, or hold no pixels of a known kind.
    """
    image = _from_container(tiff, structure)
    if image.doubt and not trust:
        image = replace(_plain(tiff, structure), container=image.container)
    _check_alike([page.offset for page in image.pages], structure)
    _check_decodable(image.page)
    return replace(image, notes=(*image.notes, *metadata.remarks(image.page)))


def _from_container(tiff: TiffFile, structure: Structure) -> StoredImage:
    description = tiff.pages.first.description
    if tiff.is_mmstack:
        return _from_tifffile(tiff, structure, "mmstack")
    if tiff.pages.first.is_ome:
        try:
            return _from_ome(tiff, structure, ome.parse(description, len(structure.offsets)))
        except ome.UnusableOme as error:
            return replace(_plain(tiff, structure), container="OME-TIFF", doubt=str(error))
    if "<OME" in description[:2000]:
        raise BadFile("The OME-XML in the file is cut short. Export the file again.")
    for kind in metadata.CONTAINERS:
        if getattr(tiff, f"is_{kind}"):
            return _from_tifffile(tiff, structure, kind)
    return _plain(tiff, structure)


def _from_ome(tiff: TiffFile, structure: Structure, images: Sequence[ome.OmeImage]) -> StoredImage:
    image = max(images, key=lambda image: math.prod(image.shape) * image.size_y * image.size_x)
    pages = _pages(tiff, structure, image.pages)
    page = _keyframe(pages)
    stored = dict(zip(page.axes, page.shape, strict=True))
    stated = {"Y": image.size_y, "X": image.size_x, "S": image.samples}
    if any(stored.get(axis, 1) != length for axis, length in stated.items()):
        raise BadFile(f"The OME-XML promises planes of {stated}, but the pages hold {stored}. Export the file again.")
    return StoredImage(
        container="OME-TIFF",
        axes=image.axes + page.axes,
        shape=image.shape + page.shape,
        pages=pages,
        channels=image.channels,
        colours=tuple(map(metadata.parse_ome_colour, image.colours)),
        calibration=sampling.from_lengths(image.sizes, image.units, "OME-XML"),
        time_interval=sampling.parse_time_interval(*image.time_increment),
        notes=_note_choice(len(images), image.name),
    )


def _from_tifffile(tiff: TiffFile, structure: Structure, kind: str) -> StoredImage:
    container = metadata.CONTAINERS[kind]
    stated = metadata.stated_planes(tiff, kind)
    _check_complete(tiff, structure, stated, container)
    if kind == "imagej":
        _check_alike(structure.offsets, structure)
    candidates = [series for series in _series(tiff, kind) if math.prod(series.shape)]
    doubt = f"its metadata ({container}) contradict its pages"
    if not candidates or candidates[0].kind != kind:
        return replace(_plain(tiff, structure), container=container, doubt=doubt)
    series = max(candidates, key=lambda series: math.prod(series.shape))
    whole = series.dataoffset is not None
    axes, shape = _dimensions(series)
    return StoredImage(
        container=container,
        axes=axes,
        shape=shape,
        pages=(series.keyframe,) if whole else _require_all(list(series)),
        whole=whole,
        doubt=doubt if kind == "imagej" and 1 < stated < len(structure.offsets) else "",
        channels=metadata.channel_names(tiff, kind),
        colours=metadata.channel_colours(tiff, kind),
        calibration=metadata.calibration(tiff, series.keyframe, kind),
        time_interval=metadata.find_time_interval(tiff, kind),
        notes=_note_choice(len(candidates), series.name),
    )


# tifffile from 2026.5 on has series of one kind, with dimensions of length 1; the last one for Python 3.11 has neither.
def _series(tiff: TiffFile, kind: str) -> Sequence[TiffPageSeries]:
    """Return the images of a container, or of another kind where that is what an older tifffile takes the file for."""
    return tiff.series(kind=kind, squeeze=False) if callable(tiff.series) else tiff.series


def _dimensions(series: TiffPageSeries) -> tuple[str, tuple[int, ...]]:
    """Return axes and shape, dimensions of length 1 included."""
    if hasattr(series, "get_axes") and hasattr(series, "get_shape"):
        return series.get_axes(squeeze=False), tuple(series.get_shape(squeeze=False))
    return series.axes, tuple(series.shape)


def _plain(tiff: TiffFile, structure: Structure) -> StoredImage:
    """Group pages by layout into images, and take the largest one; smaller copies and masks are left out."""
    groups: dict[bytes, list[int]] = {}
    for index, offset in enumerate(structure.offsets):
        groups.setdefault(structure.layouts[offset], []).append(index)
    images = [_pages(tiff, structure, indices) for indices in groups.values()]
    images = [pages for pages in images if not (_keyframe(pages).is_reduced or _keyframe(pages).is_mask)] or images
    pages = max(images, key=lambda pages: len(pages) * _area(_keyframe(pages)))
    page, count = _keyframe(pages), len(pages)
    return StoredImage(
        container="TIFF",
        axes="I" * (count > 1) + page.axes,
        shape=(count,) * (count > 1) + page.shape,
        pages=pages,
        calibration=metadata.resolution(page).calibration(),
        notes=_note_choice(len(images), ""),
    )


def _note_choice(count: int, name: str) -> tuple[str, ...]:
    if count == 1:
        return ()
    return (f"The file holds {count} images; the largest of them{f', {name!r},' if name else ''} is read.",)


def _area(page: TiffPage) -> int:
    return math.prod(n for axis, n in zip(page.axes, page.shape, strict=True) if axis != "S")


def _pages(tiff: TiffFile, structure: Structure, indices: Sequence[int]) -> tuple[Page, ...]:
    _check_alike([structure.offsets[index] for index in indices], structure)
    tiff.pages.useframes = True
    tiff.pages.set_keyframe(indices[0])
    return tuple(tiff.pages[index] for index in indices)


def _require_all(pages: Sequence[Page | None]) -> tuple[Page, ...]:
    present = tuple(page for page in pages if page is not None)
    if len(present) < len(pages):
        missing = len(pages) - len(present)
        raise BadFile(f"{missing} of {len(pages)} planes are not in the file. Export the whole image as one file.")
    return present


def _check_complete(tiff: TiffFile, structure: Structure, stated: int, container: str) -> None:
    """Raise BadFile where planes are missing; tifffile reads half a stack as a single plane."""
    page, stored = tiff.pages.first, len(structure.offsets)
    if stored == 1 and page.is_final and page.nbytes:
        stored = max(1, (structure.size - page.dataoffsets[0]) // page.nbytes)
    if stated > stored:
        raise BadFile(
            f"The metadata ({container}) promise {stated} planes, but the file holds {stored}: it is cut short or"
            " damaged. Copy or export it again."
        )


def _check_alike(offsets: Sequence[int], structure: Structure) -> None:
    """Raise BadFile for planes of different layouts; tifffile decodes all of them by the tags of the first."""
    layout = structure.layouts.get(offsets[0])
    for index, offset in enumerate(offsets):
        if structure.layouts.get(offset, layout) != layout:
            raise BadFile(
                f"Plane {index} is not of the size, type or compression of the first. Save the stack with planes of one"
                " kind."
            )


def _check_decodable(page: TiffPage) -> None:
    if page.dtype is None or np.dtype(page.dtype).kind not in "buif":
        kind = np.dtype(page.dtype).name if page.dtype is not None else f"{page.bitspersample}-bit"
        raise BadFile(
            f"The pixels are {kind}, which is not supported. Save them as 8, 16 or 32-bit integers or floats."
        )
    if page.compression != 1 and page.compression not in TIFF.DECOMPRESSORS:
        name = getattr(page.compression, "name", page.compression)
        raise BadFile(f"Compression {name} is not supported. Save the file uncompressed or with Deflate, LZW or Zstd.")
