"""Read metadata from the tags and headers of a TIFF: voxel size, channel names and colors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tifffile import TiffFile, TiffPage
from tifffile.tifffile import shaped_description_metadata

from service.core.quantities import TimeInterval
from service.formats import sampling
from service.formats.sampling import Calibration, Resolution

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


def read_resolution(page: TiffPage) -> Resolution:
    """Read the resolution tags."""
    ratios = [page.tags.valueof(tag) for tag in ("XResolution", "YResolution")]
    x, y = (ratio if isinstance(ratio, tuple) and len(ratio) == 2 else None for ratio in ratios)
    return Resolution((x, y), {2: "inch", 3: "cm"}.get(page.tags.valueof("ResolutionUnit", 2), ""))


def read_calibration(tiff: TiffFile, page: TiffPage, kind: str) -> Calibration:
    """Read the voxel size from the container's metadata or, if the container has none, from the resolution tags."""
    match kind:
        case "imagej":
            return sampling.parse_imagej_calibration(
                tiff.imagej_metadata or {}, read_resolution(page), "ImageJ metadata"
            )
        case "shaped":
            return sampling.parse_imagej_calibration(
                _read_shaped_metadata(page), read_resolution(page), "tifffile metadata"
            )
        case "lsm":
            return _read_lsm_calibration(tiff)
        case "stk":
            return _read_metamorph_calibration(tiff)
        case "mmstack":
            return _read_micromanager_calibration(tiff)
        case _:
            return read_resolution(page).get_calibration()


def _read_lsm_calibration(tiff: TiffFile) -> Calibration:
    header = tiff.lsm_metadata or {}
    return sampling.parse_calibration([header.get(f"VoxelSize{axis}") for axis in "ZYX"], "m", "LSM header")


def _read_metamorph_calibration(tiff: TiffFile) -> Calibration:
    header = tiff.stk_metadata or {}
    distances = header.get("ZDistance", ())
    z = float(distances[0]) if len(distances) else None
    sizes = [z, header.get("YCalibration"), header.get("XCalibration")]
    return sampling.parse_calibration(sizes, str(header.get("CalibrationUnits", "")), "MetaMorph header")


def _read_micromanager_calibration(tiff: TiffFile) -> Calibration:
    summary = _read_micromanager_summary(tiff)
    sizes = [summary.get(key) or None for key in ("z-step_um", "PixelSize_um", "PixelSize_um")]
    return sampling.parse_calibration(sizes, "um", "Micro-Manager metadata")


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
