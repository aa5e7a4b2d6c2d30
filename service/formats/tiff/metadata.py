"""Read metadata from the tags and headers of a TIFF: plane counts, time interval, channel names and colors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tifffile import TiffFile, TiffFrame, TiffPage
from tifffile.tifffile import shaped_description_metadata

from service.core.errors import BadFile
from service.core.quantities import TimeInterval
from service.core.types import Array
from service.formats import sampling

CONTAINER_NAMES = {
    "shaped": "TIFF written by tifffile",
    "imagej": "ImageJ TIFF",
    "lsm": "Zeiss LSM",
    "stk": "MetaMorph STK",
    "mmstack": "Micro-Manager stack",
    "fluoview": "Olympus FluoView TIFF",
    "scanimage": "ScanImage TIFF",
}

# Tag in which Micro-Manager stores the metadata of a plane.
_MICROMANAGER_TAG = 51123
# Planes of one MetaMorph stack have distances that differ by a smaller factor.
_MAX_DISTANCE_RATIO = 1000
# Values of the tag Orientation other than 1, which means that the first row is at the top and the first column at the
# left.
_ROTATED_ORIENTATIONS = range(2, 9)
# Notes by the value of the tag PhotometricInterpretation.
_VALUE_NOTES = {
    0: "The image is stored inverted, with 0 as white. The stored values are used: bright areas have low values.",
    3: "The image has a color palette. The stored values are used instead of the colors.",
    5: "The samples of the pixels are amounts of inks. The stored values are used: bright areas have low values.",
    8: "The samples of the pixels are L*, a* and b*. The stored values are used. Only L* represents brightness.",
    9: "The samples of the pixels are L*, a* and b*. The stored values are used. Only L* represents brightness.",
    32803: "Neighboring pixels have different colors, because the image is the raw mosaic of a color camera. The stored"
    " values are used. Save the image as gray or RGB instead.",
    32844: "The pixels are stored as logarithms of the brightness. The stored values are used.",
    32845: "The pixels are stored as logarithms of the brightness. The stored values are used.",
}
# Names of the position of a plane along each axis, in the `Axes` of an NDTiff and in other files.
_POSITION_NAMES = {
    "T": ("time", "FrameIndex"),
    "R": ("position", "PositionIndex"),
    "Z": ("z", "SliceIndex"),
    "C": ("channel", "ChannelIndex"),
}


def read_declared_dimensions(tiff: TiffFile, kind: str) -> tuple[str, tuple[int, ...]]:
    """Return axes and lengths of the planes that the metadata declares, slowest first. ("", ()) if it declares none."""
    match kind:
        case "imagej":
            return _read_imagej_dimensions(tiff)
        case "shaped":
            return _read_shaped_dimensions(tiff.pages.first)
        case "mmstack":
            return _read_micromanager_dimensions(tiff)
        case _:
            return "", ()


def _read_imagej_dimensions(tiff: TiffFile) -> tuple[str, tuple[int, ...]]:
    """Read the dimensions of a hyperstack. Channels that are samples of a pixel are not counted."""
    metadata, page = tiff.imagej_metadata or {}, tiff.pages.first
    for key in ("images", "frames", "slices", "channels"):
        if type(metadata.get(key, 1)) is not int:
            raise BadFile(
                f"The description of ImageJ in the file has {key}={str(metadata[key])[:40]}, which is not an integer."
                " Open the file in Fiji, check its dimensions, and save it again."
            )
    lengths = {axis: int(metadata.get(key, 1)) for axis, key in (("T", "frames"), ("Z", "slices"), ("C", "channels"))}
    if lengths["C"] == page.samplesperpixel:
        lengths["C"] = 1
    order = _read_imagej_order(metadata, lengths)
    # tifffile reads the same mapping later.
    metadata["order"] = order
    # ImageJ names the fastest axis first.
    axes = order[::-1].upper()
    return axes, tuple(lengths[axis] for axis in axes)


def _read_imagej_order(metadata: Mapping[str, Any], lengths: Mapping[str, int]) -> str:
    """Return the order of the dimensions, fastest first, such as "czt". Raises BadFile if it is unknown but matters.

    Macros write the notation of the dialogs of ImageJ, such as "xyzct".
    """
    order = str(metadata.get("order", "czt")).lower().removeprefix("xy")
    if sorted(order) == sorted("czt"):
        return order
    if order != "default" and sum(length > 1 for length in lengths.values()) > 1:
        raise BadFile(
            f"The description of ImageJ in the file has order={order[:40]}, which is not an order of c, z and t. Open"
            " the file in Fiji, check its dimensions, and save it again."
        )
    return "czt"


def _read_shaped_dimensions(page: TiffPage) -> tuple[str, tuple[int, ...]]:
    metadata = _read_shaped_metadata(page)
    shape = tuple(int(n) for n in metadata.get("shape", ()))
    axes = str(metadata.get("axes", ""))
    axes = axes if len(axes) == len(shape) else "Q" * len(shape)
    for count in range(len(shape) + 1):
        if math.prod(shape[count:]) == page.size:
            return axes[:count], shape[:count]
    return "Q", (math.prod(shape) // max(1, page.size),)


def _read_micromanager_dimensions(tiff: TiffFile) -> tuple[str, tuple[int, ...]]:
    """Read the dimensions of a Micro-Manager stack. Only the positions on the stage that the file has are counted."""
    axes = _get_micromanager_axes(tiff)
    positions, _ = read_micromanager_index(tiff, axes)
    return axes, _get_micromanager_shape(tiff, axes, positions)


def _get_micromanager_axes(tiff: TiffFile) -> str:
    """Return the axes of a Micro-Manager acquisition, slowest first, where R is the position on the stage."""
    summary = read_micromanager_summary(tiff)
    time_and_position = "TR" if summary.get("TimeFirst", True) else "RT"
    return time_and_position + ("ZC" if summary.get("SlicesFirst", True) else "CZ")


def _get_micromanager_shape(tiff: TiffFile, axes: str, positions: Array) -> tuple[int, ...]:
    """Return the declared lengths, or the positions of the planes that the file has if they exceed them."""
    summary = read_micromanager_summary(tiff)
    intended = summary.get("IntendedDimensions") or {}
    found = positions.max(axis=0, initial=-1) + 1
    keys = {"T": ("time", "Frames"), "Z": ("z", "Slices"), "C": ("channel", "Channels")}
    lengths = {axis: int(intended.get(ndtiff_key) or summary.get(key) or 1) for axis, (ndtiff_key, key) in keys.items()}
    return tuple(max(lengths.get(axis, 1), int(length), 1) for axis, length in zip(axes, found, strict=True))


def _read_position_values(page: TiffPage | TiffFrame, axes: str) -> list[Any]:
    """Return the position of a page along each axis, as a number or a name."""
    page_metadata = page.aspage().tags.valueof(_MICROMANAGER_TAG)
    tags = page_metadata if isinstance(page_metadata, dict) else {}
    named = tags.get("Axes") or {}
    return [named.get(_POSITION_NAMES[axis][0], tags.get(_POSITION_NAMES[axis][1], 0)) for axis in axes]


def _number_positions(axis: str, values: Sequence[Any]) -> list[int]:
    """Return the positions of pages along an axis as numbers from 0.

    Channels and stage positions may have names. Planes may have negative numbers.
    """
    if not all(isinstance(value, int) for value in values):
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        return [numbers[value] for value in values]
    first = min(values) if min(values) < 0 or axis == "R" else 0
    return [value - first for value in values]


def read_micromanager_positions(
    tiff: TiffFile, pages: Sequence[TiffPage | TiffFrame]
) -> tuple[str, tuple[int, ...], Array | None]:
    """Read the position of each page from its own metadata: an NDTiff, or a file without an index of its planes.

    Returns axes, declared lengths, and positions [n, axes], or None if pages have no positions or the same position.
    """
    axes = _get_micromanager_axes(tiff)
    values = [_read_position_values(page, axes) for page in pages]
    positions = np.zeros((len(pages), len(axes)), np.int64)
    for index, (axis, column) in enumerate(zip(axes, zip(*values, strict=True), strict=False)):
        positions[:, index] = _number_positions(axis, column)
    has_own_positions = len(np.unique(positions, axis=0)) == len(pages)
    return axes, _get_micromanager_shape(tiff, axes, positions), positions if has_own_positions else None


def has_micromanager_positions(tiff: TiffFile) -> bool:
    """Return whether the first of several pages has a position of Micro-Manager. Files can have it without a header."""
    tags = tiff.pages.first.tags.valueof(_MICROMANAGER_TAG)
    names = {"Axes", *(name for _, name in _POSITION_NAMES.values())}
    return len(tiff.pages) > 1 and isinstance(tags, dict) and not names.isdisjoint(tags)


def find_stk_problem(tiff: TiffFile) -> str:
    """Return a clause that explains why the planes of a MetaMorph file are not those of one stack, or ""."""
    wavelengths = np.unique(np.asarray((tiff.stk_metadata or {}).get("Wavelengths", ())))
    if len(wavelengths) > 1:
        return f"its planes have {len(wavelengths)} different wavelengths"
    # Where the next stack begins, the distance is zero, or negative and therefore stored as a very large number.
    distances = _read_stk_distances(tiff)
    if distances.any() and (not distances.all() or distances.max() > _MAX_DISTANCE_RATIO * distances.min()):
        return "the distances between its planes differ, so it may contain several stacks"
    return ""


def is_stk_stack(tiff: TiffFile) -> bool:
    """Return whether all planes of a MetaMorph file except the first have a distance from the previous one."""
    distances = _read_stk_distances(tiff)
    return len(distances) > 0 and bool(distances.all())


def _read_stk_distances(tiff: TiffFile) -> Array:
    """Return the distance of each plane from the previous one. The distance of the first plane is undefined."""
    return np.asarray((tiff.stk_metadata or {}).get("ZDistance", ()), np.float64)[1:]


def read_micromanager_index(tiff: TiffFile, axes: str) -> tuple[Array, list[int]]:
    """Return the positions [n, axes] of the planes in a Micro-Manager file, and the offsets of their pages.

    The positions on the stage (R) are numbered from the first one in the file.
    """
    index_map = (tiff.micromanager_metadata or {}).get("IndexMap", np.empty((0, 5), np.uint32))
    positions = index_map[:, ["CZTR".index(axis) for axis in axes]].astype(np.int64)
    if "R" in axes and len(positions):
        positions[:, axes.index("R")] -= positions[:, axes.index("R")].min()
    return positions, index_map[:, 4].tolist()


def read_shaped_headers(pages: Iterable[TiffPage | TiffFrame]) -> list[dict[str, Any]]:
    """Read the description that tifffile wrote for an image, from each page that has one."""
    headers = [_read_shaped_metadata(page.aspage()) for page in pages]
    return [header for header in headers if "shape" in header]


def get_container_name(tiff: TiffFile, kind: str) -> str:
    """Return the name of a container."""
    is_ndtiff = kind == "mmstack" and (tiff.micromanager_metadata or {}).get("MajorVersion")
    return "NDTiff" if is_ndtiff else CONTAINER_NAMES[kind]


def _read_shaped_metadata(page: TiffPage) -> dict[str, Any]:
    return shaped_description_metadata(page.shaped_description or "{}")


def read_micromanager_summary(tiff: TiffFile) -> Mapping[str, Any]:
    """Return the summary of a Micro-Manager acquisition, or an empty mapping."""
    summary: Mapping[str, Any] = (tiff.micromanager_metadata or {}).get("Summary", {})
    return summary


def _read_lsm_channels(tiff: TiffFile) -> Mapping[str, Any]:
    """Return the names and colors of the channels from an LSM header."""
    return (tiff.lsm_metadata or {}).get("ChannelColors") or {}


def find_time_interval(tiff: TiffFile, kind: str) -> TimeInterval | None:
    """Read the time between two time points from the container's metadata, or return None."""
    match kind:
        case "imagej":
            header = tiff.imagej_metadata or {}
            return sampling.parse_time_interval(header.get("finterval"), str(header.get("tunit", "s")))
        case "lsm":
            return sampling.parse_time_interval((tiff.lsm_metadata or {}).get("TimeIntervall"), "s")
        case "mmstack":
            summary = read_micromanager_summary(tiff)
            return sampling.parse_time_interval(summary.get("Interval_ms"), "ms")
        case _:
            return None


def read_channel_names(tiff: TiffFile, kind: str) -> tuple[str, ...]:
    """Read channel names from a vendor's header, or return () if it has none."""
    names: Any = ()
    if kind == "lsm":
        names = _read_lsm_channels(tiff).get("ColorNames", ())
    if kind == "mmstack":
        names = read_micromanager_summary(tiff).get("ChNames", ())
    return tuple(str(name) for name in names) if isinstance(names, list | tuple) else ()


def read_channel_colors(tiff: TiffFile, kind: str) -> tuple[str, ...]:
    """Read channel colors as #rrggbb, or return () if the container has no readable colors."""
    try:
        return _read_colors(tiff, kind)
    except (AttributeError, LookupError, TypeError, ValueError):
        return ()


def _read_colors(tiff: TiffFile, kind: str) -> tuple[str, ...]:
    match kind:
        case "imagej":
            # One lookup table [3, 256] per channel. The last entry is the color of the brightest pixels.
            tables = (tiff.imagej_metadata or {}).get("LUTs", ())
            return tuple(_format_color([row[-1] for row in table]) for table in tables)
        case "lsm":
            return tuple(_format_color(color[:3]) for color in _read_lsm_channels(tiff).get("Colors", ()))
        case "mmstack":
            # Signed 32-bit integers that consist of alpha, red, green and blue, from the highest to the lowest byte.
            colors = read_micromanager_summary(tiff).get("ChColors", ())
            return tuple(f"#{int(color) & 0xFFFFFF:06x}" for color in colors)
        case _:
            return ()


def parse_ome_color(rgba_text: str) -> str:
    """Convert a channel color of OME-XML, a signed RGBA integer, to #rrggbb. Return "" if it is not a number."""
    try:
        return f"#{int(rgba_text) >> 8 & 0xFFFFFF:06x}"
    except ValueError:
        return ""


def _format_color(rgb: Sequence[int]) -> str:
    red, green, blue = (int(value) & 0xFF for value in rgb)
    return f"#{red:02x}{green:02x}{blue:02x}"


def get_sample_names(page: TiffPage, sample_count: int) -> tuple[str, ...]:
    """Return the names of the `sample_count` samples of a pixel in its color space. An extra sample is named alpha."""
    names_by_color_space = {
        2: ("red", "green", "blue"),
        6: ("red", "green", "blue"),
        5: ("cyan", "magenta", "yellow", "black"),
    }
    color_names = names_by_color_space.get(int(page.photometric), ("grey",) if sample_count == 2 else ())[:sample_count]
    names = color_names + ("alpha",) * (0 < len(color_names) == sample_count - 1)
    return names + ("",) * (sample_count - len(names))


def get_page_notes(page: TiffPage) -> tuple[str, ...]:
    """Return notes for pages that are copies, that viewers may rotate, or whose values do not represent brightness."""
    orientation = page.tags.valueof("Orientation", 1)
    if orientation in _ROTATED_ORIENTATIONS:
        return (
            f"The TIFF tag Orientation is {orientation}: the rows and columns are meant to be rotated or mirrored,"
            " which some viewers do. The tag is not applied, as in Fiji: the labels match the stored rows and columns.",
            *_get_value_notes(page),
        )
    return _get_value_notes(page)


def is_inverted(page: TiffPage) -> bool:
    """Return whether the values of a page are inverted, with 0 as white."""
    # tifffile reports a missing tag as 0.
    return bool(page.tags.valueof("PhotometricInterpretation", None) == 0)


def _get_value_notes(page: TiffPage) -> tuple[str, ...]:
    if page.is_reduced and page.subifds is not None:
        return ("The file marks its pages as reduced copies of images that are stored elsewhere, which are not read.",)
    if page.bitspersample == 24 and page.dtype is not None and page.dtype.kind in "ui":
        return ("The pixels are integers of 24 bits. They are read with the most significant byte first.",)
    # tifffile reports a missing tag as 0.
    note = _VALUE_NOTES.get(page.tags.valueof("PhotometricInterpretation", None))
    missing = str(page.tags.valueof("GDAL_NODATA", "nan")).strip(" \0")[:32]
    missing_note = (
        f"The file marks pixels with the value {missing} as missing (tag GDAL_NODATA). They are used as intensities, so"
        " set them to the intensity of the background."
    )
    return tuple(filter(None, [note, "" if missing.lower() in {"nan", "0"} else missing_note]))
