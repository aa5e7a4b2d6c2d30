"""Write the normalization and the activation of a model as processing steps of a bioimage.io description 0.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.input_spec import Input
from service.models.spec import ActivationName
from service.models.spec_parts import Normalization, PercentileNormalization, RangeNormalization

Step = dict[str, Any]

SPATIAL_AXES = ["z", "y", "x"]
# The specification requires a positive number. This is its default.
MIN_EPS = 1e-6
# The specification requires maximum percentiles above 1, because percentiles are often confused with fractions.
MIN_HIGH_PERCENTILE = 1


def make_preprocessing(settings: Input) -> list[Step]:
    """Return the steps that normalize the image. Raises UnsupportedPackage if no steps have the same effect."""
    normalizations = [settings.get_normalization(channel) for channel in range(settings.channels)]
    if all(isinstance(item, RangeNormalization) for item in normalizations):
        steps = _make_linear_map([item for item in normalizations if isinstance(item, RangeNormalization)])
    elif any(item != normalizations[0] for item in normalizations):
        raise UnsupportedPackage(
            "input.normalisation: the channels have different normalizations, which bioimage.io can describe only for "
            "`kind: range`. Export the model as ONNX."
        )
    else:
        steps = [_make_statistics_step(normalizations[0])]
    return [*steps, *_make_clip(normalizations), {"id": "ensure_dtype", "kwargs": {"dtype": "float32"}}]


def _make_clip(normalizations: Sequence[Normalization]) -> list[Step]:
    clips = {None if item.kind == "zscore" else item.clip for item in normalizations}
    if len(clips) > 1:
        raise UnsupportedPackage(
            "input.normalisation.clip: the channels have different limits, which bioimage.io cannot describe. Export "
            "the model as ONNX."
        )
    (clip,) = clips
    return [] if clip is None else [{"id": "clip", "kwargs": {"min": clip[0], "max": clip[1]}}]


def make_postprocessing(activation: ActivationName) -> list[Step]:
    """Return the steps that convert scores to probabilities."""
    if activation == "none":
        return []
    return [{"id": activation, "kwargs": {"axis": "channel"}}] if activation == "softmax" else [{"id": activation}]


def _make_statistics_step(normalization: Normalization) -> Step:
    settings: dict[str, Any] = {"axes": SPATIAL_AXES}
    if isinstance(normalization, RangeNormalization):
        raise TypeError("a range is not computed from the image")
    settings["eps"] = normalization.eps or MIN_EPS
    if not isinstance(normalization, PercentileNormalization):
        return {"id": "zero_mean_unit_variance", "kwargs": settings}
    if normalization.high <= MIN_HIGH_PERCENTILE:
        raise UnsupportedPackage(
            f"input.normalisation.high: the percentile is {normalization.high:g}; bioimage.io supports only maximum "
            f"percentiles above {MIN_HIGH_PERCENTILE}. Export the model as ONNX."
        )
    settings |= {"min_percentile": normalization.low, "max_percentile": normalization.high}
    return {"id": "scale_range", "kwargs": settings}


def _make_linear_map(normalizations: Sequence[RangeNormalization]) -> list[Step]:
    gains = [1 / (item.high - item.low) for item in normalizations]
    offsets = [-item.low / (item.high - item.low) for item in normalizations]
    if all(gain == 1 for gain in gains) and not any(offsets):
        return []
    if len(set(gains)) == len(set(offsets)) == 1:
        return [{"id": "scale_linear", "kwargs": {"gain": gains[0], "offset": offsets[0]}}]
    return [{"id": "scale_linear", "kwargs": {"axis": "channel", "gain": gains, "offset": offsets}}]
