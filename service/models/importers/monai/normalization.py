"""Translate MONAI transforms of intensities to the key `input.normalisation` of `model.yaml`.

Source: `monai.transforms.intensity` of MONAI 1.6. Arguments with a value that would change the result in a way that
`input.normalisation` cannot express are rejected by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.importers.draft import Fields
from service.models.importers.monai.arguments import check_arguments

UNIT_RANGE = (0.0, 1.0)


def translate_normalization(name: str, step: Fields, channel_count: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the normalization that the transform `name` computes, or a list with that of each channel.

    Raises UnsupportedPackage for arguments that are not supported.
    """
    check_arguments(name, step)
    normalization = TRANSLATORS[name](step)
    if isinstance(normalization, list) and len(normalization) != channel_count:
        raise UnsupportedPackage(
            f"{step.locate('subtrahend')}: found {len(normalization)} values for {channel_count} channels."
        )
    is_joint = isinstance(normalization, dict) and normalization["kind"] != "range" and not step.get("channel_wise")
    if is_joint and channel_count != 1:
        raise UnsupportedPackage(
            f"{step.locate('channel_wise')}: statistics computed jointly over all channels are not supported."
        )
    return normalization


def _check_number(step: Fields, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedPackage(f"{step.locate(key)}: expected a number, not {value!r:.80}.")
    return float(value)


def _read_number(step: Fields, key: str) -> float:
    return _check_number(step, key, step.get(key))


def _read_optional_number(step: Fields, key: str, default: float | None = None) -> float | None:
    """Return a number, `default` if the key is missing, or None if its value is null."""
    value = step.as_dict().get(key, default)
    return None if value is None else _check_number(step, key, value)


def _read_clip(step: Fields, low: float | None, high: float | None) -> list[float] | None:
    """Return the limits of the scaled intensities, or None if they are not clipped."""
    if not step.get("clip"):
        return None
    if low is None or high is None or not low < high:
        raise UnsupportedPackage(
            f"{step.locate('clip')}: clipping is supported only with b_min below b_max, not {low} and {high}."
        )
    return [low, high]


def _translate_range(step: Fields) -> dict[str, Any]:
    low, high = _read_number(step, "a_min"), _read_number(step, "a_max")
    b_min, b_max = _read_optional_number(step, "b_min"), _read_optional_number(step, "b_max")
    if low == high or (b_min is not None and b_min == b_max):
        raise UnsupportedPackage(f"{step.locate('a_max')}: the range is empty.")
    clip = _read_clip(step, b_min, b_max)
    # MONAI ignores one target value without the other.
    if b_min is not None and b_max is not None:
        # Compute the intensities that the transform maps to 0 and 1.
        width = (high - low) / (b_max - b_min)
        low -= b_min * width
        high = low + width
    return {"kind": "range", "low": low, "high": high, "clip": clip}


def _translate_percentiles(step: Fields) -> dict[str, Any]:
    lower, upper = _read_number(step, "lower"), _read_number(step, "upper")
    if not 0 <= lower < upper <= 100:
        raise UnsupportedPackage(f"{step.locate('upper')}: expected 0 <= lower < upper <= 100, not {lower}, {upper}.")
    b_min, b_max = _read_optional_number(step, "b_min"), _read_optional_number(step, "b_max")
    # MONAI adds b_min to constant channels, also without b_max.
    if b_min not in {None, 0.0} or (b_min is not None and b_max not in {None, 1.0}):
        raise UnsupportedPackage(f"{step.locate('b_min')}: only scaling to the range from 0 to 1 is supported.")
    if step.get("relative"):
        raise UnsupportedPackage(f"{step.locate('relative')}: scaling to percentiles of the range is not supported.")
    return {"kind": "percentile", "low": lower, "high": upper, "clip": _read_clip(step, b_min, b_max)}


def _translate_min_max(step: Fields) -> dict[str, Any]:
    minv, maxv = _read_optional_number(step, "minv", 0.0), _read_optional_number(step, "maxv", 1.0)
    if minv is None and maxv is None:
        gain = 1 + (_read_optional_number(step, "factor") or 0.0)
        if gain == 0:
            raise UnsupportedPackage(f"{step.locate('factor')}: with the factor -1, all intensities would become 0.")
        return {"kind": "range", "low": 0.0, "high": 1 / gain}
    if (minv, maxv) != UNIT_RANGE:
        raise UnsupportedPackage(f"{step.locate('minv')}: only scaling to the range from 0 to 1 is supported.")
    return {"kind": "percentile", "low": 0.0, "high": 100.0}


def _translate_standardization(step: Fields) -> dict[str, Any] | list[dict[str, Any]]:
    if step.get("nonzero"):
        raise UnsupportedPackage(f"{step.locate('nonzero')}: statistics that exclude zero voxels are not supported.")
    if ("subtrahend" in step) != ("divisor" in step):
        raise UnsupportedPackage(
            f"{step.locate('subtrahend')}: a fixed subtrahend with the standard deviation of the image, or a fixed "
            "divisor with its mean, is not supported; both or neither must be specified."
        )
    if "subtrahend" not in step:
        return {"kind": "zscore"}
    if not step.get("channel_wise"):
        return _make_range(_read_number(step, "subtrahend"), _read_number(step, "divisor"))
    subtrahends, divisors = (_read_list(step, key) for key in ("subtrahend", "divisor"))
    if len(subtrahends) != len(divisors):
        raise UnsupportedPackage(f"{step.locate('divisor')}: expected {len(subtrahends)} values, not {len(divisors)}.")
    return [_make_range(*pair) for pair in zip(subtrahends, divisors, strict=True)]


def _make_range(subtrahend: float, divisor: float) -> dict[str, Any]:
    """Return the normalization to (x - subtrahend) / divisor. As in MONAI, a divisor of 0 has no effect."""
    return {"kind": "range", "low": subtrahend, "high": subtrahend + (divisor or 1.0)}


def _read_list(step: Fields, key: str) -> list[float]:
    values = step.get(key)
    if not isinstance(values, list) or not values:
        raise UnsupportedPackage(f"{step.locate(key)}: channel_wise requires a list with a value for each channel.")
    return [_check_number(step, key, value) for value in values]


TRANSLATORS: dict[str, Callable[[Fields], dict[str, Any] | list[dict[str, Any]]]] = {
    "ScaleIntensityRanged": _translate_range,
    "ScaleIntensityRangePercentilesd": _translate_percentiles,
    "ScaleIntensityd": _translate_min_max,
    "NormalizeIntensityd": _translate_standardization,
}
