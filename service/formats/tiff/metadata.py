"""Metadata in the tags and headers of a TIFF: sampling, channel names, colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tifffile import TiffFile, TiffPage
from tifffile.tifffile import shaped_description_metadata

from service.core.quantities import TimeInterval
from service.formats import sampling
from service.formats.sampling import Calibration, Resolution

CONTAINERS = {
    "shaped": "TIFF written by tifffile",
    "imagej": "ImageJ TIFF",
    "lsm": "Zeiss LSM",
    "stk": "MetaMorph STK",
    "mmstack": "Micro-Manager stack",
    "fluoview": "Olympus FluoView TIFF",
    "scanimage": "ScanImage TIFF",
}


def stated_planes(tiff: TiffFile, kind: str) -> int:
    """Return the number of planes that the metadata promise, 0 where they promise none."""
    page = tiff.pages.first
    if kind == "imagej":
        metadata = tiff.imagej_metadata or {}
        channels, slices, frames = (int(metadata.get(key, 1)) for key in ("channels", "slices", "frames"))
        return slices * frames * (1 if channels == page.samplesperpixel else channels)
    if kind == "shaped":
        return int(math.prod(_shaped_metadata(page).get("shape", ()))) // max(1, page.size)
    return 0


def _shaped_metadata(page: TiffPage) -> dict[str, Any]:
    return shaped_description_metadata(page.shaped_description or "{}")


def resolution(page: TiffPage) -> Resolution:
    """Read the resolution tags."""
    ratios = [page.tags.valueof(tag) for tag in ("XResolution", "YResolution")]
    x, y = (ratio if isinstance(ratio, tuple) and len(ratio) == 2 else None for ratio in ratios)
    return Resolution((x, y), {2: "inch", 3: "cm"}.get(page.tags.valueof("ResolutionUnit", 2), ""))


def calibration(tiff: TiffFile, page: TiffPage, kind: str) -> Calibration:
    """Read the sampling that a container states, else that of the resolution tags."""
    match kind:
        case "imagej":
            return sampling.from_spacing(tiff.imagej_metadata or {}, resolution(page), "ImageJ metadata")
        case "shaped":
            return sampling.from_spacing(_shaped_metadata(page), resolution(page), "tifffile metadata")
        case "lsm":
            return _read_zeiss(tiff)
        case "stk":
            return _read_metamorph(tiff)
        case "mmstack":
            return _read_micromanager(tiff)
        case _:
            return resolution(page).calibration()


def _read_zeiss(tiff: TiffFile) -> Calibration:
    header = tiff.lsm_metadata or {}
    return sampling.from_lengths([header.get(f"VoxelSize{axis}") for axis in "ZYX"], "m", "LSM header")


def _read_metamorph(tiff: TiffFile) -> Calibration:
    header = tiff.stk_metadata or {}
    distances = header.get("ZDistance", ())
    z = float(distances[0]) if len(distances) else None
    sizes = [z, header.get("YCalibration"), header.get("XCalibration")]
    return sampling.from_lengths(sizes, str(header.get("CalibrationUnits", "")), "MetaMorph header")


def _read_micromanager(tiff: TiffFile) -> Calibration:
    summary = _micromanager_summary(tiff)
    sizes = [summary.get(key) or None for key in ("z-step_um", "PixelSize_um", "PixelSize_um")]
    return sampling.from_lengths(sizes, "um", "Micro-Manager metadata")


def _micromanager_summary(tiff: TiffFile) -> Mapping[str, Any]:
    summary: Mapping[str, Any] = (tiff.micromanager_metadata or {}).get("Summary", {})
    return summary


def _zeiss_channels(tiff: TiffFile) -> Mapping[str, Any]:
    """Return names and colours of the channels from the header of LSM."""
    return (tiff.lsm_metadata or {}).get("ChannelColors") or {}


def find_time_interval(tiff: TiffFile, kind: str) -> TimeInterval | None:
    """Read the time between time points that a container states."""
    match kind:
        case "imagej":
            header = tiff.imagej_metadata or {}
            return sampling.parse_time_interval(header.get("finterval"), str(header.get("tunit", "s")))
        case "lsm":
            return sampling.parse_time_interval((tiff.lsm_metadata or {}).get("TimeIntervall"), "s")
        case "mmstack":
            summary = _micromanager_summary(tiff)
            return sampling.parse_time_interval(summary.get("Interval_ms"), "ms")
        case _:
            return None


def channel_names(tiff: TiffFile, kind: str) -> tuple[str, ...]:
    """Read channel names from a vendor's header; () where it has none."""
    names: Any = ()
    if kind == "lsm":
        names = _zeiss_channels(tiff).get("ColorNames", ())
    if kind == "mmstack":
        names = _micromanager_summary(tiff).get("ChNames", ())
    return tuple(str(name) for name in names) if isinstance(names, list | tuple) else ()


def channel_colours(tiff: TiffFile, kind: str) -> tuple[str, ...]:
    """Read colours of channels as #rrggbb; () where a container has none, or none that can be understood."""
    try:
        return _read_colours(tiff, kind)
    except (AttributeError, LookupError, TypeError, ValueError):
        return ()


def _read_colours(tiff: TiffFile, kind: str) -> tuple[str, ...]:
    match kind:
        case "imagej":
            # By channel a table [3, 256] of what grey values are shown as.
            tables = (tiff.imagej_metadata or {}).get("LUTs", ())
            return tuple(_format_colour([row[-1] for row in table]) for table in tables)
        case "lsm":
            return tuple(_format_colour(colour[:3]) for colour in _zeiss_channels(tiff).get("Colors", ()))
        case "mmstack":
            # Signed numbers, from high to low: alpha, red, green, blue.
            colours = _micromanager_summary(tiff).get("ChColors", ())
            return tuple(f"#{int(colour) & 0xFFFFFF:06x}" for colour in colours)
        case _:
            return ()


def parse_ome_colour(text: str) -> str:
    """Return the colour of a channel in OME-XML, a signed number RGBA, as #rrggbb; "" where it is none."""
    try:
        return f"#{int(text) >> 8 & 0xFFFFFF:06x}"
    except ValueError:
        return ""


def _format_colour(parts: Sequence[int]) -> str:
    red, green, blue = (int(part) & 0xFF for part in parts)
    return f"#{red:02x}{green:02x}{blue:02x}"


def sample_names(page: TiffPage, count: int) -> tuple[str, ...]:
    """Return names of `count` samples of a pixel by the page's colour space; one sample more is transparency."""
    spaces = {2: ("red", "green", "blue"), 6: ("red", "green", "blue"), 5: ("cyan", "magenta", "yellow", "black")}
    space = spaces.get(int(page.photometric), ("grey",) if count == 2 else ())[:count]
    names = space + ("alpha",) * (0 < len(space) == count - 1)
    return names + ("",) * (count - len(names))


def remarks(page: TiffPage) -> tuple[str, ...]:
    """Return notes for pages whose stored numbers are not brightness."""
    if page.photometric == 3:
        return ("The image has a colour palette; the stored numbers are used, not the colours.",)
    if page.photometric == 0:
        return ("The image is stored with 0 as white; the stored numbers are used, bright is low.",)
    return ()
