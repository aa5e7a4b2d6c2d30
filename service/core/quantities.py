"""Quantities of a request and the text they are parsed from: lengths, diameters, volumes, times, grey values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from service.core.errors import BadParameter

Size = tuple[int, int, int]
"""Voxels along (Z, Y, X)."""


# Shortest and longest length, a tenth of an atom to a metre in micrometres: beyond, TIFF tags and quotients overflow.
PLAUSIBLE_LENGTHS = (1e-5, 1e6)
# Largest volume, a metre cubed in cubic micrometres.
MOST_VOLUME = 1e18
# Planes further apart than this, compared to pixels, have a wrong voxel size, or show parts of objects only.
MOST_ANISOTROPY = 6.0
# Of a window; more voxels than any memory holds.
MOST_EDGE_DIGITS = 5


@dataclass(frozen=True)
class VoxelSize:
    """Edge lengths of one voxel in micrometres. Raises BadParameter beyond `PLAUSIBLE_LENGTHS`."""

    z: float
    y: float
    x: float

    def __post_init__(self) -> None:
        for axis, size in zip("zyx", self, strict=True):
            if not PLAUSIBLE_LENGTHS[0] <= size <= PLAUSIBLE_LENGTHS[1]:
                least, most = PLAUSIBLE_LENGTHS
                text = f"must be a number of micrometres from {least:g} to {most:g}, not {size}"
                raise BadParameter(f"The voxel size along {axis} {text}.")

    def __iter__(self) -> Iterator[float]:
        return iter((self.z, self.y, self.x))

    @property
    def pixel(self) -> float:
        """Edge length of a pixel in the plane, the geometric mean of both."""
        return math.sqrt(self.y * self.x)

    @property
    def anisotropy(self) -> float:
        """Spacing of planes over that of pixels, at most `MOST_ANISOTROPY`."""
        return min(self.z / self.pixel, MOST_ANISOTROPY)


@dataclass(frozen=True)
class TimeInterval:
    """Time from one time point to the next, in a unit of OME's UnitsTime, such as s, ms or min."""

    length: float
    unit: str


@dataclass(frozen=True)
class TimeRange:
    """Time points from `first` up to, but without, `stop`; None: to the end."""

    first: int = 0
    stop: int | None = None


def is_index(text: str) -> bool:
    """Return whether a text has plain digits alone: those of other scripts may be names."""
    return text.isascii() and text.isdecimal()


def parse_time(text: str) -> int | TimeRange:
    """Parse an index from 0, all, or a range such as 2:5, without its end as in Python. Raises BadParameter."""
    given = text.strip().lower()
    if given == "all":
        return TimeRange()
    if is_index(given):
        return int(given)
    times = _parse_range(given)
    if times is None or (times.stop is not None and times.first >= times.stop):
        raise BadParameter(
            f"An index from 0, all, or a range without its end is expected, as 2:5 for 2, 3 and 4, not {text!r}"
        )
    return times


def _parse_range(text: str) -> TimeRange | None:
    """Return a range with one index at least, None for any other text."""
    first, colon, stop = text.partition(":")
    given = [part for part in (first, stop) if part]
    if not colon or not given or not all(map(is_index, given)):
        return None
    return TimeRange(int(first or 0), int(stop) if stop else None)


@dataclass(frozen=True)
class Diameter:
    """Diameter of the objects in the plane, or along (z, y, x). Raises BadParameter beyond `PLAUSIBLE_LENGTHS`.

    Objects of which only the diameter in the plane is told are as deep as wide, in micrometres.
    """

    lengths: tuple[float] | tuple[float, float, float]
    unit: Literal["px", "um"]

    def __post_init__(self) -> None:
        if not all(PLAUSIBLE_LENGTHS[0] <= length <= PLAUSIBLE_LENGTHS[1] for length in self.lengths):
            least, most = PLAUSIBLE_LENGTHS
            raise BadParameter(f"A diameter must be from {least:g} to {most:g}, not {self.lengths}.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text such as 15px, 7,15,15px or 6.5um. Raises BadParameter."""
        given = text.strip().lower()
        try:
            match [float(length) for length in given[:-2].split(",")], given[-2:]:
                case [width], ("px" | "um") as unit:
                    return cls((width,), unit)
                case [z, y, x], ("px" | "um") as unit:
                    return cls((z, y, x), unit)
        except (ValueError, BadParameter):
            pass
        raise BadParameter(
            "A positive length or three (Z,Y,X) and a unit, auto or none are expected, as in 15px, 7,15,15px or 6.5um, "
            f"not {text!r}"
        )

    def __str__(self) -> str:
        """Return text that `parse` understands."""
        return ",".join(f"{length:.3g}" for length in self.lengths) + self.unit

    def in_voxels(self, voxel_size: VoxelSize | None) -> tuple[float, float, float] | None:
        """Return the diameters along (z, y, x) in voxels, None for micrometres without a voxel size.

        Without a voxel size planes are taken to be as far apart as pixels.
        """
        if self.unit == "um" and voxel_size is None:
            return None
        if len(self.lengths) == 1:
            width = self.lengths[0] if self.unit == "px" or voxel_size is None else self.lengths[0] / voxel_size.pixel
            return width / (1.0 if voxel_size is None else voxel_size.anisotropy), width, width
        z, y, x = self.lengths
        sizes = (1.0, 1.0, 1.0) if self.unit == "px" or voxel_size is None else tuple(voxel_size)
        return z / sizes[0], y / sizes[1], x / sizes[2]


DiameterSetting = Diameter | Literal["auto", "none"]
"""Stated, estimated from the stack (auto), or none: the stack is used as it is sampled."""


def parse_diameter(text: str) -> DiameterSetting:
    """Parse auto, none, or text for `Diameter.parse`. Raises BadParameter."""
    match text.strip().lower():
        case "auto" | "none" as word:
            return word
        case given:
            return Diameter.parse(given)


def parse_roi_size(text: str) -> Size:
    """Parse the edges of a window, as in 64,64,64. Raises BadParameter."""
    edges = [int(part) for part in text.split(",") if is_index(part.strip()) and len(part) <= MOST_EDGE_DIGITS]
    match edges:
        case [z, y, x] if min(edges) > 0 and text.count(",") == 2:
            return z, y, x
    raise BadParameter(f"Three positive numbers Z,Y,X of voxels are expected, as in 64,64,64, not {text!r}")


SkipBelow = float | Literal["auto", "none"]
"""Grey value of empty voxels, whose windows are skipped: stated, found from the stack (auto), or none."""


def parse_skip_below(text: str) -> SkipBelow:
    """Parse auto, none, or a finite number. Raises BadParameter."""
    match text.strip().lower():
        case "auto" | "none" as word:
            return word
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadParameter(f"A grey value of the stack, auto or none are expected, as in 120, not {text!r}")
    return value


@dataclass(frozen=True)
class ObjectVolume:
    """Volume of an object in voxels of the stack (px) or in cubic micrometres. Raises BadParameter beyond 0 to 1e18."""

    amount: float
    unit: Literal["px", "um3"]

    def __post_init__(self) -> None:
        if not 0 <= self.amount <= MOST_VOLUME:
            raise BadParameter(f"A volume must be from 0 to {MOST_VOLUME:g}, not {self.amount}.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text such as 60 or 12.5um3. Raises BadParameter."""
        given = text.strip().lower()
        try:
            return cls(float(given.removesuffix("um3")), "um3" if given.endswith("um3") else "px")
        except (ValueError, BadParameter):
            pass
        raise BadParameter(f"A number of voxels, or of cubic micrometres as in 12.5um3, is expected, not {text!r}")

    def in_voxels(self, voxel_size: VoxelSize | None) -> float | None:
        """Return the number of voxels, None for micrometres without a voxel size."""
        if self.unit == "px":
            return self.amount
        return None if voxel_size is None else self.amount / math.prod(voxel_size)
