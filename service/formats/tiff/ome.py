"""Parse the OME-XML of an OME-TIFF: its images, and the page that contains each plane.

Schema: OME 2016-06, https://docs.openmicroscopy.org/ome-model/. Only this module parses XML. It rejects entities and
document type declarations, and never follows references to other files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException  # type: ignore[import-untyped]
from defusedxml.ElementTree import fromstring  # type: ignore[import-untyped]

from service.core.errors import BadFile


class UnusableOme(Exception):
    """OME-XML that does not describe the pages. The message is a clause. This package handles the exception."""


@dataclass(frozen=True)
class OmeImage:
    """One Image element.

    axes                 axes other than Y and X, slowest first
    shape                lengths along these axes; the length along C does not include the samples of a pixel
    samples_per_pixel    number of samples per pixel (3 for RGB)
    page_indices         index of the page of each plane, in C order of `shape`
    channel_names        name of each channel, or ""
    colors               Color attribute of each channel as written, or ""
    physical_sizes       PhysicalSizeZ, PhysicalSizeY and PhysicalSizeX as written, or ""
    physical_size_units  units of `physical_sizes`, or "µm" if not specified
    time_increment       TimeIncrement as written, or "", and its unit
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    size_y: int
    size_x: int
    samples_per_pixel: int
    page_indices: tuple[int, ...]
    channel_names: tuple[str, ...]
    colors: tuple[str, ...]
    physical_sizes: tuple[str, ...]
    physical_size_units: tuple[str, ...]
    time_increment: tuple[str, str]


def parse(ome_xml: str, page_count: int) -> list[OmeImage]:
    """Parse the images of an OME-XML document, in document order.

    Raises BadFile if the XML declares entities, contradicts itself, or declares planes that the file does not have.
    Raises UnusableOme if the XML is malformed, points to another file, or describes planes in other files.
    """
    root = _parse_root(ome_xml)
    tags = {_get_local_name(element) for element in root.iter()}
    if "BinaryOnly" in tags:
        raise UnusableOme("its OME-XML only points to another file, and referenced files are never opened")
    if any(tag.startswith("ModuloAlong") for tag in tags):
        raise UnusableOme("its OME-XML nests additional dimensions in Z, C or T (ModuloAlong)")
    if _has_planes_in_other_files(root):
        raise UnusableOme(
            "its OME-XML describes a set of several files, and referenced files are never opened. To segment the"
            " whole image, export the set as one file"
        )
    images = [_parse_image(element, page_count) for element in root if _get_local_name(element) == "Image"]
    if not images:
        raise UnusableOme("its OME-XML does not describe an image")
    return images


def _parse_root(ome_xml: str) -> Element:
    try:
        root: Element = fromstring(ome_xml, forbid_dtd=True)
    except DefusedXmlException as error:
        raise BadFile(
            "The OME-XML contains a document type declaration or entities, which are not supported. Remove them."
        ) from error
    except (ParseError, ValueError) as error:
        raise UnusableOme(f"its OME-XML is not well-formed ({error})") from error
    return root


def _has_planes_in_other_files(root: Element) -> bool:
    """Return whether planes are in other files. UUIDs are compared, because the files may have been renamed."""
    elements = [element for element in root.iter() if _get_local_name(element) == "TiffData"]
    uuids = {
        _find_children(element, "UUID")[0].text if _find_children(element, "UUID") else None for element in elements
    }
    own_uuid = root.get("UUID")
    return len(uuids) > 1 if own_uuid is None else bool(uuids - {own_uuid, None})


def _get_local_name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _find_children(element: Element, name: str) -> list[Element]:
    return [child for child in element if _get_local_name(child) == name]


def _parse_integer(element: Element, attribute: str, default: int | None = None) -> int:
    text = element.get(attribute)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if value < 0:
        raise BadFile(
            f"The OME-XML is damaged: {_get_local_name(element)} has the invalid value {attribute}={text!r}."
            " Export the file again."
        )
    return value


def _parse_image(element: Element, page_count: int) -> OmeImage:
    children = _find_children(element, "Pixels")
    if len(children) != 1:
        raise BadFile(
            "The OME-XML is damaged: an Image element must have exactly one Pixels element. Export the file again."
        )
    pixels = children[0]
    order = pixels.get("DimensionOrder", "")
    if sorted(order) != sorted("XYZCT") or order[:2] != "XY":
        raise BadFile(f"The OME-XML is damaged: DimensionOrder={order!r} is not valid. Export the file again.")
    channels = _find_children(pixels, "Channel")
    samples_per_pixel = _count_samples(channels)
    axes = order[:1:-1]
    shape = tuple(_parse_integer(pixels, f"Size{axis}") // (samples_per_pixel if axis == "C" else 1) for axis in axes)
    _check_plane_count(math.prod(shape), page_count)
    return OmeImage(
        name=element.get("Name", ""),
        axes=axes,
        shape=shape,
        size_y=_parse_integer(pixels, "SizeY"),
        size_x=_parse_integer(pixels, "SizeX"),
        samples_per_pixel=samples_per_pixel,
        page_indices=_parse_pages(_find_children(pixels, "TiffData"), axes, shape, page_count),
        channel_names=tuple(channel.get("Name", "") for channel in channels),
        colors=tuple(channel.get("Color", "") for channel in channels),
        physical_sizes=tuple(pixels.get(f"PhysicalSize{axis}", "") for axis in "ZYX"),
        physical_size_units=tuple(pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "ZYX"),
        time_increment=(pixels.get("TimeIncrement", ""), pixels.get("TimeIncrementUnit", "s")),
    )


def _check_plane_count(plane_count: int, page_count: int) -> None:
    if plane_count == 0:
        raise BadFile("The OME-XML is damaged: an image has no planes. Export the file again.")
    if plane_count > page_count:
        raise BadFile(
            f"The OME-XML declares {plane_count} planes, but the file has {page_count} pages. The file is truncated"
            " or is one of several files. Export the whole image as one file."
        )


def _count_samples(channels: list[Element]) -> int:
    """Return the number of samples per pixel. Raises UnusableOme if channels have different numbers of samples."""
    sample_counts = {_parse_integer(channel, "SamplesPerPixel", 1) for channel in channels} or {1}
    if len(sample_counts) > 1:
        raise UnusableOme("its OME-XML has channels with different numbers of samples")
    return max(1, *sample_counts)


def _parse_pages(elements: list[Element], axes: str, shape: tuple[int, ...], page_count: int) -> tuple[int, ...]:
    """Return the index of the page of each plane. Raises BadFile unless each plane is assigned exactly one page."""
    plane_count = math.prod(shape)
    if not elements and plane_count == page_count:
        return tuple(range(plane_count))
    pages: dict[int, int] = {}
    for element in elements:
        first_plane, first_page, count = _parse_tiff_data(element, axes, shape, page_count)
        for plane in range(first_plane, first_plane + count):
            if plane in pages:
                raise BadFile(f"The OME-XML assigns plane {plane} to two pages. Export the file again.")
            pages[plane] = first_page + plane - first_plane
    if len(pages) < plane_count:
        raise BadFile(
            f"The OME-XML declares {plane_count} planes but assigns pages to {len(pages)} of them. Export the file"
            " again."
        )
    return tuple(pages[plane] for plane in range(plane_count))


def _parse_tiff_data(element: Element, axes: str, shape: tuple[int, ...], page_count: int) -> tuple[int, int, int]:
    """Return the first plane, its page, and the number of consecutive planes. Raises BadFile."""
    plane_count, first_plane = math.prod(shape), _parse_first_plane(element, axes, shape)
    first_page = _parse_integer(element, "IFD", 0)
    count = _parse_integer(
        element, "PlaneCount", _parse_integer(element, "NumPlanes", 0 if element.get("IFD") is None else 1)
    )
    count = count or min(plane_count - first_plane, page_count - first_page)
    if first_plane + count > plane_count or first_page + count > page_count:
        raise BadFile(
            f"The OME-XML assigns planes {first_plane} to {first_plane + count - 1} (of {plane_count}) to pages"
            f" {first_page} to {first_page + count - 1}, but the file has {page_count} pages. The file is truncated or"
            " damaged. Export it again."
        )
    return first_plane, first_page, count


def _parse_first_plane(element: Element, axes: str, shape: tuple[int, ...]) -> int:
    plane = 0
    for axis, length in zip(axes, shape, strict=True):
        index = _parse_integer(element, f"First{axis}", 0)
        if index >= length:
            raise BadFile(
                f"The OME-XML is damaged: First{axis}={index}, but the length along {axis} is {length}."
                " Export the file again."
            )
        plane = plane * length + index
    return plane


@dataclass(frozen=True)
class OmeDetails:
    """Attributes of an image that do not depend on its pages. See `OmeImage`."""

    physical_sizes: tuple[str, ...] = ("", "", "")
    physical_size_units: tuple[str, ...] = ("µm", "µm", "µm")
    channel_names: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    time_increment: tuple[str, str] = ("", "s")


def read_details(ome_xml: str) -> OmeDetails:
    """Read the details of the largest image from OME-XML that may not describe the pages of the file.

    Returns no details if the XML is not usable.
    """
    try:
        root = _parse_root(ome_xml) if "OME" in ome_xml[:2000] else None
    except (BadFile, UnusableOme):
        root = None
    candidates = [] if root is None else [element for element in root.iter() if _get_local_name(element) == "Pixels"]
    if not candidates:
        return OmeDetails()
    pixels = max(candidates, key=_count_voxels)
    channels = _find_children(pixels, "Channel")
    return OmeDetails(
        physical_sizes=tuple(pixels.get(f"PhysicalSize{axis}", "") for axis in "ZYX"),
        physical_size_units=tuple(pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "ZYX"),
        channel_names=tuple(channel.get("Name", "") for channel in channels),
        colors=tuple(channel.get("Color", "") for channel in channels),
        time_increment=(pixels.get("TimeIncrement", ""), pixels.get("TimeIncrementUnit", "s")),
    )


def _count_voxels(pixels: Element) -> int:
    lengths = [pixels.get(f"Size{axis}", "") for axis in "XYZCT"]
    return math.prod(int(length) if length.isdecimal() and len(length) < 10 else 1 for length in lengths)
