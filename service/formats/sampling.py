"""Voxel sizes and time intervals from files: numbers in many units, under many names, often missing or wrong.

Every voxel size becomes micrometres or None. A file never fails for its sampling: a value that is not a positive number
of a known unit counts as unknown, and an unknown voxel size leaves a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.core.quantities import PLAUSIBLE_LENGTHS, TimeInterval, VoxelSize

_SI = {
    "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "da": 1, "": 0, "d": -1, "c": -2,
    "m": -3, "µ": -6, "n": -9, "p": -12, "f": -15, "a": -18, "z": -21, "y": -24,
}  # fmt: skip
_INCH = 25_400.0

# All lengths in UnitsLength of the OME schema, and spellings of the common ones by ImageJ and others.
MICROMETRES: dict[str, float] = {
    **{f"{prefix}m": 10.0 ** (power + 6) for prefix, power in _SI.items()},
    "Å": 1e-4,
    "thou": _INCH / 1000,
    "li": _INCH / 12,
    "in": _INCH,
    "ft": _INCH * 12,
    "yd": _INCH * 36,
    "mi": _INCH * 63_360,
    "ua": 149_597_870_700e6,
    "ly": 9_460_730_472_580_800e6,
    "pc": 3.0856775814913673e22,
    "pt": _INCH / 72,
    "um": 1.0,
    "inch": _INCH,
    "inches": _INCH,
    '"': _INCH,
    "angstrom": 1e-4,
}
for _word, _metres in (("meter", 1e6), ("metre", 1e6), ("micron", 1.0)):
    for _name, _factor in (("", 1.0), ("milli", 1e-3), ("centi", 1e-2), ("micro", 1e-6), ("nano", 1e-9)):
        if _word != "micron" or not _name:
            MICROMETRES[f"{_name}{_word}"] = MICROMETRES[f"{_name}{_word}s"] = _metres * _factor

# UnitsTime of the OME schema as far as microscopes need it, by its spellings there and in ImageJ.
TIME_UNITS = {
    spelling: unit
    for unit, spellings in {
        "s": ("s", "sec", "second", "seconds"),
        "ms": ("ms", "msec", "millisecond", "milliseconds"),
        "µs": ("µs", "us", "usec", "microsecond", "microseconds"),
        "ns": ("ns", "nsec"),
        "min": ("min", "minute", "minutes"),
        "h": ("h", "hr", "hour", "hours"),
        "d": ("d", "day", "days"),
    }.items()
    for spelling in spellings
}


@dataclass(frozen=True)
class Calibration:
    """Sampling of a file: micrometres along z, y, x, each None where unknown, and the name of its source."""

    z: float | None
    y: float | None
    x: float | None
    source: str
    notes: tuple[str, ...] = ()

    def voxel_size(self) -> VoxelSize | None:
        """Return the voxel size where all three edges are known, else None."""
        if self.z is None or self.y is None or self.x is None:
            return None
        return VoxelSize(self.z, self.y, self.x)

    def remarks(self) -> tuple[str, ...]:
        """Return the notes, with one more where not all edges are known."""
        known = {axis: size for axis, size in zip("zyx", (self.z, self.y, self.x), strict=True) if size is not None}
        if len(known) == 3:
            return self.notes
        if not known:
            return (*self.notes, NO_VOXEL_SIZE)
        stated = ", ".join(f"{axis} {size:g} um" for axis, size in known.items())
        return (
            *self.notes,
            f"Only part of the voxel size is stated ({stated}), so it counts as unknown; state it as voxel_size=Z,Y,X.",
        )


NO_VOXEL_SIZE = (
    "The file states no voxel size, so planes are taken to be as far apart as pixels, and sizes are in voxels; state it"
    " as voxel_size=Z,Y,X in micrometres."
)
NOTHING = Calibration(None, None, None, "not stated")


def normalise_unit(unit: str) -> str:
    """Return a unit without padding and with U+00B5 for micro.

    In files that may be U+00B5, U+03BC, ImageJ's escape, or UTF-8 that was read as Latin-1.
    """
    name = unit.strip().strip("\0")
    for alias in ("\\u00B5", "\\u00b5", "Âµ", "Î¼", "μ"):
        name = name.replace(alias, "µ")
    return name


def micrometres(unit: str) -> float | None:
    """Return the length of a unit in um, None for "pixel", "reference frame" and unknown units."""
    name = normalise_unit(unit)
    return MICROMETRES.get(name, MICROMETRES.get(name.lower()))


def length(value: Any, unit: str) -> float | None:
    """Convert `value` of `unit` to um; None where it is no number or beyond `PLAUSIBLE_LENGTHS`."""
    factor = micrometres(unit)
    try:
        size = float(value) * factor if factor is not None else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return size if PLAUSIBLE_LENGTHS[0] <= size <= PLAUSIBLE_LENGTHS[1] else None


def _convert_edge(axis: str, value: Any, unit: str, notes: list[str]) -> float | None:
    """Convert one edge to um; a value that is no plausible length leaves a note."""
    if value in (None, ""):
        return None
    size = length(value, unit)
    if size is None:
        stated = f"{str(value)[:32]} {unit[:16] or '(no unit)'}"
        notes.append(f"The file states a voxel size of {stated} along {axis}, which is taken as unknown.")
    return size


@dataclass(frozen=True)
class Resolution:
    """The tags XResolution, YResolution (numerator, denominator) and ResolutionUnit of a page."""

    ratios: tuple[tuple[int, int] | None, tuple[int, int] | None]
    unit: str

    def pixel(self, index: int) -> float | str | None:
        """Return the units per pixel along x (0) or y (1); "1/0" for a ratio that is not a number."""
        ratio = self.ratios[index]
        if ratio is None:
            return None
        return ratio[1] / ratio[0] if ratio[0] else "1/0"

    def calibration(self) -> Calibration:
        """Return the pixel size in the plane, where the tags state a plausible one.

        Image editors and screens write meaningless dots per inch (72, 96, 300), so only centimetres, and pixels below
        20 um, count. No tag holds the distance between planes.
        """
        y, x = length(self.pixel(1), self.unit), length(self.pixel(0), self.unit)
        if self.unit != "cm" or not y or not x or max(y, x) > 20:
            return NOTHING
        return Calibration(None, y, x, "resolution tags")


def from_spacing(metadata: Mapping[str, Any], tags: Resolution, source: str) -> Calibration:
    """Convert ImageJ's `spacing` and `unit`: z is a length, x and y are pixels per unit in the resolution tags."""
    unit = str(metadata.get("unit") or "")
    if micrometres(unit) is None:
        return tags.calibration() if not unit else NOTHING
    notes: list[str] = []
    z = _convert_edge("z", metadata.get("spacing"), str(metadata.get("zunit") or unit), notes)
    y = _convert_edge("y", tags.pixel(1), str(metadata.get("yunit") or unit), notes)
    x = _convert_edge("x", tags.pixel(0), unit, notes)
    if tags.ratios == ((1, 1), (1, 1)):
        notes.append(
            f"The file states exactly one pixel per {unit[:16]} in the plane, which some programs also write when they"
            " do not know it; voxel_size=Z,Y,X overrides it."
        )
    return Calibration(z, y, x, source, tuple(notes)) if any((z, y, x)) else NOTHING


def from_lengths(sizes: Sequence[Any], units: str | Sequence[str], source: str) -> Calibration:
    """Convert edges along z, y, x, in one unit or each in its own."""
    notes: list[str] = []
    of_axes = (units,) * 3 if isinstance(units, str) else units
    z, y, x = (_convert_edge(a, s, u, notes) for a, s, u in zip("zyx", sizes, of_axes, strict=True))
    return Calibration(z, y, x, source, tuple(notes))


def parse_time_interval(value: Any, unit: str) -> TimeInterval | None:
    """Return the interval of `value` units, None where that is no positive number of a known unit."""
    name = normalise_unit(unit)
    # OME's Ms are 10**6 seconds.
    known = None if name == "Ms" else TIME_UNITS.get(name.lower())
    try:
        length = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return TimeInterval(length, known) if known and math.isfinite(length) and length > 0 else None
