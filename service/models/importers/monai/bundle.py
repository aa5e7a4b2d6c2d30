"""Read MONAI bundles: `configs/metadata.json`, `configs/inference.json` or `.yaml`, and `models/model.pt` or `.ts`.

The configuration of a bundle may refer to any class (`_target_`) and any Python expression (`$...`). None of this code
is run: known names are translated, `@` references to plain values are resolved, and everything else is reported as
a problem. Source: specification of the MONAI bundle format, version 0.1.10.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.core.errors import UnsupportedPackage
from service.core.files.documents import MAX_CHARACTERS
from service.models.architectures.build import ARCHITECTURES
from service.models.importers.draft import (
    Draft,
    Fields,
    WeightsKind,
    check_channel_count,
    collect_problem,
    find_file,
    read_credits,
    read_mapping,
)
from service.models.importers.monai.arguments import check_arguments, check_dtypes, is_enabled, is_positive_number
from service.models.importers.monai.normalization import TRANSLATORS, translate_normalization

WEIGHTS_FILES: tuple[tuple[str, WeightsKind], ...] = (
    ("models/model.pt", "state dict"),
    ("models/model.ts", "torchscript"),
)
# Transforms that are ignored, because StackSeg loads files, arranges axes and inverts the resampling itself.
_IGNORED_NAMES = (
    "LoadImaged EnsureChannelFirstd EnsureTyped ToTensord ToDeviced CastToTyped Invertd SaveImaged Identityd"
)
IGNORED_TRANSFORMS = frozenset(_IGNORED_NAMES.split())
SPACING_TRANSFORM = "Spacingd"
# Maximum nesting depth of a configuration with resolved references.
MAX_DEPTH = 32
AXES_NOTE = (
    "The network receives the axes Z, Y, X. A bundle trained on NIfTI files, which MONAI reads as X, Y, Z, may expect "
    "them in reverse order. Test the model on a stack with known labels."
)

SPACING_NOTE = (
    "The Spacingd transform requires voxels of {}, interpreted as um along Z, Y, X. input.voxel_size is set to this "
    "value unless you specified a different one. Specify the voxel size if the bundle uses other units, such as the "
    "millimeters of NIfTI files."
)
ORDER_NOTE = (
    "The bundle applies {} after {}, and StackSeg before it. If a stack has other voxels, its intensities differ, "
    "particularly next to voxels that are clipped."
)


def is_package(root: Path) -> bool:
    """Return whether a folder is a MONAI bundle."""
    return (root / "configs" / "metadata.json").is_file()


def read(root: Path) -> Draft:
    """Read a bundle into a draft. Raises UnsupportedPackage if it is damaged."""
    metadata = read_mapping(find_file(root, "configs/metadata.json"))
    config = Fields(_Resolver(read_mapping(_find_inference_config(root)).as_dict()).resolve())
    file, kind = _find_weights(root)
    content: dict[str, Any] = {
        "name": metadata.get_string("name", root.name),
        "version": metadata.get_string("version", "1"),
        "summary": metadata.get_string("description", "A MONAI bundle."),
        "licence": metadata.get_string("copyright", "Not stated."),
        "training_data": metadata.get_string("data_source", "Not stated."),
        **read_credits(metadata.get("authors"), metadata.get("references")),
        "outputs": [],
    }
    problems: dict[str, str] = {}
    if kind == "state dict":
        with collect_problem(problems, "architecture"):
            content["architecture"] = _read_architecture(config)
    formats = metadata.get_mapping("network_data_format")
    content["input"] = inputs = _read_input(config, formats, problems)
    with collect_problem(problems, "outputs"):
        content["outputs"] = _read_outputs(_get_only_tensor(formats, "outputs"))
    if "outputs" in problems:
        del content["outputs"]
    has_classes = False
    with collect_problem(problems, "activation"):
        content["activation"], has_classes = _read_activation(config)
    if len(content.get("outputs") or []) > 1 and has_classes and content["activation"] != "sigmoid":
        content["decoding"] = {"kind": "classes"}
    else:
        problems["decoding"] = (
            "postprocessing: labels can be derived only by an argmax over several outputs, which the bundle lacks."
        )
    notes = tuple(_list_notes(config, inputs))
    return Draft(content, file, kind, problems=problems, notes=notes, description="a MONAI bundle")


def _list_notes(config: Fields, inputs: dict[str, Any]) -> Iterator[str]:
    """Yield notes about the axes and the resampling. `inputs` contains the keys of `input`."""
    yield AXES_NOTE
    if "voxel_size" not in inputs:
        return
    yield SPACING_NOTE.format(", ".join(f"{size:g}" for size in inputs["voxel_size"]))
    if not _is_linear(inputs.get("normalisation", [])):
        order = [name for name, _ in _read_transforms(config, "preprocessing")]
        name = next(name for name in order if name in TRANSLATORS)
        if order.index(SPACING_TRANSFORM) < order.index(name):
            yield ORDER_NOTE.format(name, SPACING_TRANSFORM)


def _is_linear(normalization: dict[str, Any] | list[dict[str, Any]]) -> bool:
    """Return whether a normalization gives the same result before and after resampling."""
    channels = normalization if isinstance(normalization, list) else [normalization]
    return all(channel["kind"] == "range" and channel.get("clip") is None for channel in channels)


def _read_input(config: Fields, formats: Fields, problems: dict[str, str]) -> dict[str, Any]:
    """Return the keys of `input`, and add unsupported settings to `problems`."""
    inputs = dict[str, Any]()
    with collect_problem(problems, "input.channels"):
        inputs["channels"] = _get_only_tensor(formats, "inputs").get("num_channels")
    with collect_problem(problems, "input.normalisation"):
        inputs["normalisation"] = _read_normalization(config, inputs.get("channels", 1))
    with collect_problem(problems, "input.voxel_size"):
        spacing = _read_spacing(config)
        if spacing is not None:
            inputs["voxel_size"] = spacing
    with collect_problem(problems, "input.roi_size"):
        inputs["roi_size"] = _read_roi_size(config, formats)
    return inputs


def _find_weights(root: Path) -> tuple[Path, WeightsKind]:
    for name, kind in WEIGHTS_FILES:
        if (root / name).is_file():
            return find_file(root, name), kind
    raise UnsupportedPackage(f"models: neither {WEIGHTS_FILES[0][0]} nor {WEIGHTS_FILES[1][0]} exists.")


def _find_inference_config(root: Path) -> Path:
    for name in ("inference.json", "inference.yaml", "inference.yml"):
        if (root / "configs" / name).is_file():
            return find_file(root, f"configs/{name}")
    raise UnsupportedPackage("configs: neither inference.json nor inference.yaml exists.")


class _Resolver:
    """Resolver of `@` references to other values of a configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._character_count = 0

    def resolve(self) -> Any:
        """Resolve the references. Raises UnsupportedPackage if they are circular or expand to too many characters."""
        return self._resolve(self._config, 0)

    def _resolve(self, value: Any, depth: int) -> Any:
        self._count_characters(value, depth)
        if isinstance(value, dict):
            return {key: self._resolve(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolve(item, depth + 1) for item in value]
        if isinstance(value, str) and re.fullmatch(r"@[\w:#]+", value):
            target = self._resolve(self._look_up(value[1:]), depth + 1)
            return value if target is None else target
        return value

    def _count_characters(self, value: Any, depth: int) -> None:
        """Count the characters of a value. Raises UnsupportedPackage if the depth or the total exceeds its limit."""
        self._character_count += 1 + (len(value) if isinstance(value, str) else 0)
        if depth > MAX_DEPTH:
            raise UnsupportedPackage("configs: references are circular or nested too deeply.")
        if self._character_count > MAX_CHARACTERS:
            raise UnsupportedPackage(f"configs: references expand to more than {MAX_CHARACTERS} characters.")

    def _look_up(self, reference: str) -> Any:
        value: Any = self._config
        for key in re.split(r"::|#", reference):
            value = value.get(key) if isinstance(value, dict) else value
        return value


def _reject_expressions(value: Any, location: str) -> Any:
    """Return `value`. Raises UnsupportedPackage if it contains an expression. Code from a package is never run."""
    if isinstance(value, dict):
        return {key: _reject_expressions(item, f"{location}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_reject_expressions(item, f"{location}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, str) and value[:1] in {"$", "@", "%"}:
        raise UnsupportedPackage(f"{location}: {value!r:.80} is an expression; code from a package is never run.")
    return value


def _read_architecture(config: Fields) -> dict[str, Any]:
    network = config.get_mapping("network_def")
    if "_target_" not in network and "network" in config:
        network = config.get_mapping("network")
    target = network.get_string("_target_")
    name = target.rpartition(".")[2]
    if name not in ARCHITECTURES or not re.fullmatch(r"(monai\.networks\.nets\.(\w+\.)?)?\w+", target):
        raise UnsupportedPackage(f"{network.locate('_target_')}: {target!r} is not one of {', '.join(ARCHITECTURES)}.")
    arguments = {key: value for key, value in network.as_dict().items() if not key.startswith("_")}
    return {"name": name, "arguments": _reject_expressions(arguments, network.locate())}


def _get_only_tensor(formats: Fields, side: str) -> Fields:
    """Return the only tensor in `inputs` or `outputs`."""
    tensors = formats.get_mapping(side).as_dict()
    if len(tensors) != 1:
        raise UnsupportedPackage(
            f"{formats.locate(side)}: expected exactly one tensor, found {', '.join(tensors) or 'none'}."
        )
    ((name, content),) = tensors.items()
    return Fields(content, f"{formats.locate(side)}.{name}")


def _read_outputs(output: Fields) -> list[str]:
    definition = output.get_mapping("channel_def").as_dict()
    channel_count = output.get("num_channels")
    if not isinstance(channel_count, int):
        raise UnsupportedPackage(f"{output.locate('num_channels')}: expected an integer.")
    check_channel_count(channel_count, output.locate("num_channels"))
    names = [str(definition.get(str(number), f"output {number}")) for number in range(channel_count)]
    return names if len(set(names)) == channel_count else [f"output {number}" for number in range(channel_count)]


def _read_roi_size(config: Fields, formats: Fields) -> list[int]:
    for section, key in (
        (config.get_mapping("inferer"), "roi_size"),
        (_get_only_tensor(formats, "inputs"), "spatial_shape"),
    ):
        size = section.get(key)
        size = [size] * 3 if type(size) is int else size
        if isinstance(size, list) and len(size) == 3 and all(isinstance(length, int) and length > 0 for length in size):
            return size
    raise UnsupportedPackage("inferer.roi_size: expected the window size in voxels along three axes.")


def _read_transforms(config: Fields, key: str) -> list[tuple[str, Fields]]:
    """Return the names and settings of a chain of transforms, excluding disabled and ignored transforms."""
    chain = config.get_mapping(key)
    steps = [(_read_name(step), step) for step in chain.get_mappings("transforms") if not _is_disabled(step)]
    for name, step in steps:
        if name in IGNORED_TRANSFORMS:
            check_dtypes(step)
        elif name == "AsDiscreted":
            # Classes are integers, so any type can hold them.
            break
    return [(name, step) for name, step in steps if name not in IGNORED_TRANSFORMS]


def _is_disabled(step: Fields) -> bool:
    """Return whether MONAI skips a transform. Raises UnsupportedPackage if this depends on an expression."""
    value = _reject_expressions(step.get("_disabled_"), step.locate("_disabled_"))
    return value.strip().lower() == "true" if isinstance(value, str) else bool(value)


def _read_name(step: Fields) -> str:
    """Return the class name of a transform."""
    return step.get_string("_target_").rpartition(".")[2]


def _read_normalization(config: Fields, channel_count: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """Read the intensity normalization. Raises UnsupportedPackage for all other transforms except `Spacingd`."""
    if "preprocessing" not in config:
        raise UnsupportedPackage("preprocessing: this key is missing, so the normalization of images is unknown.")
    step = _find_normalization(config)
    if step is None:
        return {"kind": "range", "low": 0.0, "high": 1.0}
    step = Fields(_reject_expressions(step.as_dict(), step.locate()), step.locate())
    return translate_normalization(_read_name(step), step, channel_count)


def _find_normalization(config: Fields) -> Fields | None:
    """Return the only intensity transform, or None. Raises UnsupportedPackage for any other except `Spacingd`."""
    steps = [step for name, step in _read_transforms(config, "preprocessing") if name != SPACING_TRANSFORM]
    supported_steps = [step for step in steps if _read_name(step) in TRANSLATORS][:1]
    problems = [f"{step.locate('_target_')}: {_read_name(step)}" for step in steps if step not in supported_steps]
    if problems:
        raise UnsupportedPackage(
            f"preprocessing: these transforms are not supported: {', '.join(problems)}. The supported transforms "
            f"are {SPACING_TRANSFORM} and one of {', '.join(TRANSLATORS)}."
        )
    return supported_steps[0] if supported_steps else None


def _find_spacing(config: Fields) -> Fields | None:
    """Return the only transform that resamples, or None. Raises UnsupportedPackage if there are several."""
    steps = [step for name, step in _read_transforms(config, "preprocessing") if name == SPACING_TRANSFORM]
    if not steps:
        return None
    step, *later_steps = steps
    _reject_expressions(step.as_dict(), step.locate())
    check_arguments(SPACING_TRANSFORM, step)
    if later_steps or "min_pixdim" in step or "max_pixdim" in step:
        raise UnsupportedPackage(
            f"{step.locate()}: only one {SPACING_TRANSFORM}, without min_pixdim and max_pixdim, is supported."
        )
    return step


def _read_spacing(config: Fields) -> list[float] | None:
    """Return the voxel size to which images are resampled, along the network's axes, or None without `Spacingd`."""
    step = _find_spacing(config)
    if step is None:
        return None
    for key, supported in (("mode", "bilinear"), ("padding_mode", "border")):
        value = step.get(key) or supported
        if (value[0] if isinstance(value, list) else value) != supported:
            raise UnsupportedPackage(f"{step.locate(key)}: only {supported} is supported, not {value!r:.80}.")
    pixdim = step.get("pixdim")
    # As in MONAI, the last value is repeated for missing axes.
    sizes = [*pixdim, *pixdim[-1:] * 3][:3] if isinstance(pixdim, list) else [pixdim] * 3
    if not all(map(is_positive_number, sizes)):
        raise UnsupportedPackage(f"{step.locate('pixdim')}: expected voxel sizes for three axes, not {pixdim!r:.80}.")
    return [float(size) for size in sizes]


def _read_activation(config: Fields) -> tuple[str, bool]:
    """Return softmax, sigmoid or none, and whether the output with the highest score is the class.

    Raises UnsupportedPackage for steps other than activations and an argmax.
    """
    activation, has_classes = "none", False
    for index, (name, step) in enumerate(_read_transforms(config, "postprocessing")):
        check_arguments(name, step)
        if name == "Activationsd" and index == 0:
            activation = next((kind for kind in ("softmax", "sigmoid") if is_enabled(step, kind)), "none")
        elif name != "AsDiscreted" or step.get("threshold") is not None:
            raise UnsupportedPackage(f"{step.locate('_target_')}: {name} is not supported with these settings.")
        else:
            has_classes = has_classes or is_enabled(step, "argmax")
    return activation, has_classes or activation == "softmax"
