"""Describe how a model processes stacks, for operators who check what an import has understood."""

from __future__ import annotations

from collections.abc import Iterator

from service.models.input_spec import Input
from service.models.spec import ModelSpec
from service.models.spec_parts import Normalization, PercentileNormalization, RangeNormalization


def describe_model(spec: ModelSpec) -> Iterator[str]:
    """Yield lines about the input, the resampling, the windows and the outputs of a model."""
    count, names = spec.input.channels, ", ".join(spec.input.channel_names)
    yield f"channels: {count}{f' ({names})' if names else ''}"
    yield f"normalization: {_describe_normalizations(spec.input)}"
    yield f"resampling: {_describe_resampling(spec.input)}"
    yield f"windows: {'x'.join(map(str, spec.input.roi_size))} voxels"
    yield f"outputs: {', '.join(spec.outputs)}"
    yield f"results: {spec.decoding.kind}, {', '.join(spec.class_names)}"


def _describe_normalizations(keys: Input) -> str:
    if isinstance(keys.normalisation, tuple):
        return "; ".join(map(_describe_normalization, keys.normalisation))
    return _describe_normalization(keys.normalisation)


def _describe_normalization(normalization: Normalization) -> str:
    match normalization:
        case PercentileNormalization(low=low, high=high):
            text = f"percentiles {low:g} and {high:g}"
        case RangeNormalization(low=low, high=high):
            text = f"intensities from {low:g} to {high:g}"
        case _:
            return "z-score"
    clip = normalization.clip
    return text if clip is None else f"{text}, clipped to {clip[0]:g} to {clip[1]:g}"


def _describe_resampling(keys: Input) -> str:
    parts = []
    if keys.voxel_size is not None:
        parts.append(f"to voxels of {' x '.join(f'{length:g}' for length in keys.voxel_size)} um")
    if keys.diameter is not None:
        default = keys.default_diameter or ("an estimate" if keys.estimate_diameter else "no resampling")
        parts.append(f"to objects of {keys.diameter:g} voxels, by the diameter in the request (default: {default})")
    return " and ".join(parts) or "none"
