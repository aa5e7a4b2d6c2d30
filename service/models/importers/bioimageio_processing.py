"""Preprocessing and postprocessing steps of bioimage.io models, as a normalization, an activation and a decoding.

Source: the formulas of the bioimage.io specification, model descriptions 0.4 and 0.5. Settings that cannot be
reproduced are rejected by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from service.core.errors import UnsupportedPackage
from service.core.types import Array
from service.models.importers.draft import Fields
from service.models.spec import PROBABILITY_TOLERANCE

Step = tuple[str, Fields]
Normalizations = list[dict[str, Any]]

# Small number that steps add to a standard deviation or range unless they specify another one.
DEFAULT_EPS = 1e-6
MAX_EPS = 0.1
SPATIAL_AXES = frozenset("zyx")
BATCH_AXES = frozenset(["b", "batch"])
CHANNEL_AXES = frozenset(["c", "channel"])
_SETTINGS = {
    "zero_mean_unit_variance": "mode axes mean std eps",
    "fixed_zero_mean_unit_variance": "mean std axis",
    "scale_range": "mode axes min_percentile max_percentile eps",
    "scale_linear": "gain offset axis axes",
    "clip": "min max",
    "sigmoid": "",
    "softmax": "axis",
    "ensure_dtype": "dtype",
}


def read_normalization(tensor: Fields, channel_count: int) -> dict[str, Any] | Normalizations:
    """Return the normalization of an input tensor, or a list with the normalization of each channel.

    Raises UnsupportedPackage for steps and settings that are not supported.
    """
    steps = _read_steps(tensor, "preprocessing")
    if not steps:
        return _make_range(0.0, 1.0)
    (name, settings), *later_steps = steps
    if name not in _READERS:
        raise UnsupportedPackage(f"{settings.locate()}: {name} is not supported.")
    normalizations = _READERS[name](settings, channel_count)
    if later_steps and later_steps[0][0] == "clip" and all("clip" in item for item in normalizations):
        clip = _read_limits(later_steps.pop(0)[1])
        normalizations = [item | {"clip": clip} for item in normalizations]
    if later_steps:
        raise UnsupportedPackage(f"{later_steps[0][1].locate()}: {later_steps[0][0]} after {name} is not supported.")
    is_uniform = normalizations.count(normalizations[0]) == len(normalizations)
    return normalizations[0] if is_uniform else normalizations


def read_activation(tensor: Fields) -> str:
    """Return none, sigmoid or softmax. Raises UnsupportedPackage for other postprocessing."""
    steps = _read_steps(tensor, "postprocessing")
    if not steps:
        return "none"
    name, settings = steps[0]
    if len(steps) > 1 or name not in {"sigmoid", "softmax"}:
        step_name = steps[1][0] if name in {"sigmoid", "softmax"} else name
        raise UnsupportedPackage(f"{settings.locate()}: found {step_name}; only one sigmoid or softmax is supported.")
    if name == "softmax" and settings.get("axis") not in {None, "channel"}:
        raise UnsupportedPackage(f"{settings.locate('axis')}: only a softmax over channels is supported.")
    return name


def read_decoding(
    tensor: Fields, outputs: Sequence[str], activation: str | None, expected_output: Array
) -> dict[str, Any]:
    """Return the decoding of outputs that are classes. Raises UnsupportedPackage if they may be something else.

    outputs          names of the channels of the output tensor
    activation       activation of the package, or None if it is not supported
    expected_output  output [1, K, z, y, x] of the package's own test
    """
    if len(outputs) == 1 or activation == "sigmoid":
        raise UnsupportedPackage(f"{tensor.locate()} does not specify how labels are computed from the output.")
    has_background = outputs[0].lower() == "background"
    if activation != "softmax" and not has_background and not _are_class_probabilities(expected_output):
        raise UnsupportedPackage(
            f"{tensor.locate()} does not specify whether its channels, {', '.join(outputs):.200}, are classes. The "
            "first one is not named background, and their values in the test output do not add up to 1, so they may "
            "be independent, like foreground and boundary. Choose 'classes' only if they exclude each other."
        )
    return {"kind": "classes"}


def _are_class_probabilities(scores: Array) -> bool:
    """Return whether scores [1, K, z, y, x] are probabilities of classes that exclude each other."""
    is_unit_sum = np.abs(scores.sum(1, dtype=np.float64) - 1).max() <= PROBABILITY_TOLERANCE
    return bool(is_unit_sum and scores.min() >= -PROBABILITY_TOLERANCE)


def list_ignored_settings(input_tensor: Fields, output_tensor: Fields) -> Iterator[str]:
    """Yield notes about settings of tensors that StackSeg replaces or that other programs ignore as well."""
    halo = _read_halo(output_tensor)
    if any(halo):
        yield (
            f"The package removes a halo of {halo} pixels from each window ({output_tensor.locate()}). StackSeg blends"
            " overlapping windows instead."
        )
    if not isinstance(input_tensor.get("axes"), list):
        return
    axes = {str(axis.get("id")): axis for axis in input_tensor.get_mappings("axes")}
    if all(axes[name].get("unit") for name in "zyx"):
        sizes = [f"{axes[name].get('scale') or 1} {axes[name].get('unit')}" for name in "zyx"]
        yield (
            f"The package specifies a pixel size of {', '.join(sizes)} along z, y and x, which is not used, as in"
            " bioimageio.core. To resample stacks to this size, specify --voxel-size."
        )


def _read_halo(output_tensor: Fields) -> list[Any]:
    """Return the halo along each axis, or an empty list. Since format 0.5, a halo belongs to an axis."""
    axes, halo = output_tensor.get("axes"), output_tensor.get("halo")
    if isinstance(axes, list):
        return [axis.get("halo") or 0 for axis in axes]
    return halo if isinstance(halo, list) else []


def _read_steps(tensor: Fields, key: str) -> list[Step]:
    """Return the names (`id` since format 0.5) and settings of processing steps, except conversions to float."""
    steps = [(str(step.get("id") or step.get("name")), step.get_mapping("kwargs")) for step in tensor.get_mappings(key)]
    for name, settings in steps:
        _check_settings(name, settings)
    return [(name, settings) for name, settings in steps if name != "ensure_dtype"]


def _check_settings(name: str, settings: Fields) -> None:
    known_settings = _SETTINGS[name].split() if name in _SETTINGS else settings.as_dict()
    for setting in settings.as_dict():
        if setting not in known_settings and setting in settings:
            raise UnsupportedPackage(f"{settings.locate(setting)}: this setting of {name} is not supported.")
    if name == "ensure_dtype" and settings.get("dtype") not in {"float32", "float64"}:
        raise UnsupportedPackage(
            f"{settings.locate('dtype')}: only float32 and float64 are supported, not {settings.get('dtype')!r:.80}."
        )


def _make_range(low: float, high: float) -> dict[str, Any]:
    return {"kind": "range", "low": low, "high": high, "clip": None}


def _read_standardization(settings: Fields, channel_count: int) -> Normalizations:
    """Read (x - mean) / (std + eps). In format 0.4, the mode fixed is the default, and requires a mean."""
    if settings.get("mode") == "fixed" or "mean" in settings or "std" in settings:
        return _read_fixed_standardization(settings, channel_count)
    _check_extent(settings, channel_count)
    return [{"kind": "zscore", "eps": _read_eps(settings)}]


def _read_fixed_standardization(settings: Fields, channel_count: int) -> Normalizations:
    means, deviations = (_read_values(settings, key, None, channel_count) for key in ("mean", "std"))
    eps = _read_eps(settings)
    if min(deviations) < 0:
        raise UnsupportedPackage(f"{settings.locate('std')}: expected no negative value, not {min(deviations)}.")
    return [_make_range(mean, mean + std + eps) for mean, std in zip(means, deviations, strict=True)]


def _read_percentiles(settings: Fields, channel_count: int) -> Normalizations:
    _check_extent(settings, channel_count)
    low = _read_number(settings, "min_percentile", 0.0)
    high = _read_number(settings, "max_percentile", 100.0)
    if not 0 <= low < high <= 100:
        raise UnsupportedPackage(
            f"{settings.locate('max_percentile')}: expected 0 <= min_percentile < max_percentile <= 100, "
            f"not {low} and {high}."
        )
    return [{"kind": "percentile", "low": low, "high": high, "eps": _read_eps(settings), "clip": None}]


def _read_linear_map(settings: Fields, channel_count: int) -> Normalizations:
    gains = _read_values(settings, "gain", 1.0, channel_count)
    offsets = _read_values(settings, "offset", 0.0, channel_count)
    if 0 in gains:
        raise UnsupportedPackage(f"{settings.locate('gain')}: a gain of 0 is not supported.")
    return [_make_range(-offset / gain, (1 - offset) / gain) for gain, offset in zip(gains, offsets, strict=True)]


def _read_clip(settings: Fields, _channel_count: int) -> Normalizations:
    return [_make_range(0.0, 1.0) | {"clip": _read_limits(settings)}]


def _read_limits(settings: Fields) -> list[float]:
    low, high = (_read_number(settings, key, None) for key in ("min", "max"))
    if not low < high:
        raise UnsupportedPackage(f"{settings.locate('max')}: the maximum {high} is not above the minimum {low}.")
    return [low, high]


_READERS: dict[str, Callable[[Fields, int], Normalizations]] = {
    "zero_mean_unit_variance": _read_standardization,
    "fixed_zero_mean_unit_variance": _read_fixed_standardization,
    "scale_range": _read_percentiles,
    "scale_linear": _read_linear_map,
    "clip": _read_clip,
}


def _check_number(settings: Fields, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UnsupportedPackage(f"{settings.locate(key)}: expected a number, not {value!r:.80}.")
    return float(value)


def _read_number(settings: Fields, key: str, default: float | None) -> float:
    return _check_number(settings, key, settings.get(key) if key in settings else default)


def _read_eps(settings: Fields) -> float:
    eps = _read_number(settings, "eps", DEFAULT_EPS)
    if not 0 < eps <= MAX_EPS:
        raise UnsupportedPackage(f"{settings.locate('eps')}: expected a number above 0 and up to {MAX_EPS}, not {eps}.")
    return eps


def _read_values(settings: Fields, key: str, default: float | None, channel_count: int) -> list[float]:
    """Return the value of each channel, from a number or a list."""
    content = settings.get(key) if key in settings else default
    values = [_check_number(settings, key, value) for value in (content if isinstance(content, list) else [content])]
    if settings.get("axis") not in {None, "channel"} or (len(values) > 1 and not _has_values_per_channel(settings)):
        location = settings.locate("axis" if "axis" in settings else key)
        raise UnsupportedPackage(f"{location}: only values for the channels are supported.")
    if len(values) not in {1, channel_count}:
        raise UnsupportedPackage(f"{settings.locate(key)}: found {len(values)} values for {channel_count} channels.")
    return values if len(values) == channel_count else values * channel_count


def _has_values_per_channel(settings: Fields) -> bool:
    # Format 0.4 specifies the other axes. Format 0.5 specifies the axis of the values.
    axes = set(_read_axes(settings) or ())
    return settings.get("axis") == "channel" or (axes >= SPATIAL_AXES and not axes & CHANNEL_AXES)


def _read_axes(settings: Fields) -> list[str] | None:
    axes = settings.get("axes")
    if axes is not None and not (isinstance(axes, str | list) and all(isinstance(axis, str) for axis in axes)):
        raise UnsupportedPackage(f"{settings.locate('axes')}: expected the names of axes, not {axes!r:.80}.")
    return None if axes is None else list(axes)


def _check_extent(settings: Fields, channel_count: int) -> None:
    """Raise UnsupportedPackage for statistics over anything other than a whole channel of the stack.

    A batch is one stack. Without `axes`, statistics are computed jointly over all axes.
    """
    axes = _read_axes(settings)
    names = set(SPATIAL_AXES | CHANNEL_AXES) if axes is None else set(axes)
    if not names >= SPATIAL_AXES or names - SPATIAL_AXES - CHANNEL_AXES - BATCH_AXES:
        raise UnsupportedPackage(f"{settings.locate('axes')}: only statistics over z, y and x are supported.")
    if channel_count > 1 and names & CHANNEL_AXES:
        raise UnsupportedPackage(
            f"{settings.locate('axes')}: statistics computed jointly over all channels are not supported."
        )
    if settings.get("mode") not in {None, "per_sample"}:
        raise UnsupportedPackage(f"{settings.locate('mode')}: only statistics of the stack itself are supported.")
