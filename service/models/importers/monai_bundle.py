"""MONAI bundles: `configs/metadata.json`, `configs/inference.json` or `.yaml`, and `models/model.pt` or `.ts`.

The configuration of a bundle is close to a program: `_target_` names any class and `$...` any Python expression. Here
both are only read: known names are translated, `@` references to plain values are followed, and the rest is a problem.
Source: the specification of the MONAI bundle format, version 0.1.10.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.architectures import ARCHITECTURES
from service.models.importers.package import Draft, Fields, Kind, read_mapping

WEIGHTS: tuple[tuple[str, Kind], ...] = (("models/model.pt", "state dict"), ("models/model.ts", "torchscript"))
# They load a file and lay it out, which is done here by other means, or bring the result back to the file's grid.
NEUTRAL = frozenset(
    [
        "LoadImaged",
        "EnsureChannelFirstd",
        "EnsureTyped",
        "ToTensord",
        "ToDeviced",
        "CastToTyped",
        "Invertd",
        "SaveImaged",
        "Identityd",
    ]
)
DEEPEST = 32


def recognises(root: Path) -> bool:
    return (root / "configs" / "metadata.json").is_file()


def read(root: Path) -> Draft:
    """What a bundle says. Raises UnsupportedPackage where it is damaged."""
    metadata = read_mapping(root / "configs" / "metadata.json")
    config = _resolved(read_mapping(_inference(root)))
    file, kind = next(((root / name, kind) for name, kind in WEIGHTS if (root / name).is_file()), (None, None))
    if file is None or kind is None:
        raise UnsupportedPackage(f"models: there is neither {WEIGHTS[0][0]} nor {WEIGHTS[1][0]}.")
    content: dict[str, Any] = {
        "name": metadata.text("name", root.name),
        "version": metadata.text("version", "1"),
        "summary": metadata.text("description", "A MONAI bundle."),
        "licence": metadata.text("copyright", "Not stated."),
        "training_data": metadata.text("data_source", "Not stated."),
        "outputs": [],
    }
    problems: dict[str, str] = {}
    if kind == "state dict":
        _take(content, problems, "architecture", lambda: _architecture(config))
    formats = metadata.inner("network_data_format")
    content["input"] = {}
    _take(content["input"], problems, "channels", lambda: _only(formats, "inputs").get("num_channels"), "input.")
    _take(content["input"], problems, "normalisation", lambda: _normalisation(config), "input.")
    _take(content["input"], problems, "roi_size", lambda: _roi_size(config, formats), "input.")
    _take(content, problems, "outputs", lambda: _outputs(_only(formats, "outputs")))
    _take(content, problems, "activation", lambda: _activation(config))
    if len(content.get("outputs") or []) > 1 and content.get("activation") != "sigmoid":
        content["decoding"] = {"kind": "classes"}
    else:
        problems["decoding"] = (
            "postprocessing: does not say by an argmax over several outputs what labels are made from."
        )
    notes = (
        "The network gets the axes Z, Y, X. A bundle trained on NIfTI files, which MONAI reads as X, Y, Z, may expect "
        "them the other way round: try it on a stack whose answer you know.",
    )
    return Draft(content, file, kind, problems={k: v for k, v in problems.items() if v}, notes=notes)


def _inference(root: Path) -> Path:
    for name in ("inference.json", "inference.yaml", "inference.yml"):
        if (root / "configs" / name).is_file():
            return root / "configs" / name
    raise UnsupportedPackage("configs: there is no inference.json or inference.yaml.")


def _take(
    content: dict[str, Any], problems: dict[str, str], key: str, read_it: Callable[[], Any], prefix: str = ""
) -> None:
    """What was understood goes into the content; what was not becomes a problem of that key."""
    try:
        content[key] = read_it()
    except UnsupportedPackage as error:
        content.pop(key, None)
        problems[prefix + key] = str(error)


def _resolved(config: Fields) -> Fields:
    """The configuration with references to plain values followed, within it."""

    def look_up(reference: str, depth: int) -> Any:
        value: Any = config
        for part in re.split(r"::|#", reference):
            inner = value.get(part) if isinstance(value, Fields) else value
            value = Fields(inner, part) if isinstance(inner, dict) else inner
        return follow(value.plain() if isinstance(value, Fields) else value, depth + 1)

    def follow(value: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise UnsupportedPackage("configs: references lead in circles.")
        if isinstance(value, dict):
            return {key: follow(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list):
            return [follow(inner, depth + 1) for inner in value]
        if isinstance(value, str) and re.fullmatch(r"@[\w:#]+", value):
            found = look_up(value[1:], depth)
            return value if found is None else found
        return value

    return Fields(follow(config.plain(), 0))


def _plain(value: Any, where: str) -> Any:
    """A value without expressions and references, which only running the bundle could tell."""
    if isinstance(value, dict):
        return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, f"{where}[{number}]") for number, inner in enumerate(value)]
    if isinstance(value, str) and value[:1] in {"$", "@", "%"}:
        raise UnsupportedPackage(f"{where}: {value!r} is an expression, and no code of a package is run.")
    return value


def _architecture(config: Fields) -> dict[str, Any]:
    network = config.inner("network_def")
    if "_target_" not in network and "network" in config:
        network = config.inner("network")
    target = network.text("_target_")
    name = target.rpartition(".")[2]
    if name not in ARCHITECTURES or not re.fullmatch(r"(monai\.networks\.nets\.(\w+\.)?)?\w+", target):
        raise UnsupportedPackage(f"{network.where('_target_')}: {target!r} is none of {', '.join(ARCHITECTURES)}.")
    arguments = {key: value for key, value in network.plain().items() if not key.startswith("_")}
    return {"name": name, "arguments": _plain(arguments, network.where())}


def _only(formats: Fields, side: str) -> Fields:
    """The one input, or the one output."""
    named = formats.inner(side).plain()
    if len(named) != 1:
        raise UnsupportedPackage(f"{formats.where(side)}: exactly one is expected, not {', '.join(named) or 'none'}.")
    ((name, content),) = named.items()
    return Fields(content, f"{formats.where(side)}.{name}")


def _outputs(output: Fields) -> list[str]:
    definition = output.inner("channel_def").plain()
    channels = output.get("num_channels")
    if not isinstance(channels, int) or channels < 1:
        raise UnsupportedPackage(f"{output.where('num_channels')}: the number of channels is expected.")
    names = [str(definition.get(str(number), f"output {number}")) for number in range(channels)]
    return names if len(set(names)) == channels else [f"output {number}" for number in range(channels)]


def _roi_size(config: Fields, formats: Fields) -> list[int]:
    for place, key in ((config.inner("inferer"), "roi_size"), (_only(formats, "inputs"), "spatial_shape")):
        size = place.get(key)
        if isinstance(size, list) and len(size) == 3 and all(isinstance(edge, int) and edge > 0 for edge in size):
            return size
    raise UnsupportedPackage("inferer.roi_size: three edges of the window in voxels are expected.")


def _transforms(config: Fields, key: str) -> list[tuple[str, Fields]]:
    """Names and settings of a chain, without those that are neutral here."""
    chain = config.inner(key)
    steps = chain.each("transforms")
    named = [(step.text("_target_").rpartition(".")[2], step) for step in steps if step.get("_disabled_") is not True]
    return [(name, step) for name, step in named if name not in NEUTRAL]


def _normalisation(config: Fields) -> dict[str, Any]:
    steps = _transforms(config, "preprocessing")
    if not steps:
        return {"kind": "range", "low": 0.0, "high": 1.0}
    translators = {
        "ScaleIntensityRanged": _range,
        "ScaleIntensityRangePercentilesd": _percentiles,
        "ScaleIntensityd": _extremes,
        "NormalizeIntensityd": _zscore,
    }
    name, step = steps[0]
    if len(steps) > 1 or name not in translators:
        refused, step = steps[1] if name in translators else steps[0]
        raise UnsupportedPackage(
            f"{step.where('_target_')}: {refused} cannot be honoured; one of {', '.join(translators)} can."
        )
    return translators[name](Fields(_plain(step.plain(), step.where()), step.where()))


def _number(step: Fields, key: str, default: float | None = None) -> float:
    value = step.get(key) if key in step else default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedPackage(f"{step.where(key)}: a number is expected, not {value!r}.")
    return float(value)


def _range(step: Fields) -> dict[str, Any]:
    a_min, a_max = _number(step, "a_min"), _number(step, "a_max")
    b_min, b_max = _number(step, "b_min", 0), _number(step, "b_max", 1)
    if a_min == a_max or b_min == b_max:
        raise UnsupportedPackage(f"{step.where('a_max')}: the range is empty.")
    stretch = (a_max - a_min) / (b_max - b_min)
    low = a_min - b_min * stretch
    clip = sorted((b_min, b_max)) if step.get("clip") else None
    return {"kind": "range", "low": low, "high": low + stretch, "clip": clip}


def _percentiles(step: Fields) -> dict[str, Any]:
    if _number(step, "b_min", 0) != 0 or _number(step, "b_max", 1) != 1 or step.get("relative"):
        raise UnsupportedPackage(f"{step.where('b_min')}: only a scaling to 0 and 1 can be honoured.")
    clip = [0.0, 1.0] if step.get("clip") else None
    return {"kind": "percentile", "low": _number(step, "lower"), "high": _number(step, "upper"), "clip": clip}


def _extremes(step: Fields) -> dict[str, Any]:
    if _number(step, "minv", 0) != 0 or _number(step, "maxv", 1) != 1 or "factor" in step:
        raise UnsupportedPackage(f"{step.where('minv')}: only a scaling to 0 and 1 can be honoured.")
    return {"kind": "percentile", "low": 0.0, "high": 100.0}


def _zscore(step: Fields) -> dict[str, Any]:
    if step.get("nonzero"):
        raise UnsupportedPackage(f"{step.where('nonzero')}: statistics of the nonzero voxels alone cannot be honoured.")
    if "subtrahend" in step or "divisor" in step:
        low = _number(step, "subtrahend", 0)
        return {"kind": "range", "low": low, "high": low + _number(step, "divisor", 1)}
    return {"kind": "zscore"}


def _activation(config: Fields) -> str:
    """softmax, sigmoid or none. Other steps after the network cannot be honoured, but for those that make labels."""
    activation = "none"
    for name, step in _transforms(config, "postprocessing"):
        if name == "Activationsd":
            chosen = [kind for kind in ("softmax", "sigmoid") if step.get(kind) not in (None, False, [False])]
            activation = chosen[0] if chosen else "none"
        elif name != "AsDiscreted" or step.get("threshold") is not None:
            raise UnsupportedPackage(f"{step.where('_target_')}: {name} cannot be honoured with these settings.")
    return activation
