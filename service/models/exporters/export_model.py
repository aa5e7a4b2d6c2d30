"""Export a model as a bioimage.io package, as an ONNX file, or with torch.export."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from service.core.errors import UnsupportedPackage
from service.core.files.atomic_files import write_atomically
from service.core.types import Array, Volume
from service.models.architectures.build import MONAI_NETWORKS
from service.models.exporters import bioimageio
from service.models.exporters.bioimageio import PackageContent
from service.models.exporters.bioimageio_processing import make_preprocessing
from service.models.exporters.model_keys import make_model_keys
from service.models.exporters.network_file import Graph, NetworkFile, write_network
from service.models.loader import load_network
from service.models.spec import ModelSpec

ExportFormat = Literal["bioimageio", "onnx", "pt2"]
SUFFIXES: dict[ExportFormat, str] = {"bioimageio": ".zip", "onnx": ".onnx", "pt2": ".pt2"}
# Settings of the input that only StackSeg applies, with their values for models that do not need them.
INPUT_DEFAULTS = {
    "voxel_size": None,
    "diameter": None,
    "tiling": "monai",
    "padding": "zeros",
    "resampling": "linear",
    "crop_zeros": False,
}
MAX_LISTED_OUTPUTS = 4

ImagePreparer = Callable[[Volume, ModelSpec], Tensor]
"""Function that normalizes and resamples a volume [C, Z, Y, X] for a model, and returns float32 [1, C, z, y, x]."""


class ExportRequest(NamedTuple):
    """What to write.

    path    file to write; an existing file is replaced
    sample  stack [C, Z, Y, X] from which the test input is cut; None for noise
    """

    path: Path
    format: ExportFormat
    sample: Volume | None = None


def export_model(spec: ModelSpec, request: ExportRequest, prepare: ImagePreparer) -> tuple[str, ...]:
    """Write a model to a file. Return notes for the operator.

    `prepare` prepares the network's input for the test image. The written network is loaded again and compared with
    the original. Raises UnsupportedPackage if the format cannot represent the model, BrokenModel if the model itself
    cannot be loaded, and OSError if the file cannot be written.
    """
    path = request.path
    if spec.weights.kind == "torchscript":
        raise UnsupportedPackage(
            f"{spec.identifier} is a TorchScript program, which cannot be exported. Export the network from the "
            "program that created it."
        )
    if request.format == "bioimageio":
        make_preprocessing(spec.input)
    network = load_network(spec)
    image, notes = _make_test_image(spec, request.sample)
    window = prepare(Volume.from_array(image), spec)
    if tuple(window.shape[2:]) != spec.input.roi_size:
        raise UnsupportedPackage(f"{spec.identifier}: the sample is reduced to the size {tuple(window.shape[2:])}.")
    # torch.export.save warns about names with another suffix.
    with write_atomically(path, path.with_name(f".part-{path.name}")) as part_path:
        if request.format == "bioimageio":
            package_notes, result = _write_package(spec, network, (image, window), part_path)
            notes += package_notes
        else:
            graph = Graph(network, window, spec.input.roi_multiple, make_model_keys(spec))
            result = write_network(graph, part_path, request.format)
    return (
        f"The exported network reproduces the scores of the model with a difference of at most "
        f"{result.difference:.1g}. It accepts {result.flexibility.describe()}.",
        *notes,
        *_describe_decoding(spec),
    )


def _make_test_image(spec: ModelSpec, sample: Volume | None) -> tuple[Array, list[str]]:
    """Return a test image float32 [C, z, y, x] of the size of a window, and notes about it."""
    shape = (spec.input.channels, *spec.input.roi_size)
    if sample is None or sample.shape[0] != spec.input.channels:
        noise = np.random.default_rng(0).random(shape, np.float32) * 1000
        return np.floor(noise), ["The model has no sample, so the exported network was checked with noise."]
    sizes = [min(length, roi) for length, roi in zip(sample.shape[1:], spec.input.roi_size, strict=True)]
    starts = [(length - size) // 2 for length, size in zip(sample.shape[1:], sizes, strict=True)]
    planes = sample.read(starts[0], starts[0] + sizes[0])
    box = tuple(slice(start, start + size) for start, size in zip(starts[1:], sizes[1:], strict=True))
    crop = planes[:, :, *box].astype(np.float32)
    padding = [(0, roi - size) for roi, size in zip(spec.input.roi_size, sizes, strict=True)]
    return np.pad(crop, [(0, 0), *padding], "symmetric"), []


def _write_package(
    spec: ModelSpec, network: nn.Module, test: tuple[Array, Tensor], path: Path
) -> tuple[list[str], NetworkFile]:
    """Write a bioimage.io package. `test` is the image of the test and its normalized form."""
    image, window = test
    keys, notes, activation = make_model_keys(spec), list[str](), spec.activation
    if isinstance(activation, dict):
        network = _ActivatedNetwork(network, [activation[name] == "sigmoid" for name in spec.outputs]).eval()
        keys, activation = keys | {"activation": "none"}, "none"
        notes.append("The outputs have different activations, which the exported network includes.")
    with torch.inference_mode():
        scores: Tensor = network(window)
    if activation != "none":
        scores = torch.sigmoid(scores) if activation == "sigmoid" else torch.softmax(scores, 1)
    is_monai = spec.architecture is not None and spec.architecture.name in MONAI_NETWORKS
    state_network = None if isinstance(network, _ActivatedNetwork) or not is_monai else network
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        onnx_path = Path(folder) / bioimageio.ONNX_FILE
        result = write_network(Graph(network, window, spec.input.roi_multiple, keys), onnx_path, "onnx")
        arrays = (image[None], scores.numpy())
        content = PackageContent(spec, activation, arrays, onnx_path, result.flexibility, state_network, keys)
        notes += bioimageio.write_package(content, path)
    return notes, result


class _ActivatedNetwork(nn.Module):
    """A network that applies the sigmoid function to some of its outputs: [B, C, z, y, x] -> [B, K, z, y, x]."""

    def __init__(self, network: nn.Module, is_logit: list[bool]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("is_logit", torch.tensor(is_logit)[:, None, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the activated scores."""
        scores: Tensor = self.network(x)
        is_logit: Tensor = self.get_buffer("is_logit")
        return torch.where(is_logit, torch.sigmoid(scores), scores)


def _describe_decoding(spec: ModelSpec) -> list[str]:
    """Return notes about steps that other programs do not perform."""
    settings: dict[str, Any] = spec.input.model_dump()
    names = [f"input.{name}" for name, default in INPUT_DEFAULTS.items() if settings[name] != default]
    if spec.has_objects:
        names.append(f"decoding.kind: {spec.decoding.kind}")
    if not names:
        return []
    outputs = ", ".join(spec.outputs[:MAX_LISTED_OUTPUTS])
    others = len(spec.outputs) - MAX_LISTED_OUTPUTS
    return [
        f"Other programs get the outputs {outputs}{f' and {others} more' if others > 0 else ''}. Only StackSeg reads "
        f"these settings from the file: {', '.join(names)}."
    ]
