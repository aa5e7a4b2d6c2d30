"""Quantities in requests, and their parsers: numbers, lengths, diameters, volumes, time points and gray values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from service.core.errors import BadParameter

Size = tuple[int, int, int]
"""Numbers of voxels along (Z, Y, X)."""

# Shortest and longest length in micrometers, from a tenth of the diameter of an atom to a meter. For lengths outside
# this range, TIFF tags and ratios of lengths would overflow.
PLAUSIBLE_LENGTHS = (1e-5, 1e6)
# Largest volume in cubic micrometers: one cubic meter.
MAX_VOLUME = 1e18
# Largest ratio of plane spacing to pixel size. If the ratio is larger, the voxel size is wrong, or the planes are too
# far apart to show whole objects.
MAX_ANISOTROPY = 6.0
# Maximum number of digits of a window's edge length in voxels. Larger windows do not fit in any memory.
MAX_EDGE_DIGITS = 5
# Characters of units as they are written in texts, and in requests: both characters for micro, and a raised 3.
UNIT_CHARACTERS = str.maketrans("\u00b5\u03bc\u00b3", "uu3")
# Decimal numbers, and the characters that may surround them. `int` and `float` also accept underscores, and digits and
# spaces of other scripts: `1_0px`, a misspelled `1.0px`, would be ten pixels.
_INTEGER = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BLANKS = " \t\r\n"


@dataclass(frozen=True)
class VoxelSize:
    """Edge lengths of a voxel in micrometers. Raises BadParameter for lengths outside `PLAUSIBLE_LENGTHS`."""

    z: float
    y: float
    x: float

    def __post_init__(self) -> None:
        for axis, size in zip("zyx", self, strict=True):
            if not PLAUSIBLE_LENGTHS[0] <= size <= PLAUSIBLE_LENGTHS[1]:
                shortest, longest = PLAUSIBLE_LENGTHS
                problem = f"must be between {shortest:g} and {longest:g} micrometers, not {size}"
                raise BadParameter(f"The voxel size along {axis} {problem}.")

    def __iter__(self) -> Iterator[float]:
        return iter((self.z, self.y, self.x))

    @property
    def pixel_size(self) -> float:
        """Edge length of a pixel in micrometers: the geometric mean of the lengths along Y and X."""
        return math.sqrt(self.y * self.x)

    @property
    def anisotropy(self) -> float:
        """Ratio of plane spacing to pixel size, at most `MAX_ANISOTROPY`."""
        return min(self.z / self.pixel_size, MAX_ANISOTROPY)

    @property
    def is_anisotropy_limited(self) -> bool:
        """Whether the ratio of plane spacing to pixel size is larger than `MAX_ANISOTROPY`."""
        return self.z / self.pixel_size > MAX_ANISOTROPY


def parse_integer(text: str) -> int:
    """Parse an integer such as `10`. Raises ValueError."""
    digits = text.strip(_BLANKS)
    if not _INTEGER.fullmatch(digits):
        raise ValueError(f"expected an integer such as 10, not {text!r}")
    return int(digits)


def parse_float(text: str) -> float:
    """Parse a finite decimal number such as `0.5` or `1e-3`. Raises ValueError."""
    digits = text.strip(_BLANKS)
    number = float(digits) if _FLOAT.fullmatch(digits) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"expected a number such as 10 or 0.5, not {text!r}")
    return number


def convert_to_float(value: Any) -> float:
    """Convert a value of a file's metadata, a number or its text. Raises TypeError, ValueError or OverflowError."""
    return parse_float(value) if isinstance(value, str) else float(value)


def parse_voxel_size(text: str) -> VoxelSize:
    """Parse a voxel size Z,Y,X in micrometers, such as `0.5,0.2,0.2`. Raises BadParameter."""
    try:
        z, y, x = map(parse_float, text.split(","))
    except ValueError:
        raise BadParameter("Expected three positive numbers Z,Y,X in micrometers, such as 0.5,0.2,0.2") from None
    try:
        return VoxelSize(z, y, x)
    except BadParameter as error:
        raise BadParameter(f"{error} Expected Z,Y,X, such as 0.5,0.2,0.2") from None


@dataclass(frozen=True)
class TimeInterval:
    """Time between consecutive time points, in a unit of OME's UnitsTime such as s, ms or min."""

    length: float
    unit: str


@dataclass(frozen=True)
class TimeRange:
    """Half-open range of time points, from `first` up to but excluding `stop`.

    If `stop` is None, the range includes the last time point.
    """

    first: int = 0
    stop: int | None = None


def _normalize_text(text: str) -> str:
    """Return text in lower case, without spaces around it, and with the ASCII characters of units."""
    return text.strip().lower().translate(UNIT_CHARACTERS)


def is_index(text: str) -> bool:
    """Return whether a string consists of ASCII digits. Digits of other scripts may be part of a channel name."""
    return text.isascii() and text.isdecimal()


def parse_index_or_name(text: str | None) -> int | str | None:
    """Parse a zero-based index or a name. Any text that is not an index is a name."""
    return int(text) if text is not None and is_index(text) else text


def parse_time(text: str) -> int | TimeRange:
    """Parse a zero-based index, `all`, or a range such as `2:5` that excludes its end. Raises BadParameter."""
    normalized = text.strip().lower()
    if normalized == "all":
        return TimeRange()
    if is_index(normalized):
        return int(normalized)
    times = _parse_range(normalized)
    if times is None or (times.stop is not None and times.first >= times.stop):
        raise BadParameter(
            f"Expected a time point such as 0, a range such as 2:5 (time points 2, 3 and 4), or 'all', not {text!r}"
        )
    return times


def _parse_range(text: str) -> TimeRange | None:
    """Parse a range with at least one index; return None for any other string."""
    first, colon, stop = text.partition(":")
    indices = [index for index in (first, stop) if index]
    if not colon or not indices or not all(map(is_index, indices)):
        return None
    return TimeRange(int(first or 0), int(stop) if stop else None)


@dataclass(frozen=True)
class Diameter:
    """Diameter of the objects in the image plane, or along (z, y, x).

    If only the in-plane diameter is given, objects are assumed to have the same size in micrometers along z.
    Raises BadParameter for lengths outside `PLAUSIBLE_LENGTHS`.
    """

    lengths: tuple[float] | tuple[float, float, float]
    unit: Literal["px", "um"]

    def __post_init__(self) -> None:
        if not all(PLAUSIBLE_LENGTHS[0] <= length <= PLAUSIBLE_LENGTHS[1] for length in self.lengths):
            shortest, longest = PLAUSIBLE_LENGTHS
            raise BadParameter(f"A diameter must be between {shortest:g} and {longest:g}, not {self.lengths}.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a string such as `15px`, `7,15,15px`, `6.5um` or `6.5 µm`. Raises BadParameter."""
        normalized = _normalize_text(text)
        try:
            match [parse_float(length) for length in normalized[:-2].split(",")], normalized[-2:]:
                case [width], ("px" | "um") as unit:
                    return cls((width,), unit)
                case [z, y, x], ("px" | "um") as unit:
                    return cls((z, y, x), unit)
        except (ValueError, BadParameter):
            pass
        raise BadParameter(
            "Expected a diameter with its unit, such as 15px, 6.5um or 7,15,15px (along Z,Y,X), or 'auto' or 'none', "
            f"not {text!r}"
        )

    def __str__(self) -> str:
        """Format the diameter as a string that `parse` accepts."""
        return ",".join(f"{length:.3g}" for length in self.lengths) + self.unit

    def describe(self) -> str:
        """Return a description of the diameter for users, such as `21 px wide and 10 px deep`."""
        depth, *in_plane_lengths = (f"{length:.3g}" for length in self.lengths)
        width = " x ".join(dict.fromkeys(in_plane_lengths)) or depth
        description = f"{width} {self.unit} wide"
        return description if width == depth else f"{description} and {depth} {self.unit} deep"

    def scale(self, ratio: float) -> Diameter:
        """Return the diameter multiplied by a ratio along each axis."""
        if len(self.lengths) == 1:
            return Diameter((ratio * self.lengths[0],), self.unit)
        z, y, x = self.lengths
        return Diameter((ratio * z, ratio * y, ratio * x), self.unit)

    def to_voxels(self, voxel_size: VoxelSize | None) -> tuple[float, float, float] | None:
        """Return the diameters along (z, y, x) in voxels.

        If the voxel size is unknown, return None for a diameter in micrometers, and assume that voxels are cubic for a
        diameter in pixels.
        """
        if self.unit == "um" and voxel_size is None:
            return None
        if len(self.lengths) == 1:
            width = (
                self.lengths[0] if self.unit == "px" or voxel_size is None else self.lengths[0] / voxel_size.pixel_size
            )
            return width / (1.0 if voxel_size is None else voxel_size.anisotropy), width, width
        z, y, x = self.lengths
        sizes = (1.0, 1.0, 1.0) if self.unit == "px" or voxel_size is None else tuple(voxel_size)
        return z / sizes[0], y / sizes[1], x / sizes[2]


DiameterSetting = Diameter | Literal["auto", "none"]
"""A diameter, `auto` (estimate it from the stack), or `none` (segment the stack at its original resolution)."""


def parse_diameter(text: str) -> DiameterSetting:
    """Parse `auto`, `none`, or a diameter as `Diameter.parse` does. Raises BadParameter."""
    match text.strip().lower():
        case "auto" | "none" as word:
            return word
        case normalized:
            return Diameter.parse(normalized)


def parse_roi_size(text: str) -> Size:
    """Parse the size of a window, such as `64,64,64`. Raises BadParameter."""
    window_size = [int(part) for part in text.split(",") if is_index(part.strip()) and len(part) <= MAX_EDGE_DIGITS]
    match window_size:
        case [z, y, x] if min(window_size) > 0 and text.count(",") == 2:
            return z, y, x
    raise BadParameter(f"Expected three positive numbers Z,Y,X in voxels, such as 64,64,64, not {text!r}")


SkipBelow = float | Literal["auto", "none"]
"""Gray value up to which voxels count as empty, `auto` (determine it from the stack), or `none` (skip no windows)."""


def parse_skip_below(text: str) -> SkipBelow:
    """Parse `auto`, `none`, or a finite number. Raises BadParameter."""
    match text.strip().lower():
        case "auto" | "none" as word:
            return word
    try:
        return parse_float(text)
    except ValueError:
        problem = f"Expected a gray value of the stack, such as 120, or 'auto' or 'none', not {text!r}"
        raise BadParameter(problem) from None


@dataclass(frozen=True)
class ObjectVolume:
    """Volume of an object in voxels of the stack (px) or in cubic micrometers (um3).

    Raises BadParameter if the amount is not between 0 and `MAX_VOLUME`.
    """

    amount: float
    unit: Literal["px", "um3"]

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= MAX_VOLUME:
            raise BadParameter(f"A volume must be between 0 and {MAX_VOLUME:g}, not {self.amount}.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a string such as `60` (voxels) or `12.5um3`. Raises BadParameter."""
        normalized = _normalize_text(text)
        try:
            return cls(parse_float(normalized.removesuffix("um3")), "um3" if normalized.endswith("um3") else "px")
        except (ValueError, BadParameter):
            pass
        raise BadParameter(
            f"Expected a volume in voxels, such as 60, or in cubic micrometers, such as 12.5um3, not {text!r}"
        )

    def to_voxels(self, voxel_size: VoxelSize | None) -> float | None:
        """Return the volume in voxels; None if it is in cubic micrometers and the voxel size is unknown."""
        if self.unit == "px":
            return self.amount
        return None if voxel_size is None else self.amount / math.prod(voxel_size)
