"""Time intervals from files: a number under many names of units, or none."""

from __future__ import annotations

import math
from typing import Any

from service.core.quantities import TimeInterval
from service.formats.voxel_size import normalise_unit

# UnitsTime of the OME schema as far as microscopes need it, by its spellings there and in ImageJ.
_UNITS = {
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


def parse(value: Any, unit: str) -> TimeInterval | None:
    """Return the interval of `value` units, None where that is no positive number of a known unit."""
    name = normalise_unit(unit)
    # OME's Ms are 10**6 seconds.
    known = None if name == "Ms" else _UNITS.get(name.lower())
    try:
        length = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return TimeInterval(length, known) if known and math.isfinite(length) and length > 0 else None
