"""Read the configuration with which PlantSeg, PanSeg or pytorch-3dunet trained a network.

The configuration may name any class. Known names are translated, and all others are reported as problems.

Sources: pytorch-3dunet 1.9 (`augment/transforms.py`, `unet3d/model.py`), PanSeg 2.0 (`functionals/training`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from service.core.errors import UnsupportedPackage
from service.models.architectures.pytorch3dunet import CONSTRUCTORS, Arguments
from service.models.importers.draft import Fields, check_channel_count

PHASES = ("val", "test", "train")
# Keys of the section `model` that are translated to other keys of a model file, or change only the training.
_OTHER_MODEL_KEYS = frozenset(["name", "final_sigmoid", "is_segmentation", "conv_padding", "dropout_prob"])
_ARGUMENT_NAMES = tuple(field.name for field in fields(Arguments))
# Transforms that only augment the training data, or do nothing.
_AUGMENTATION_PREFIXES = ("Random", "Elastic", "Gaussian", "Additive", "Identity")
# Types to which images may be converted, as they hold all normalized intensities.
_DTYPES = frozenset(["float", "float32", "float64", "double"])
# Maximum `eps` that can be added to the range of the intensities.
MAX_EPS = 0.1
# Maximum `eps` of Standardize, below which a standard deviation is replaced. It is far below that of any image.
MAX_STANDARD_DEVIATION_EPS = 1e-3
_TRANSFORM_KEYS = {
    "Standardize": {"eps", "mean", "std", "channelwise"},
    "PercentileNormalizer": {"eps", "pmin", "pmax", "channelwise"},
    "Normalize": {"eps", "min_value", "max_value", "norm01"},
}
PATCH_STATISTICS_NOTE = (
    "During training, each patch was normalized with its own mean and standard deviation. Like PlantSeg, StackSeg uses "
    "those of the whole stack."
)


class Network(NamedTuple):
    """A network: its architecture as in a model file, its activation, and notes for the operator."""

    architecture: dict[str, Any]
    activation: str
    notes: tuple[str, ...]


def read_network(model: Fields, name: str) -> Network:
    """Translate the arguments of a network with this class name. Raises UnsupportedPackage for unsupported networks."""
    _check_network(model, name)
    arguments = {key: model.get(key) for key in _ARGUMENT_NAMES if key in model.as_dict()}
    for key in ("in_channels", "out_channels"):
        if not isinstance(arguments.get(key), int):
            raise UnsupportedPackage(f"{model.locate(key)}: expected a number, not {arguments.get(key)!r:.80}.")
        check_channel_count(arguments[key], model.locate(key))
    other_keys = sorted(map(str, model.as_dict().keys() - _OTHER_MODEL_KEYS - set(_ARGUMENT_NAMES)))
    notes = [f"The argument {key!r:.80} is ignored, as by the original network." for key in other_keys]
    activation = "softmax" if model.get("final_sigmoid") is False else "sigmoid"
    return Network({"name": name, "arguments": arguments}, activation, tuple(notes))


def _check_network(model: Fields, name: str) -> None:
    if name not in CONSTRUCTORS:
        reason = (
            "2D networks are not supported" if name.endswith("2D") else f"it is not one of {', '.join(CONSTRUCTORS)}"
        )
        raise UnsupportedPackage(f"{model.locate('name')}: {name!r:.80}: {reason}.")
    if model.get("is_segmentation") is False:
        raise UnsupportedPackage(
            f"{model.locate('is_segmentation')}: the network was trained for regression, which is not supported."
        )
    if model.get("conv_padding") not in (None, 1, [1, 1, 1]):
        raise UnsupportedPackage(f"{model.locate('conv_padding')}: only a padding of 1 is supported.")


def read_patch_size(config: Fields) -> list[int]:
    """Return the patch size (z, y, x) of the validation, or of the training. Raises UnsupportedPackage."""
    for phase, loader in _list_loaders(config):
        size = loader.get_mapping("slice_builder").get("patch_shape")
        if size is None:
            continue
        if isinstance(size, list) and len(size) == 3 and all(isinstance(n, int) and n > 0 for n in size):
            return size
        location = f"loaders.{phase}.slice_builder.patch_shape"
        raise UnsupportedPackage(f"{location}: expected three positive numbers, not {size!r:.80}.")
    raise UnsupportedPackage("loaders.val.slice_builder.patch_shape is missing.")


def predicts_boundaries(config: Fields) -> bool:
    """Return whether the labels were converted to boundaries for training. PlantSeg does so without configuration."""
    for _, loader in _list_loaders(config):
        steps = loader.get_mapping("transformer").get_mappings("label")
        if steps:
            return any("Boundary" in str(step.get("name")) for step in steps)
    return True


def read_normalization(config: Fields, channel_count: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the normalization for a model file, and notes for the operator.

    Raises UnsupportedPackage for transforms that StackSeg cannot reproduce.
    """
    step = _find_normalization(config)
    if step is None:
        return {"kind": "range", "low": 0.0, "high": 1.0}, ()
    name = step.get_string("name")
    if other_keys := sorted(map(str, step.as_dict().keys() - _TRANSFORM_KEYS[name] - {"name"})):
        raise UnsupportedPackage(f"{step.locate()}: the argument {other_keys[0]!r:.80} of {name} is not supported.")
    uses_statistics = _uses_statistics(step)
    if channel_count > 1 and uses_statistics:
        _check_channels(config, step)
    if name == "PercentileNormalizer" and _is_global(config) and not {"pmin", "pmax"} <= step.as_dict().keys():
        raise UnsupportedPackage(
            f"{step.locate('pmin')}: with loaders.global_normalization, pytorch-3dunet uses intensities as percentiles,"
            " which is not supported."
        )
    notes = _describe_patches(config) if name == "Standardize" and uses_statistics else ()
    return _TRANSLATORS[name](step), notes


def _uses_statistics(step: Fields) -> bool:
    """Return whether a transform uses statistics of the image."""
    fixed_keys = {"PercentileNormalizer": "", "Standardize": "mean", "Normalize": "min_value"}
    return fixed_keys[step.get_string("name")] not in step


def _check_channels(config: Fields, step: Fields) -> None:
    """Raise UnsupportedPackage if a transform uses statistics of all channels together."""
    if step.get_string("name") == "Normalize":
        key = "min_value"
    elif not step.get("channelwise"):
        key = "channelwise"
    elif _is_global(config):
        raise UnsupportedPackage(
            "loaders.global_normalization: statistics computed jointly over all channels are not supported. They"
            f" override {step.locate('channelwise')}."
        )
    else:
        return
    raise UnsupportedPackage(f"{step.locate(key)}: statistics computed jointly over all channels are not supported.")


def _is_global(config: Fields) -> bool:
    """Return whether the statistics of the whole stack, rather than of a patch, were used for training."""
    return bool(config.get_mapping("loaders").get("global_normalization"))


def _describe_patches(config: Fields) -> tuple[str, ...]:
    return (PATCH_STATISTICS_NOTE,) if "transformer" in _find_loader(config) and not _is_global(config) else ()


def _list_loaders(config: Fields) -> Iterator[tuple[str, Fields]]:
    loaders = config.get_mapping("loaders")
    return ((phase, loaders.get_mapping(phase)) for phase in PHASES)


def _find_loader(config: Fields) -> Fields:
    """Return the first phase whose images are transformed, or an empty mapping."""
    for _, loader in _list_loaders(config):
        if "transformer" in loader:
            return loader
    return Fields({})


def _find_normalization(config: Fields) -> Fields | None:
    """Return the only transform that changes intensities; PlantSeg's own if the configuration has no transforms."""
    loader = _find_loader(config)
    if "transformer" not in loader:
        return Fields({"name": "Standardize"})
    steps = loader.get_mapping("transformer").get_mappings("raw")
    steps = [step for step in steps if not step.get_string("name").startswith(_AUGMENTATION_PREFIXES)]
    steps = [replaced for step in steps for replaced in _replace_conversion(step)]
    for index, step in enumerate(steps):
        name = step.get_string("name")
        if name not in _TRANSFORM_KEYS or index:
            raise UnsupportedPackage(
                f"{step.locate('name')}: {name!r:.80} is not supported. One of {', '.join(_TRANSFORM_KEYS)} is."
            )
    return steps[0] if steps else None


def _replace_conversion(step: Fields) -> Iterator[Fields]:
    """Yield the effect of ToTensor on intensities, which it scales to the range from 0 to 1 if `normalize` is set.

    Other transforms are yielded unchanged. Raises UnsupportedPackage for types that would round intensities.
    """
    if step.get_string("name") != "ToTensor":
        yield step
        return
    if "dtype" in step and step.get("dtype") not in _DTYPES:
        raise UnsupportedPackage(f"{step.locate('dtype')}: only float32 is supported, not {step.get('dtype')!r:.80}.")
    if step.get("normalize"):
        yield Fields({"name": "Normalize", "norm01": True}, step.locate())


def _read_number(step: Fields, key: str, default: float | None = None) -> float:
    value = step.get(key) if key in step else default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedPackage(f"{step.locate(key)}: expected a number, not {value!r:.80}.")
    return float(value)


def _read_eps(step: Fields, limit: float = MAX_EPS) -> float:
    """Return the number that is added to a range. Without it, 1e-10 is added, which has no effect."""
    eps = _read_number(step, "eps", 0.0)
    if not 0 <= eps <= limit:
        raise UnsupportedPackage(f"{step.locate('eps')}: expected a number from 0 to {limit}, not {eps:g}.")
    return eps


def _translate_standardization(step: Fields) -> dict[str, Any]:
    if "mean" not in step and "std" not in step:
        _read_eps(step, MAX_STANDARD_DEVIATION_EPS)
        return {"kind": "zscore"}
    mean, deviation = _read_number(step, "mean"), _read_number(step, "std")
    if deviation <= 0:
        raise UnsupportedPackage(f"{step.locate('std')}: expected a positive number, not {deviation:g}.")
    return {"kind": "range", "low": mean, "high": mean + max(deviation, _read_number(step, "eps", 0.0))}


def _translate_percentiles(step: Fields) -> dict[str, Any]:
    low, high = _read_number(step, "pmin", 1), _read_number(step, "pmax", 99.6)
    return {"kind": "percentile", "low": low, "high": high, "eps": _read_eps(step)}


def _translate_min_max(step: Fields) -> dict[str, Any]:
    """Translate scaling to the range from -1 to 1, or from 0 to 1."""
    is_unit_range = step.get("norm01") is True
    if "min_value" not in step and "max_value" not in step:
        if not is_unit_range:
            raise UnsupportedPackage(f"{step.locate('norm01')}: scaling the stack's range to -1 to 1 is not supported.")
        return {"kind": "percentile", "low": 0.0, "high": 100.0, "eps": _read_eps(step), "clip": [0.0, 1.0]}
    low, high = _read_number(step, "min_value"), _read_number(step, "max_value")
    if low >= high:
        raise UnsupportedPackage(f"{step.locate('max_value')}: the range is empty.")
    high += max(_read_number(step, "eps", 0.0), 0.0)
    if is_unit_range:
        return {"kind": "range", "low": low, "high": high, "clip": [0.0, 1.0]}
    return {"kind": "range", "low": (low + high) / 2, "high": high, "clip": [-1.0, 1.0]}


_TRANSLATORS = {
    "Standardize": _translate_standardization,
    "PercentileNormalizer": _translate_percentiles,
    "Normalize": _translate_min_max,
}
