"""Parse voxel sizes and time intervals from file metadata, which is often missing or wrong and uses many units.

Voxel sizes are converted to micrometers. A wrong voxel size never makes a file unreadable: a value that is not a
positive number in a known unit is treated as unknown. A note informs the user if the voxel size is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.core.quantities import PLAUSIBLE_LENGTHS, TimeInterval, VoxelSize, convert_to_float

_SI_EXPONENTS = {
    "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "da": 1, "": 0, "d": -1, "c": -2,
    "m": -3, "µ": -6, "n": -9, "p": -12, "f": -15, "a": -18, "z": -21, "y": -24,
}  # fmt: skip
# Names of these prefixes, in the same order. OME-Zarr spells out all units.
_SI_NAMES = (
    "yotta", "zetta", "exa", "peta", "tera", "giga", "mega", "kilo", "hecto", "deca", "", "deci", "centi", "milli",
    "micro", "nano", "pico", "femto", "atto", "zepto", "yocto",
)  # fmt: skip
_INCH_IN_MICROMETERS = 25_400.0
# Shortest and longest voxel edge of light and electron microscopes in micrometers, from half an angstrom to a
# millimeter.
MICROSCOPE_LENGTHS = (5e-5, 1e3)
# Ratio of two sizes from which at least one of them has the wrong unit: the plane distance compared with the pixel
# size, and for all other pairs (pixel height and width; pixel size and plane distance).
MAX_PLANE_RATIO = 999.0
MAX_PIXEL_RATIO = 50.0

# All units of UnitsLength in the OME schema, and other spellings of common units, such as those of ImageJ.
MICROMETERS_PER_UNIT: dict[str, float] = {
    **{f"{prefix}m": 10.0 ** (exponent + 6) for prefix, exponent in _SI_EXPONENTS.items()},
    "Å": 1e-4,
    "thou": _INCH_IN_MICROMETERS / 1000,
    "li": _INCH_IN_MICROMETERS / 12,
    "in": _INCH_IN_MICROMETERS,
    "ft": _INCH_IN_MICROMETERS * 12,
    "yd": _INCH_IN_MICROMETERS * 36,
    "mi": _INCH_IN_MICROMETERS * 63_360,
    "ua": 149_597_870_700e6,
    "ly": 9_460_730_472_580_800e6,
    "pc": 3.0856775814913673e22,
    "pt": _INCH_IN_MICROMETERS / 72,
    **dict.fromkeys(("um", "micron", "microns"), 1.0),
    "inch": _INCH_IN_MICROMETERS,
    "inches": _INCH_IN_MICROMETERS,
    '"': _INCH_IN_MICROMETERS,
    "angstrom": 1e-4,
    "angstroms": 1e-4,
    "foot": _INCH_IN_MICROMETERS * 12,
    "yard": _INCH_IN_MICROMETERS * 36,
    "mile": _INCH_IN_MICROMETERS * 63_360,
    "parsec": 3.0856775814913673e22,
}
for _prefix, _exponent in zip(_SI_NAMES, _SI_EXPONENTS.values(), strict=True):
    for _unit_name in ("meter", "meters", "metre", "metres"):
        MICROMETERS_PER_UNIT[f"{_prefix}{_unit_name}"] = 10.0 ** (_exponent + 6)

# Units of UnitsTime in the OME schema that are relevant for microscopy, by their spellings in OME and ImageJ.
TIME_UNITS = {
    spelling: unit
    for unit, spellings in {
        "s": ("s", "sec", "second", "seconds"),
        "ms": ("ms", "msec", "millisecond", "milliseconds"),
        "µs": ("µs", "us", "usec", "microsecond", "microseconds"),
        "ns": ("ns", "nsec", "nanosecond", "nanoseconds"),
        "min": ("min", "minute", "minutes"),
        "h": ("h", "hr", "hour", "hours"),
        "d": ("d", "day", "days"),
    }.items()
    for spelling in spellings
}


@dataclass(frozen=True)
class Calibration:
    """Voxel size of a file along z, y and x in micrometers, each None if unknown, and the name of its source."""

    z: float | None
    y: float | None
    x: float | None
    source: str
    notes: tuple[str, ...] = ()

    def get_voxel_size(self) -> VoxelSize | None:
        """Return the voxel size, or None if it is unknown along any axis."""
        if self.z is None or self.y is None or self.x is None:
            return None
        return VoxelSize(self.z, self.y, self.x)

    def get_partial_voxel_size(self) -> tuple[float | None, float | None, float | None] | None:
        """Return the sizes along (z, y, x) if at least one is known and at least one is unknown, otherwise None."""
        sizes = self.z, self.y, self.x
        return sizes if 0 < sizes.count(None) < len(sizes) else None

    def list_user_notes(self) -> tuple[str, ...]:
        """Return the notes, with an additional one if the voxel size is not completely known."""
        known_sizes = {
            axis: size for axis, size in zip("zyx", (self.z, self.y, self.x), strict=True) if size is not None
        }
        if len(known_sizes) == 3:
            return self.notes
        if not known_sizes:
            return (*self.notes, NO_VOXEL_SIZE_NOTE)
        known_text = ", ".join(f"{axis} {size:g} um" for axis, size in known_sizes.items())
        return (
            *self.notes,
            f"The voxel size in the file is incomplete ({known_text}), so it is not used. Set voxel_size=Z,Y,X in"
            " micrometers.",
        )


NO_VOXEL_SIZE_NOTE = (
    "The file has no voxel size. The plane spacing is assumed to equal the pixel size, and sizes are given in voxels."
    " Set voxel_size=Z,Y,X in micrometers."
)
UNKNOWN_CALIBRATION = Calibration(None, None, None, "not stated")


def normalize_unit(unit: str) -> str:
    """Return a unit without padding and with U+00B5 as the micro sign.

    Files represent the micro sign as U+00B5, U+03BC, ImageJ's escape sequence, or UTF-8 that was decoded as Latin-1.
    """
    name = unit.strip().strip("\0")
    for alias in ("\\u00B5", "\\u00b5", "Âµ", "Î¼", "μ"):
        name = name.replace(alias, "µ")
    return name


def get_micrometers_per_unit(unit: str) -> float | None:
    """Return the length of a unit in micrometers, or None for "pixel", "reference frame" and unknown units."""
    name = normalize_unit(unit)
    return MICROMETERS_PER_UNIT.get(name, MICROMETERS_PER_UNIT.get(name.lower()))


def convert_to_micrometers(value: Any, unit: str) -> float | None:
    """Convert a length or a signed distance to micrometers.

    A stack that was recorded from top to bottom has a negative plane distance. Its absolute value is used.
    Return None if the result is not a number within `PLAUSIBLE_LENGTHS`.
    """
    factor = get_micrometers_per_unit(unit)
    try:
        size = abs(convert_to_float(value)) * factor if factor is not None else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return size if PLAUSIBLE_LENGTHS[0] <= size <= PLAUSIBLE_LENGTHS[1] else None


def _convert_voxel_size(axis: str, value: Any, unit: str, notes: list[str]) -> float | None:
    """Convert the voxel size along one axis to micrometers, and add a note if the value is not a plausible length."""
    if value in (None, ""):
        return None
    if get_micrometers_per_unit(unit) is None:
        unit_text = f"in the unknown unit {unit.strip()[:16]!r}" if unit.strip() else "without a unit"
        notes.append(f"The file has a voxel size of {str(value)[:32]} along {axis} {unit_text}, which is not used.")
        return None
    size = convert_to_micrometers(value, unit)
    if size is None or not MICROSCOPE_LENGTHS[0] <= size <= MICROSCOPE_LENGTHS[1]:
        notes.append(
            f"The file has a voxel size of {str(value)[:32]} {unit[:16]} along {axis}, which is not plausible and is"
            " not used."
        )
        return None
    return size


def _find_outliers(z: float | None, y: float | None, x: float | None) -> str:
    """Return the axes whose sizes contradict the others: "yx", "z" or ""."""
    if y and x and not 1 / MAX_PIXEL_RATIO < y / x < MAX_PIXEL_RATIO:
        return "yx"
    pixel_size = y or x
    return "z" if z and pixel_size and not 1 / MAX_PIXEL_RATIO < z / pixel_size < MAX_PLANE_RATIO else ""


def _discard_outliers(sizes: Sequence[float | None], notes: list[str]) -> list[float | None]:
    """Replace sizes that contradict the other axes with None, and add a note.

    Pixels are almost square, and planes are neither much closer than pixels nor `MAX_PLANE_RATIO` times farther apart.
    A contradiction shows that a size has the wrong unit. If x and y differ, both are discarded.
    """
    outliers = _find_outliers(*sizes)
    if not outliers:
        return list(sizes)
    known_text = " and ".join(f"{size:g} um along {axis}" for axis, size in zip("zyx", sizes, strict=True) if size)
    notes.append(
        f"The file has voxel sizes of {known_text}. They contradict each other, so the size along"
        f" {' and '.join(outliers)} is not used."
    )
    return [None if axis in outliers else size for axis, size in zip("zyx", sizes, strict=True)]


@dataclass(frozen=True)
class Resolution:
    """The tags XResolution, YResolution and ResolutionUnit of a page.

    ratios  pixels per unit along x and y, each as (numerator, denominator), or None if the tag is missing
    unit    name of the unit, or "" if it is unknown
    """

    ratios: tuple[tuple[int, int] | None, tuple[int, int] | None]
    unit: str

    def get_pixel_size(self, index: int) -> float | str | None:
        """Return the pixel size in `unit` along x (0) or y (1), None if it is unknown, or "1/0" if the ratio is 0."""
        ratio = self.ratios[index]
        if ratio is None:
            return None
        return ratio[1] / ratio[0] if ratio[0] else "1/0"

    def get_calibration(self) -> Calibration:
        """Return the in-plane pixel size if the tags contain a plausible one, or else `UNKNOWN_CALIBRATION`.

        Image editors write meaningless resolutions in dots per inch (72, 96, 300). Therefore, the tags are used only if
        the pixels are at most 20 um wide (in centimeters) or 2 um wide (in inches; no printer or scanner reaches
        12,700 dpi). No tag contains the distance between planes.
        """
        y, x = (
            convert_to_micrometers(self.get_pixel_size(1), self.unit),
            convert_to_micrometers(self.get_pixel_size(0), self.unit),
        )
        if not y or not x or max(y, x) > {"cm": 20.0, "inch": 2.0}.get(self.unit, 0.0):
            return UNKNOWN_CALIBRATION
        if min(y, x) < MICROSCOPE_LENGTHS[0] or not 1 / MAX_PIXEL_RATIO < y / x < MAX_PIXEL_RATIO:
            return UNKNOWN_CALIBRATION
        return Calibration(None, y, x, "resolution tags")


def parse_imagej_calibration(
    metadata: Mapping[str, Any], tags: Resolution, source: str, default_spacing: float | None = 1.0
) -> Calibration:
    """Parse a voxel size in ImageJ's format: `spacing` along z, and pixels per unit along x and y in `tags`.

    ImageJ omits `spacing` if the planes are one unit apart. Other programs write the resolution tags in pixels per
    centimeter or inch, although the description has a different unit. ImageJ recognizes only "um" with centimeters. For
    other units, the interpretation that results in a plausible voxel size is used.
    """
    unit = str(metadata.get("unit") or "")
    if get_micrometers_per_unit(unit) is None:
        return tags.get_calibration() if not unit else _explain_unknown_unit(unit)
    spacing = metadata.get("spacing", default_spacing)
    tag_units = [""] if unit == tags.unit or not tags.unit else ["", tags.unit]
    if (unit, tags.unit) == ("um", "cm"):
        tag_units.reverse()
    candidates = [_parse_imagej_sizes(metadata, tags, source, spacing, tag_unit) for tag_unit in tag_units]
    return max(candidates, key=lambda candidate: sum(map(bool, (candidate.z, candidate.y, candidate.x))))


def _explain_unknown_unit(unit: str) -> Calibration:
    """Return an unknown voxel size, with a note unless the unit says that the image is not calibrated."""
    if unit.strip().lower() in {"pixel", "pixels", "px"}:
        return UNKNOWN_CALIBRATION
    note = f"The file gives the voxel size in the unknown unit {unit.strip()[:16]!r}, so it is not used."
    return replace(UNKNOWN_CALIBRATION, notes=(note,))


def _parse_imagej_sizes(
    metadata: Mapping[str, Any], tags: Resolution, source: str, spacing: Any, tag_unit: str
) -> Calibration:
    """Parse a voxel size in ImageJ's format, with the pixel size in `tag_unit` or, if it is "", in the stated unit."""
    y, x = _get_imagej_pixel_size(tags)
    calibration = parse_calibration((spacing, y, x), _get_imagej_units(metadata, tag_unit, spacing, x), source)
    if (y, x) != (1.0, 1.0) or calibration.y is None or calibration.x is None:
        return calibration
    note = (
        f"The file has exactly one pixel per {str(metadata['unit'])[:16]} in the plane. Some programs write this value"
        " if they do not know the pixel size. If the value is wrong, set voxel_size=Z,Y,X in micrometers."
    )
    return replace(calibration, notes=(*calibration.notes, note))


def _get_imagej_pixel_size(tags: Resolution) -> tuple[float | str | None, float | str | None]:
    """Return the pixel size along y and x in the unit of an image."""
    y, x = tags.get_pixel_size(1), tags.get_pixel_size(0)
    if tags.unit == "inch" and x == 1 / 72:
        # 72 dpi is the default resolution of image editors. ImageJ replaces it with one pixel per unit.
        return 1.0, 1.0
    return y, x


def _get_imagej_units(metadata: Mapping[str, Any], tag_unit: str, spacing: Any, x: float | str | None) -> list[str]:
    """Return the units along z, y and x. `x` is the pixel size along x."""
    unit = str(metadata["unit"])
    units = [str(metadata.get("zunit") or unit), tag_unit or str(metadata.get("yunit") or unit), tag_unit or unit]
    # For images in cm, ImageJ converts pixels of up to 1 um to micrometers, but not a plane distance of exactly 1.
    if units[0] == units[2] == "cm" and spacing == 1 and isinstance(x, float) and x <= 1e-4:
        units[0] = "um"
    return units


def parse_scifio_calibration(metadata: Mapping[str, Any], source: str) -> Calibration:
    """Parse a voxel size in the format of SCIFIO: lists of axes, their scales, and their units."""
    axes, scales, units = (str(metadata.get(key, "")).split(",") for key in ("axes", "scales", "units"))
    scale_by_axis = {axis.strip().upper(): scale.strip() for axis, scale in zip(axes, scales, strict=False)}
    unit_by_axis = {axis.strip().upper(): unit for axis, unit in zip(axes, units, strict=False)}
    is_known = [get_micrometers_per_unit(unit_by_axis.get(axis, "")) is not None for axis in "ZYX"]
    sizes = [scale_by_axis.get(axis) if known else None for axis, known in zip("ZYX", is_known, strict=True)]
    return parse_calibration(sizes, [unit_by_axis.get(axis, "") for axis in "ZYX"], source)


def parse_calibration(sizes: Sequence[Any], units: str | Sequence[str], source: str) -> Calibration:
    """Convert the voxel size along z, y and x to micrometers, from a common unit or from one unit per axis."""
    notes: list[str] = []
    axis_units = (units,) * 3 if isinstance(units, str) else units
    converted_sizes = [
        _convert_voxel_size(axis, size, unit, notes) for axis, size, unit in zip("zyx", sizes, axis_units, strict=True)
    ]
    z, y, x = _discard_outliers(converted_sizes, notes)
    return Calibration(z, y, x, source, tuple(notes))


def combine_calibrations(calibrations: Iterable[Calibration]) -> Calibration:
    """Return the first complete voxel size or, if none is complete, the first known size along each axis.

    The notes explain why the preceding sources are not used.
    """
    notes, known = list[str](), list[Calibration]()
    for calibration in calibrations:
        notes += [note for note in calibration.notes if note not in notes]
        if calibration.get_voxel_size() is not None:
            return replace(calibration, notes=tuple(notes))
        if (calibration.z, calibration.y, calibration.x) != (None, None, None):
            known.append(calibration)
    sizes = [_get_first_size(known, axis) for axis in "zyx"]
    sources = " and ".join(dict.fromkeys(calibration.source for calibration in known))
    z, y, x = _discard_outliers(sizes, notes)
    return Calibration(z, y, x, sources or UNKNOWN_CALIBRATION.source, tuple(notes))


def _get_first_size(calibrations: Iterable[Calibration], axis: str) -> float | None:
    return next((size for each in calibrations if (size := getattr(each, axis)) is not None), None)


def parse_time_interval(value: Any, unit: str) -> TimeInterval | None:
    """Return a time interval, or None unless `value` is a positive number in a known unit."""
    name = normalize_unit(unit)
    # In OME, Ms means 10**6 seconds.
    known_unit = None if name == "Ms" else TIME_UNITS.get(name.lower())
    try:
        length = convert_to_float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return TimeInterval(length, known_unit) if known_unit and math.isfinite(length) and length > 0 else None
