"""Read metadata from the tags and headers of a TIFF: plane counts, time interval, channel names and colors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tifffile import TiffFile, TiffPage
from tifffile.tifffile import shaped_description_metadata

from service.core.quantities import TimeInterval
from service.formats import sampling
from service.formats.tiff import ome

CONTAINER_NAMES = {
    "shaped": "TIFF written by tifffile",
    "imagej": "ImageJ TIFF",
    "lsm": "Zeiss LSM",
    "stk": "MetaMorph STK",
    "mmstack": "Micro-Manager stack",
    "fluoview": "Olympus FluoView TIFF",
    "scanimage": "ScanImage TIFF",
}


def count_expected_planes(tiff: TiffFile, kind: str) -> int:
    """Return the number of planes that the metadata declares, or 0 if it declares none."""
    page = tiff.pages.first
    if kind == "imagej":
        metadata = tiff.imagej_metadata or {}
        channels, slices, frames = (int(metadata.get(key, 1)) for key in ("channels", "slices", "frames"))
        return slices * frames * (1 if channels == page.samplesperpixel else channels)
    if kind == "shaped":
        return int(math.prod(_read_shaped_metadata(page).get("shape", ()))) // max(1, page.size)
    return 0


def _read_shaped_metadata(page: TiffPage) -> dict[str, Any]:
    return shaped_description_metadata(page.shaped_description or "{}")


def _read_micromanager_summary(tiff: TiffFile) -> Mapping[str, Any]:
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
            summary = _read_micromanager_summary(tiff)
            return sampling.parse_time_interval(summary.get("Interval_ms"), "ms")
        case _:
            return None


def read_channel_names(tiff: TiffFile, kind: str) -> tuple[str, ...]:
    """Read channel names from a vendor's header, or return () if it has none."""
    names: Any = ()
    if kind == "lsm":
        names = _read_lsm_channels(tiff).get("ColorNames", ())
    if kind == "mmstack":
        names = _read_micromanager_summary(tiff).get("ChNames", ())
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
            colors = _read_micromanager_summary(tiff).get("ChColors", ())
            return tuple(f"#{int(color) & 0xFFFFFF:06x}" for color in colors)
        case _:
            return ()


def find_details(tiff: TiffFile) -> tuple[tuple[str, ...], tuple[str, ...], TimeInterval | None]:
    """Return the channel names, the channel colors and the time interval of a file whose axes are not usable."""
    details = ome.read_details(tiff.pages.first.description)
    kinds = [kind for kind in CONTAINER_NAMES if getattr(tiff, f"is_{kind}")]
    names, colors = details.channel_names, tuple(map(parse_ome_color, details.colors))
    interval = sampling.parse_time_interval(*details.time_increment)
    for kind in kinds:
        names = names or read_channel_names(tiff, kind)
        colors = colors or read_channel_colors(tiff, kind)
        interval = interval or find_time_interval(tiff, kind)
    return names, colors, interval


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


def get_pixel_value_notes(page: TiffPage) -> tuple[str, ...]:
    """Return notes for pages whose stored values are not proportional to brightness."""
    if page.photometric == 3:
        return ("The image has a color palette. The stored values are used instead of the colors.",)
    if page.photometric == 0:
        return (
            "The image is stored inverted, with 0 as white. The stored values are used: bright areas have low values.",
        )
    return ()
