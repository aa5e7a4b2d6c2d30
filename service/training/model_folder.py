"""The model folder of a trained network: the weights, the model file and a sample."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from service.core.config import Settings, override_settings
from service.core.files.atomic_files import write_atomically
from service.core.quantities import VoxelSize
from service.core.types import Options, Segmentation, Volume
from service.formats.tiff import writer as tiff_writer
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import MODEL_FILE_NAME, read_spec
from service.models.spec import ModelSpec, Sample, TargetName, get_target
from service.training.stacks.annotated_stack import AnnotatedStack, choose_default_diameter
from service.training.targets.choice import set_target

NEW_MODEL_CONTENT: dict[str, Any] = {
    "licence": "Not stated.",
    "architecture": {"name": "ShuffleUNet", "arguments": {"in_channels": 1, "out_channels": 2}},
    "input": {
        "channels": 1,
        "diameter": 20.0,
        "normalisation": {"kind": "percentile"},
        "roi_size": [64, 64, 64],
        "roi_multiple": [16, 16, 16],
    },
    "outputs": ["foreground", "distance"],
    "activation": "sigmoid",
    "decoding": {"kind": "instances", "minimum_size": 32},
}
"""Keys of the model file for training from random weights. The other keys of `Instances` have defaults."""


def draft_model(
    stacks: Sequence[AnnotatedStack],
    base: ModelSpec | None,
    name: str,
    *,
    is_private: bool,
    target: TargetName | None = None,
) -> dict[str, Any]:
    """Return the content of a new model file for annotated stacks, without `weights`. Raises BadParameter.

    The object diameter of the stacks becomes the default for requests. The names of private stacks are replaced with
    their number, because all clients can see the description of a model. If `target` is None, the network learns the
    same as that of the base model.
    """
    content = draft_content(base, name, [stack.name for stack in stacks])
    if target is not None and target != ("instances" if base is None else get_target(base)):
        content = set_target(content, target)
    if is_private:
        prefix = "" if base is None else f"{base.training_data} Then: "
        content["training_data"] = f"{prefix}{describe_stacks(len(stacks))}."
    if content["input"].get("diameter") is not None:
        diameter = choose_default_diameter(stacks)
        content["input"] = content["input"] | {
            "default_diameter": None if diameter is None else str(diameter),
            "estimate_diameter": diameter is not None and content["input"].get("estimate_diameter", False),
        }
    return content


class SampleSource(NamedTuple):
    """An image [Z, Y, X] from which the sample is cut.

    labels      labels [Z, Y, X] of the image; None to cut the sample from the center
    voxel_size  in micrometers; None if unknown
    """

    image: NDArray[Any]
    labels: NDArray[Any] | None = None
    voxel_size: VoxelSize | None = None


def describe_stacks(count: int) -> str:
    """Return the number of annotated stacks as a phrase, such as `3 annotated stacks`."""
    return f"{count} annotated {'stack' if count == 1 else 'stacks'}"


def draft_content(base: ModelSpec | None, name: str, stack_names: list[str]) -> dict[str, Any]:
    """Return the content of a new model file without `weights`. If `base` is None, start from `NEW_MODEL_CONTENT`."""
    content = (
        NEW_MODEL_CONTENT
        if base is None
        else base.model_dump(mode="json", exclude={"weights", "sample", "format", "confidence", "lineage", "authors"})
    )
    base_training_data = "" if base is None else f"{base.training_data} Then: "
    return {
        "format": 1,
        **content,
        "name": name,
        "version": "1",
        "summary": f"Trained on {describe_stacks(len(stack_names))}"
        + (f", starting from {base.identifier}." if base else "."),
        "training_data": base_training_data + ", ".join(stack_names),
    }


def write_model(
    network: nn.Module, content: dict[str, Any], folder: Path, sample: SampleSource | None, settings: Settings
) -> ModelSpec:
    """Write the weights, the model file and a sample to `folder`. Return the spec of the model. Raises BrokenModel.

    The sample is a window of an image, and is used to compare engines. If `sample` is None, no sample is written.
    """
    save_weights(network, folder)
    digest = hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    model_content = content | {"weights": {"file": "weights.safetensors", "sha256": digest}}
    if sample is not None:
        model_content |= {"sample": Sample().model_dump()}
        _write_sample(ModelSpec.model_validate({**model_content, "folder": folder}), sample, settings)
    document = yaml.safe_dump(model_content, sort_keys=False, allow_unicode=True)
    (folder / MODEL_FILE_NAME).write_text(document, encoding="utf-8")
    return read_spec(folder)


def save_weights(network: nn.Module, folder: Path) -> None:
    """Write `weights.safetensors` atomically."""
    # Some networks register a layer under several names. Copy the tensors, because safetensors rejects shared memory.
    state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in network.state_dict().items()}
    with write_atomically(folder / "weights.safetensors") as partial_path:
        save_file(state, partial_path)


def _write_sample(spec: ModelSpec, source: SampleSource, settings: Settings) -> None:
    sample, image = spec.sample or Sample(), source.image
    window = image[_find_window(image.shape, spec.input.roi_size, source.labels)]
    runner = ModelRunner(spec, override_settings(settings, "engine", {"kind": "eager", "precision": "fp32"}))
    runner.warm_up()
    volume = Volume.from_array(np.ascontiguousarray(window)[None], source.voxel_size)
    segmentation = segment(runner, volume, Options()).segmentation
    tiff_writer.write(Segmentation(window, "labels", source.voxel_size), spec.folder / sample.input)
    tiff_writer.write(segmentation, spec.folder / sample.expected)


def _find_window(shape: Sequence[int], size: Sequence[int], labels: NDArray[Any] | None) -> tuple[slice, ...]:
    """Return the window of at most `size` voxels with the most object voxels, or the window at the center."""
    lengths = [min(length, edge) for length, edge in zip(shape, size, strict=True)]
    ends = [total - length for total, length in zip(shape, lengths, strict=True)]
    starts = [sorted({*range(0, end, max(length // 2, 1)), end}) for end, length in zip(ends, lengths, strict=True)]
    windows = [_make_window(corner, lengths) for corner in itertools.product(*starts)]
    center = _make_window([end // 2 for end in ends], lengths)
    if labels is None or not labels.any():
        return center
    return max(windows, key=lambda window: int(np.count_nonzero(labels[window])))


def _make_window(corner: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(corner, lengths, strict=True))
