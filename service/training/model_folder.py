"""The model folder of a trained network: the weights, the model file and a sample."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from service.core.config import Settings, override_settings
from service.core.files.atomic_files import write_atomically
from service.core.types import Options, Segmentation, Volume
from service.formats.tiff import writer as tiff_writer
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import MODEL_FILE_NAME, read_spec
from service.models.spec import ModelSpec, Sample

NEW_MODEL_CONTENT: dict[str, Any] = {
    "licence": "Not stated.",
    "architecture": {"name": "ShuffleUNet", "arguments": {"in_channels": 1, "out_channels": 2}},
    "input": {
        "channels": 1,
        "normalisation": {"kind": "percentile"},
        "roi_size": [64, 64, 64],
        "roi_multiple": [16, 16, 16],
    },
    "outputs": ["foreground", "distance"],
    "activation": "sigmoid",
    "decoding": {"kind": "instances", "minimum_size": 32},
}
"""Keys of the model file for training from random weights. The other keys of `Instances` have defaults."""


def describe_stacks(count: int) -> str:
    """Return the number of annotated stacks as a phrase, such as `3 annotated stacks`."""
    return f"{count} annotated {'stack' if count == 1 else 'stacks'}"


def draft_content(base: ModelSpec | None, name: str, stack_names: list[str]) -> dict[str, Any]:
    """Return the content of a new model file without `weights`. If `base` is None, start from `NEW_MODEL_CONTENT`."""
    content = (
        NEW_MODEL_CONTENT
        if base is None
        else base.model_dump(mode="json", exclude={"weights", "sample", "format", "confidence", "lineage"})
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
    network: nn.Module, content: dict[str, Any], folder: Path, image: NDArray[Any] | None, settings: Settings
) -> ModelSpec:
    """Write the weights, the model file and a sample to `folder`. Return the spec of the model. Raises BrokenModel.

    The sample is a window from the center of `image` [Z, Y, X], and is used to compare engines. If `image` is None, no
    sample is written.
    """
    save_weights(network, folder)
    digest = hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    model_content = content | {"weights": {"file": "weights.safetensors", "sha256": digest}}
    if image is not None:
        model_content |= {"sample": Sample().model_dump()}
        _write_sample(ModelSpec.model_validate({**model_content, "folder": folder}), image, settings)
    document = yaml.safe_dump(model_content, sort_keys=False, allow_unicode=True)
    (folder / MODEL_FILE_NAME).write_text(document, encoding="utf-8")
    return read_spec(folder)


def save_weights(network: nn.Module, folder: Path) -> None:
    """Write `weights.safetensors` atomically."""
    # Some networks register a layer under several names. Copy the tensors, because safetensors rejects shared memory.
    state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in network.state_dict().items()}
    with write_atomically(folder / "weights.safetensors") as partial_path:
        save_file(state, partial_path)


def _write_sample(spec: ModelSpec, image: NDArray[Any], settings: Settings) -> None:
    sample = spec.sample or Sample()
    starts = [max(0, length - edge) // 2 for length, edge in zip(image.shape, spec.input.roi_size, strict=True)]
    window = image[tuple(slice(start, start + edge) for start, edge in zip(starts, spec.input.roi_size, strict=True))]
    runner = ModelRunner(spec, override_settings(settings, "engine", {"kind": "eager", "precision": "fp32"}))
    runner.warm_up()
    segmentation = segment(runner, Volume.from_array(np.ascontiguousarray(window)[None]), Options()).segmentation
    tiff_writer.write(Segmentation(window, "labels"), spec.folder / sample.input)
    tiff_writer.write(segmentation, spec.folder / sample.expected)
