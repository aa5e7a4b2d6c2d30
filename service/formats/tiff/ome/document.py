"""Parse an OME-XML document, and read the attributes of its images that do not depend on the pages of the file.

Schema: OME 2016-06, https://docs.openmicroscopy.org/ome-model/. Only this module parses XML. It rejects entities and
document type declarations, and never follows references to other files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException  # type: ignore[import-untyped]
from defusedxml.ElementTree import fromstring  # type: ignore[import-untyped]

from service.core import quantities
from service.core.errors import BadFile


class InconsistentOme(Exception):
    """OME-XML that contradicts itself or the pages. Planes can be read without it if the request specifies axes.

    The message is a sentence, and `advice` has the other arguments of `BadFile`. This package handles the exception.
    """

    def __init__(self, message: str, **advice: Any) -> None:
        super().__init__(message)
        self.advice = advice


class UnusableOme(Exception):
    """OME-XML that does not describe the pages. The message is a clause. This package handles the exception."""


@dataclass(frozen=True)
class OmeDetails:
    """Attributes of an Image element that do not depend on its pages.

    channel_names        name of each channel, or ""
    colors               Color attribute of each channel as written, or ""
    physical_sizes       PhysicalSizeZ, PhysicalSizeY and PhysicalSizeX as written, or ""
    physical_size_units  units of `physical_sizes`, or "µm" if not specified
    time_increment       TimeIncrement as written, or "", and its unit
    """

    channel_names: tuple[str, ...] = ()
    colors: tuple[str, ...] = ()
    physical_sizes: tuple[str, ...] = ("", "", "")
    physical_size_units: tuple[str, ...] = ("µm", "µm", "µm")
    time_increment: tuple[str, str] = ("", "s")


def parse_root(ome_xml: str) -> Element:
    """Return the root element. Raises BadFile for entities, and UnusableOme if the XML is not well-formed."""
    try:
        root: Element = fromstring(ome_xml, forbid_dtd=True)
    except DefusedXmlException as error:
        raise BadFile(
            "The OME-XML contains a document type declaration or entities, which are not supported. Remove them."
        ) from error
    except (ParseError, ValueError) as error:
        raise UnusableOme(f"its OME-XML is not well-formed ({error})") from error
    return root


def get_local_name(element: Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def find_children(element: Element, name: str) -> list[Element]:
    """Return the children with a name, in any namespace."""
    return [child for child in element if get_local_name(child) == name]


def parse_integer(element: Element, attribute: str, default: int | None = None) -> int:
    """Return an attribute that is not negative. Raises InconsistentOme if it has another value, or none."""
    text = element.get(attribute)
    if text is None and default is not None:
        return default
    try:
        value = quantities.parse_integer(text or "")
    except ValueError:
        value = -1
    if value < 0:
        raise InconsistentOme(
            f"The OME-XML is damaged: {get_local_name(element)} has the invalid value {attribute}={text!r}."
            " Export the file again."
        )
    return value


def read_details(ome_xml: str) -> OmeDetails:
    """Read the details of the largest image from OME-XML that may not describe the pages of the file.

    Returns no details if the XML is not usable.
    """
    try:
        elements = list(parse_root(ome_xml).iter()) if "OME" in ome_xml[:2000] else []
    except (BadFile, UnusableOme):
        return OmeDetails()
    candidates = [element for element in elements if get_local_name(element) == "Pixels"]
    if not candidates:
        return OmeDetails()
    pixels = max(candidates, key=_count_voxels)
    return read_pixels_details(pixels, find_children(pixels, "Channel"))


def read_pixels_details(pixels: Element, channels: Sequence[Element]) -> OmeDetails:
    """Read the details of an image from its Pixels element and the Channel elements in it."""
    return OmeDetails(
        channel_names=tuple(channel.get("Name", "") for channel in channels),
        colors=tuple(channel.get("Color", "") for channel in channels),
        physical_sizes=tuple(pixels.get(f"PhysicalSize{axis}", "") for axis in "ZYX"),
        physical_size_units=tuple(pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "ZYX"),
        time_increment=(pixels.get("TimeIncrement", ""), pixels.get("TimeIncrementUnit", "s")),
    )


def _count_voxels(pixels: Element) -> int:
    lengths = [pixels.get(f"Size{axis}", "") for axis in "XYZCT"]
    return math.prod(int(length) if length.isdecimal() and len(length) < 10 else 1 for length in lengths)
