"""Find the images of an OME-TIFF in its OME-XML, and the page that contains each plane."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

import numpy as np
from tifffile import TiffPage

from service.formats.tiff.ome.document import (
    InconsistentOme,
    OmeDetails,
    UnusableOme,
    find_children,
    get_local_name,
    parse_integer,
    parse_root,
    read_pixels_details,
)
from service.formats.tiff.planes import missing

# Length of the beginning of a document that contains its root element.
_MAX_HEAD_CHARS = 4000
# Names of pixel types that differ from those of NumPy.
_NUMPY_TYPES = {"float": "float32", "double": "float64", "complex": "complex64", "double-complex": "complex128"}


@dataclass(frozen=True, kw_only=True)
class OmeImage(OmeDetails):
    """One Image element.

    axes               axes other than Y and X, slowest first
    shape              lengths along these axes; the length along C does not include the samples of a pixel
    samples_per_pixel  number of samples per pixel (3 for RGB)
    pixel_type         Type as written, or ""
    page_indices       index of the page of each plane, in C order of `shape`
    declared_count     number of planes that the metadata declares
    stored_count       number of planes that the file has; if it is smaller, `shape` is the complete part of the stack
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    size_y: int
    size_x: int
    samples_per_pixel: int
    pixel_type: str
    page_indices: tuple[int, ...]
    declared_count: int
    stored_count: int

    @property
    def page_lengths(self) -> dict[str, int]:
        """Declared lengths along the axes of a page."""
        return {"Y": self.size_y, "X": self.size_x, "S": self.samples_per_pixel}

    def matches(self, page: TiffPage) -> bool:
        """Return whether a page has the declared size."""
        stored_lengths = dict(zip(page.axes, page.shape, strict=True))
        return all(stored_lengths.get(axis, 1) == length for axis, length in self.page_lengths.items())

    def get_notes(self, page: TiffPage) -> tuple[str, ...]:
        """Return notes for missing planes, and for a page with another data type than the document declares."""
        notes = list[str]()
        if self.stored_count < self.declared_count:
            counts = self.declared_count, self.stored_count, len(self.page_indices)
            notes.append(missing.make_incomplete_note("OME-XML", *counts))
        declared_type = _NUMPY_TYPES.get(self.pixel_type, self.pixel_type)
        if page.dtype is not None and declared_type not in {"", "bit", page.dtype.name}:
            notes.append(
                f"The OME-XML declares pixels of type {declared_type[:16]}, but the pages have the type"
                f" {page.dtype.name}, which is used. If the intensities are wrong, export the file again."
            )
        return tuple(notes)


def has_unreadable_document(page: TiffPage) -> bool:
    """Return whether the description of a page is OME-XML that tifffile does not decode, such as text in UTF-16."""
    description = page.tags.valueof("ImageDescription")
    text = description.decode("latin-1") if isinstance(description, bytes) else page.description
    return "<OME" not in page.description[:_MAX_HEAD_CHARS] and "<OME" in text[:_MAX_HEAD_CHARS].replace("\0", "")


def are_single_planes(images: Sequence[OmeImage]) -> bool:
    """Return whether there are several images that consist of one plane each, and all have the same size."""
    sizes = {(image.size_y, image.size_x, image.samples_per_pixel) for image in images}
    return len(images) > 1 and len(sizes) == 1 and all(image.declared_count == 1 for image in images)


def parse(ome_xml: str, page_count: int, page_samples: int = 1, *, allow_incomplete: bool = False) -> list[OmeImage]:
    """Parse the images of an OME-XML document, in document order.

    Args:
        ome_xml: the document
        page_count: number of pages in the file
        page_samples: samples per pixel of the first page, because the document does not have to specify them
        allow_incomplete: whether the file may have fewer planes than the document declares

    Raises BadFile if the XML declares entities, contradicts itself, or declares planes that the file does not have.
    Raises UnusableOme if the XML is malformed, points to another file, or describes planes in other files.
    """
    root = parse_root(ome_xml)
    tags = {get_local_name(element) for element in root.iter()}
    if "BinaryOnly" in tags:
        raise UnusableOme("its OME-XML only points to another file, and referenced files are never opened")
    if any(tag.startswith("ModuloAlong") for tag in tags):
        raise UnusableOme("its OME-XML nests additional dimensions in Z, C or T (ModuloAlong)")
    if _has_planes_in_other_files(root):
        raise UnusableOme(
            "its OME-XML describes a set of several files, and referenced files are never opened. To segment the"
            " whole image, export the set as one file"
        )
    pages = _Pages(page_count, page_samples, allow_incomplete)
    images = [_parse_image(element, pages) for element in root if get_local_name(element) == "Image"]
    if not images:
        raise UnusableOme("its OME-XML does not describe an image")
    _check_distinct_pages(images)
    return images


def _check_distinct_pages(images: Sequence[OmeImage]) -> None:
    """Raise InconsistentOme if a page is assigned to several planes. Programs write this if they omit the IFD."""
    page, count = Counter(index for image in images for index in image.page_indices).most_common(1)[0]
    if count > 1:
        raise InconsistentOme(
            f"The OME-XML assigns page {page} to {count} planes. Export the file again, or set axes to read the pages"
            " in their order in the file, for example axes=ZYX.",
            parameter="axes",
        )


@dataclass(frozen=True)
class _Pages:
    """Pages of the file, and whether there may be fewer of them than planes."""

    count: int
    samples: int
    may_be_incomplete: bool


def _has_planes_in_other_files(root: Element) -> bool:
    """Return whether planes are in other files. UUIDs are compared, because the files may have been renamed."""
    elements = [element for element in root.iter() if get_local_name(element) == "TiffData"]
    uuids = {find_children(element, "UUID")[0].text if find_children(element, "UUID") else None for element in elements}
    own_uuid = root.get("UUID")
    return len(uuids) > 1 if own_uuid is None else bool(uuids - {own_uuid, None})


def _parse_image(element: Element, pages: _Pages) -> OmeImage:
    children = find_children(element, "Pixels")
    if len(children) != 1:
        raise InconsistentOme(
            "The OME-XML is damaged: an Image element must have exactly one Pixels element. Export the file again."
        )
    pixels = children[0]
    order = pixels.get("DimensionOrder", "")
    if sorted(order) != sorted("XYZCT") or order[:2] != "XY":
        raise InconsistentOme(f"The OME-XML is damaged: DimensionOrder={order!r} is not valid. Export the file again.")
    channels = find_children(pixels, "Channel")
    samples_per_pixel = _count_samples(channels, parse_integer(pixels, "SizeC"), pages.samples)
    axes = order[:1:-1]
    shape = tuple(parse_integer(pixels, f"Size{axis}") // (samples_per_pixel if axis == "C" else 1) for axis in axes)
    declared_count = math.prod(shape)
    _check_plane_count(declared_count, pages)
    page_by_plane = _parse_pages(find_children(pixels, "TiffData"), axes, shape, pages)
    used_shape, page_indices = _arrange_pages(page_by_plane, axes, shape, pages)
    return OmeImage(
        name=element.get("Name", ""),
        axes=axes,
        shape=used_shape,
        size_y=parse_integer(pixels, "SizeY"),
        size_x=parse_integer(pixels, "SizeX"),
        samples_per_pixel=samples_per_pixel,
        page_indices=page_indices,
        declared_count=declared_count,
        stored_count=len(page_by_plane),
        pixel_type=pixels.get("Type", ""),
        **vars(read_pixels_details(pixels, channels)),
    )


def _check_plane_count(plane_count: int, pages: _Pages) -> None:
    if plane_count == 0:
        raise InconsistentOme("The OME-XML is damaged: an image has no planes. Export the file again.")
    if plane_count > pages.count and not pages.may_be_incomplete:
        raise missing.make_incomplete_error("OME-XML", plane_count, pages.count)


def _count_samples(channels: list[Element], size_c: int, page_samples: int) -> int:
    """Return the number of samples per pixel. Raises UnusableOme if channels have different numbers of samples.

    SamplesPerPixel is optional. If no channel has more than one sample according to the document, the pages decide.
    """
    sample_counts = {parse_integer(channel, "SamplesPerPixel", 1) for channel in channels} or {1}
    if len(sample_counts) > 1:
        raise UnusableOme("its OME-XML has channels with different numbers of samples")
    sample_count = max(1, *sample_counts)
    return page_samples if sample_count == 1 < page_samples and size_c % page_samples == 0 else sample_count


def _parse_pages(elements: list[Element], axes: str, shape: tuple[int, ...], pages: _Pages) -> dict[int, int]:
    """Return the index of the page of each plane. Raises BadFile if a plane is assigned two pages, or none."""
    plane_count = math.prod(shape)
    if not elements and (plane_count == pages.count or pages.may_be_incomplete):
        return {index: index for index in range(min(plane_count, pages.count))}
    page_by_plane: dict[int, int] = {}
    for element in elements:
        first_plane, first_page, count = _parse_tiff_data(element, axes, shape, pages)
        for plane in range(first_plane, first_plane + count):
            if plane in page_by_plane:
                raise InconsistentOme(f"The OME-XML assigns plane {plane} to two pages. Export the file again.")
            page_by_plane[plane] = first_page + plane - first_plane
    if len(page_by_plane) < plane_count and not pages.may_be_incomplete:
        raise InconsistentOme(
            f"The OME-XML declares {plane_count} planes but assigns pages to {len(page_by_plane)} of them. Export the"
            " file again, or set allow_incomplete=true to use these planes.",
            parameter="allow_incomplete",
            suggested={"allow_incomplete": "true"},
        )
    return page_by_plane


def _arrange_pages(
    page_by_plane: dict[int, int], axes: str, shape: tuple[int, ...], pages: _Pages
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the complete part of the stack, and the pages of its planes."""
    plane_numbers = np.array(sorted(page_by_plane), np.int64)
    lengths = shape
    if len(plane_numbers) < math.prod(shape):
        positions = np.stack(np.unravel_index(plane_numbers, shape), axis=1)
        lengths = missing.crop_to_complete(axes, shape, positions)
        if not all(lengths):
            raise missing.make_incomplete_error("OME-XML", math.prod(shape), min(len(plane_numbers), pages.count))
        plane_numbers = plane_numbers[(positions < np.array(lengths)).all(axis=1)]
    return lengths, tuple(page_by_plane[plane] for plane in plane_numbers.tolist())


def _parse_tiff_data(element: Element, axes: str, shape: tuple[int, ...], pages: _Pages) -> tuple[int, int, int]:
    """Return the first plane, its page, and the number of consecutive planes. Raises BadFile."""
    plane_count, first_plane = math.prod(shape), _parse_first_plane(element, axes, shape)
    first_page = parse_integer(element, "IFD", 0)
    count = parse_integer(
        element, "PlaneCount", parse_integer(element, "NumPlanes", 0 if element.get("IFD") is None else 1)
    )
    count = count or min(plane_count - first_plane, pages.count - first_page)
    if pages.may_be_incomplete and first_plane + count <= plane_count:
        count = max(0, min(count, pages.count - first_page))
    if first_plane + count > plane_count or count > max(0, pages.count - first_page):
        raise InconsistentOme(
            f"The OME-XML assigns planes {first_plane} to {first_plane + count - 1} (of {plane_count}) to pages"
            f" {first_page} to {first_page + count - 1}, but the file has {pages.count} pages. The file is truncated or"
            " damaged. Export it again."
        )
    return first_plane, first_page, count


def _parse_first_plane(element: Element, axes: str, shape: tuple[int, ...]) -> int:
    plane = 0
    for axis, length in zip(axes, shape, strict=True):
        index = parse_integer(element, f"First{axis}", 0)
        if index >= length:
            raise InconsistentOme(
                f"The OME-XML is damaged: First{axis}={index}, but the length along {axis} is {length}."
                " Export the file again."
            )
        plane = plane * length + index
    return plane
