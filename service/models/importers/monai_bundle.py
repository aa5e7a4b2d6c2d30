"""MONAI bundles: `configs/metadata.json`, `configs/inference.json` or `.yaml`, and `models/model.pt` or `.ts`.

The configuration of a bundle may name any class (`_target_`) and any Python expression (`$...`). No code of it is run:
known names are translated, `@` references to plain values are followed, and everything else becomes a problem.
Source: the specification of the MONAI bundle format, version 0.1.10.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.architectures import ARCHITECTURES
from service.models.documents import MAX_CHARACTERS
from service.models.importers.draft import (
    Draft,
    Fields,
    WeightsKind,
    check_channels,
    collect_problem,
    find_file,
    read_mapping,
)

WEIGHTS: tuple[tuple[str, WeightsKind], ...] = (("models/model.pt", "state dict"), ("models/model.ts", "torchscript"))
# Transforms that load a file and lay it out, which is done here by other means, or bring the result back to its grid.
_NEUTRAL = "LoadImaged EnsureChannelFirstd EnsureTyped ToTensord ToDeviced CastToTyped Invertd SaveImaged Identityd"
NEUTRAL = frozenset(_NEUTRAL.split())
SPACING = "Spacingd"
MAX_DEPTH = 32
AXES_NOTE = (
    "The network gets the axes Z, Y, X. A bundle trained on NIfTI files, which MONAI reads as X, Y, Z, may expect "
    "them the other way round: try it on a stack whose answer you know."
)

SPACING_NOTE = (
    "Its Spacingd asks for voxels of {}, taken as um along Z, Y, X, which is input.voxel_size unless you stated one. "
    "State it where the bundle counts in other units, such as the millimetres of NIfTI files."
)


def recognises(root: Path) -> bool:
    """Return whether a folder is a bundle."""
    return (root / "configs" / "metadata.json").is_file()


def read(root: Path) -> Draft:
    """Read a bundle into a draft. Raise UnsupportedPackage where it is damaged."""
    metadata = read_mapping(find_file(root, "configs/metadata.json"))
    config = Fields(_Resolver(read_mapping(_find_inference_config(root)).as_dict()).resolve())
    file, kind = _find_weights(root)
    content: dict[str, Any] = {
        "name": metadata.get_text("name", root.name),
        "version": metadata.get_text("version", "1"),
        "summary": metadata.get_text("description", "A MONAI bundle."),
        "licence": metadata.get_text("copyright", "Not stated."),
        "training_data": metadata.get_text("data_source", "Not stated."),
        "outputs": [],
    }
    problems: dict[str, str] = {}
    if kind == "state dict":
        with collect_problem(problems, "architecture"):
            content["architecture"] = _read_architecture(config)
    formats = metadata.get_mapping("network_data_format")
    content["input"] = inputs = _read_input(config, formats, problems)
    with collect_problem(problems, "outputs"):
        content["outputs"] = _read_outputs(_get_only(formats, "outputs"))
    if "outputs" in problems:
        del content["outputs"]
    with collect_problem(problems, "activation"):
        content["activation"] = _read_activation(config)
    if len(content.get("outputs") or []) > 1 and content.get("activation") != "sigmoid":
        content["decoding"] = {"kind": "classes"}
    else:
        problems["decoding"] = (
            "postprocessing: does not say by an argmax over several outputs what labels are made from."
        )
    notes = [AXES_NOTE]
    if "voxel_size" in inputs:
        notes.append(SPACING_NOTE.format(", ".join(f"{edge:g}" for edge in inputs["voxel_size"])))
    return Draft(content, file, kind, problems=problems, notes=tuple(notes))


def _read_input(config: Fields, formats: Fields, problems: dict[str, str]) -> dict[str, Any]:
    """Return the keys of `input`, and add to `problems` those that cannot be honoured."""
    inputs = dict[str, Any]()
    with collect_problem(problems, "input.channels"):
        inputs["channels"] = _get_only(formats, "inputs").get("num_channels")
    with collect_problem(problems, "input.normalisation"):
        inputs["normalisation"] = _read_normalisation(config, inputs.get("channels", 1))
    with collect_problem(problems, "input.voxel_size"):
        spacing = _read_spacing(config)
        if spacing is not None:
            inputs["voxel_size"] = spacing
    with collect_problem(problems, "input.roi_size"):
        inputs["roi_size"] = _read_roi_size(config, formats)
    return inputs


def _find_weights(root: Path) -> tuple[Path, WeightsKind]:
    for name, kind in WEIGHTS:
        if (root / name).is_file():
            return find_file(root, name), kind
    raise UnsupportedPackage(f"models: there is neither {WEIGHTS[0][0]} nor {WEIGHTS[1][0]}.")


def _find_inference_config(root: Path) -> Path:
    for name in ("inference.json", "inference.yaml", "inference.yml"):
        if (root / "configs" / name).is_file():
            return find_file(root, f"configs/{name}")
    raise UnsupportedPackage("configs: there is no inference.json or inference.yaml.")


class _Resolver:
    """Replaces every `@` reference to another value of a configuration by that value."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._characters = 0

    def resolve(self) -> Any:
        """Return the configuration without references. Raise UnsupportedPackage for circles or bombs."""
        return self._resolve(self._config, 0)

    def _resolve(self, value: Any, depth: int) -> Any:
        self._count(value, depth)
        if isinstance(value, dict):
            return {key: self._resolve(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolve(item, depth + 1) for item in value]
        if isinstance(value, str) and re.fullmatch(r"@[\w:#]+", value):
            target = self._resolve(self._look_up(value[1:]), depth + 1)
            return value if target is None else target
        return value

    def _count(self, value: Any, depth: int) -> None:
        """Raise UnsupportedPackage for a depth or a number of characters that only circles or bombs have."""
        self._characters += 1 + (len(value) if isinstance(value, str) else 0)
        if depth > MAX_DEPTH:
            raise UnsupportedPackage("configs: references lead in circles.")
        if self._characters > MAX_CHARACTERS:
            raise UnsupportedPackage(f"configs: references repeat more than {MAX_CHARACTERS} characters.")

    def _look_up(self, reference: str) -> Any:
        value: Any = self._config
        for key in re.split(r"::|#", reference):
            value = value.get(key) if isinstance(value, dict) else value
        return value


def _check_plain(value: Any, where: str) -> Any:
    """Return `value`. Raise UnsupportedPackage for an expression in it, which only running code could evaluate."""
    if isinstance(value, dict):
        return {key: _check_plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_check_plain(inner, f"{where}[{number}]") for number, inner in enumerate(value)]
    if isinstance(value, str) and value[:1] in {"$", "@", "%"}:
        raise UnsupportedPackage(f"{where}: {value!r:.80} is an expression, and no code of a package is run.")
    return value


def _read_architecture(config: Fields) -> dict[str, Any]:
    network = config.get_mapping("network_def")
    if "_target_" not in network and "network" in config:
        network = config.get_mapping("network")
    target = network.get_text("_target_")
    name = target.rpartition(".")[2]
    if name not in ARCHITECTURES or not re.fullmatch(r"(monai\.networks\.nets\.(\w+\.)?)?\w+", target):
        raise UnsupportedPackage(f"{network.location('_target_')}: {target!r} is none of {', '.join(ARCHITECTURES)}.")
    arguments = {key: value for key, value in network.as_dict().items() if not key.startswith("_")}
    return {"name": name, "arguments": _check_plain(arguments, network.location())}


def _get_only(formats: Fields, side: str) -> Fields:
    """Return the only input or the only output."""
    tensors = formats.get_mapping(side).as_dict()
    if len(tensors) != 1:
        raise UnsupportedPackage(
            f"{formats.location(side)}: exactly one is expected, not {', '.join(tensors) or 'none'}."
        )
    ((name, content),) = tensors.items()
    return Fields(content, f"{formats.location(side)}.{name}")


def _read_outputs(output: Fields) -> list[str]:
    definition = output.get_mapping("channel_def").as_dict()
    channels = output.get("num_channels")
    if not isinstance(channels, int):
        raise UnsupportedPackage(f"{output.location('num_channels')}: the number of channels is expected.")
    check_channels(channels, output.location("num_channels"))
    names = [str(definition.get(str(number), f"output {number}")) for number in range(channels)]
    return names if len(set(names)) == channels else [f"output {number}" for number in range(channels)]


def _read_roi_size(config: Fields, formats: Fields) -> list[int]:
    for section, key in ((config.get_mapping("inferer"), "roi_size"), (_get_only(formats, "inputs"), "spatial_shape")):
        size = section.get(key)
        if isinstance(size, list) and len(size) == 3 and all(isinstance(edge, int) and edge > 0 for edge in size):
            return size
    raise UnsupportedPackage("inferer.roi_size: three edges of the window in voxels are expected.")


def _read_transforms(config: Fields, key: str) -> list[tuple[str, Fields]]:
    """Return names and settings of a chain of transforms, without disabled and neutral ones."""
    chain = config.get_mapping(key)
    steps = chain.get_mappings("transforms")
    named = [(_read_name(step), step) for step in steps if step.get("_disabled_") is not True]
    return [(name, step) for name, step in named if name not in NEUTRAL]


def _read_name(step: Fields) -> str:
    """Return the name of a transform's class."""
    return step.get_text("_target_").rpartition(".")[2]


def _read_normalisation(config: Fields, channels: Any) -> dict[str, Any]:
    """Read what maps intensities. Raise UnsupportedPackage, naming every other transform but `Spacingd`."""
    if "preprocessing" not in config:
        raise UnsupportedPackage("preprocessing: there is no such key, so it is unknown what is done to an image.")
    step = _find_normalisation(config)
    if step is None:
        return {"kind": "range", "low": 0.0, "high": 1.0}
    name = _read_name(step)
    if channels != 1 and name != "ScaleIntensityRanged" and not step.get("channel_wise") and "divisor" not in step:
        raise UnsupportedPackage(
            f"{step.location('channel_wise')}: statistics over all channels together cannot be honoured."
        )
    return _TRANSLATORS[name](Fields(_check_plain(step.as_dict(), step.location()), step.location()))


def _find_normalisation(config: Fields) -> Fields | None:
    """Return the only transform of intensities, None where there is none. Raise UnsupportedPackage for any other."""
    steps = [step for name, step in _read_transforms(config, "preprocessing") if name != SPACING]
    known = [step for step in steps if _read_name(step) in _TRANSLATORS][:1]
    others = [f"{step.location('_target_')}: {_read_name(step)}" for step in steps if step not in known]
    if others:
        raise UnsupportedPackage(
            f"{', '.join(others)} cannot be honoured; one of {', '.join(_TRANSLATORS)}, and {SPACING} can."
        )
    return known[0] if known else None


def _find_spacing(config: Fields) -> Fields | None:
    """Return the only transform that resamples, None where none does. Raise UnsupportedPackage for several."""
    steps = [step for name, step in _read_transforms(config, "preprocessing") if name == SPACING]
    if not steps:
        return None
    step, *others = steps
    _check_plain(step.as_dict(), step.location())
    if others or "min_pixdim" in step or "max_pixdim" in step:
        raise UnsupportedPackage(f"{step.location()}: only one {SPACING} with a pixdim alone can be honoured.")
    return step


def _read_spacing(config: Fields) -> list[float] | None:
    """Return the voxel size to which images are resampled, along the axes of the network, None where they are not."""
    step = _find_spacing(config)
    if step is None:
        return None
    modes = step.get("mode") or "bilinear"
    if (modes[0] if isinstance(modes, list) else modes) != "bilinear":
        raise UnsupportedPackage(
            f"{step.location('mode')}: {modes!r} cannot be honoured; images are resampled bilinear."
        )
    pixdim = step.get("pixdim")
    # As MONAI does, the last edge stands for those that are not stated.
    edges = [*pixdim, *pixdim[-1:] * 3][:3] if isinstance(pixdim, list) else [pixdim] * 3
    if not all(map(_is_length, edges)):
        raise UnsupportedPackage(f"{step.location('pixdim')}: three edges of a voxel are expected, not {pixdim!r:.80}.")
    return [float(edge) for edge in edges]


def _is_length(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _read_number(step: Fields, key: str, default: float | None = None) -> float:
    value = step.get(key) if key in step else default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedPackage(f"{step.location(key)}: a number is expected, not {value!r}.")
    return float(value)


def _from_range(step: Fields) -> dict[str, Any]:
    a_min, a_max = _read_number(step, "a_min"), _read_number(step, "a_max")
    b_min, b_max = _read_number(step, "b_min", 0), _read_number(step, "b_max", 1)
    if a_min == a_max or b_min == b_max:
        raise UnsupportedPackage(f"{step.location('a_max')}: the range is empty.")
    # The intensities that the transform maps to 0 and 1.
    width = (a_max - a_min) / (b_max - b_min)
    low = a_min - b_min * width
    clip = sorted((b_min, b_max)) if step.get("clip") else None
    return {"kind": "range", "low": low, "high": low + width, "clip": clip}


def _from_percentiles(step: Fields) -> dict[str, Any]:
    if _read_number(step, "b_min", 0) != 0 or _read_number(step, "b_max", 1) != 1 or step.get("relative"):
        raise UnsupportedPackage(f"{step.location('b_min')}: only a scaling to 0 and 1 can be honoured.")
    clip = [0.0, 1.0] if step.get("clip") else None
    return {"kind": "percentile", "low": _read_number(step, "lower"), "high": _read_number(step, "upper"), "clip": clip}


def _from_extremes(step: Fields) -> dict[str, Any]:
    if _read_number(step, "minv", 0) != 0 or _read_number(step, "maxv", 1) != 1 or "factor" in step:
        raise UnsupportedPackage(f"{step.location('minv')}: only a scaling to 0 and 1 can be honoured.")
    return {"kind": "percentile", "low": 0.0, "high": 100.0}


def _from_mean(step: Fields) -> dict[str, Any]:
    if step.get("nonzero"):
        raise UnsupportedPackage(
            f"{step.location('nonzero')}: statistics of the nonzero voxels alone cannot be honoured."
        )
    if "subtrahend" in step or "divisor" in step:
        low = _read_number(step, "subtrahend", 0)
        return {"kind": "range", "low": low, "high": low + _read_number(step, "divisor", 1)}
    return {"kind": "zscore"}


_TRANSLATORS = {
    "ScaleIntensityRanged": _from_range,
    "ScaleIntensityRangePercentilesd": _from_percentiles,
    "ScaleIntensityd": _from_extremes,
    "NormalizeIntensityd": _from_mean,
}


def _read_activation(config: Fields) -> str:
    """Return softmax, sigmoid or none. Raise UnsupportedPackage for steps other than these and making labels."""
    activation = "none"
    for name, step in _read_transforms(config, "postprocessing"):
        if name == "Activationsd":
            kinds = [kind for kind in ("softmax", "sigmoid") if step.get(kind) not in (None, False, [False])]
            activation = kinds[0] if kinds else "none"
        elif name != "AsDiscreted" or step.get("threshold") is not None:
            raise UnsupportedPackage(f"{step.location('_target_')}: {name} cannot be honoured with these settings.")
    return activation
