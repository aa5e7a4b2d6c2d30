"""Tests of exporting models and importing them again. All formats must restore the model and its scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from importing import import_model, segment_volume
from paths import ROOT
from torch import Tensor, nn

from service.core.errors import UnsupportedPackage
from service.core.types import Volume
from service.inference.preprocessing.resample import prepare_tensor
from service.models.exporters.export_model import SUFFIXES, ExportFormat, ExportRequest, export_model
from service.models.loader import load_network
from service.models.repository import read_spec
from service.models.spec import ModelSpec

FORMATS: tuple[ExportFormat, ...] = ("bioimageio", "onnx", "pt2")
# Keys that an export does not retain: it contains the network as a graph, without the sample.
CHANGED_KEYS = {"name", "architecture", "weights", "sample", "folder"}
NNUNET = ROOT / "tests" / "data" / "nnunet"
STARDIST = ROOT / "tests" / "data" / "stardist"


def export(spec: ModelSpec, folder: Path, export_format: ExportFormat, sample: Volume | None = None) -> Path:
    path = folder / f"{spec.name}{SUFFIXES[export_format]}"
    export_model(spec, ExportRequest(path, export_format, sample), prepare_tensor)
    return path


def export_and_import(spec: ModelSpec, folder: Path, export_format: ExportFormat) -> ModelSpec:
    return import_model(export(spec, folder, export_format), folder / "imported", {}, f"new-{export_format}").spec


def list_keys(spec: ModelSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude=CHANGED_KEYS)


def compute_probabilities(spec: ModelSpec, image: Tensor) -> Tensor:
    """Return the outputs of a model for a normalized image, after its activation."""
    with torch.inference_mode():
        scores: Tensor = load_network(spec)(image)
    if spec.activation == "softmax":
        return torch.softmax(scores, 1)
    outputs = zip(scores.unbind(1), spec.outputs, strict=True)
    return torch.stack([s.sigmoid() if spec.get_activation(name) == "sigmoid" else s for s, name in outputs], 1)


@pytest.mark.parametrize("export_format", FORMATS)
def test_model_is_restored_with_its_labels(
    bands: ModelSpec, phantom: Any, tmp_path: Path, export_format: ExportFormat
) -> None:
    spec = export_and_import(bands, tmp_path, export_format)
    assert list_keys(spec) == list_keys(bands)
    labels, expected_labels = (
        segment_volume(model, Volume.from_array(phantom.image[None])).segmentation.pixels for model in (spec, bands)
    )
    assert np.mean(np.asarray(labels) == np.asarray(expected_labels)) > 0.9999


def read_nnunet(folder: Path) -> ModelSpec:
    """A model with three regions, voxels of different lengths, and windows as in nnU-Net."""
    return import_model(NNUNET / "Dataset003_Regions", folder, {}).spec


def read_stardist(folder: Path) -> ModelSpec:
    """A model with an object probability and distances for every second voxel along y and x."""
    spec = import_model(STARDIST / "unet", folder, {"input": {"roi_size": [8, 16, 16]}}).spec
    assert spec.tiling.step == (1, 2, 2)
    return spec


@pytest.mark.parametrize("read", [read_nnunet, read_stardist])
@pytest.mark.parametrize("export_format", FORMATS)
def test_imported_models_are_exported(
    tmp_path: Path, read: Callable[[Path], ModelSpec], export_format: ExportFormat
) -> None:
    spec = read(tmp_path / "models")
    restored_spec = export_and_import(spec, tmp_path, export_format)
    ignored_keys = {"activation"} if isinstance(spec.activation, dict) and export_format == "bioimageio" else set()
    keys, restored_keys = list_keys(spec), list_keys(restored_spec)
    assert {key for key in keys if keys[key] != restored_keys[key]} == ignored_keys
    image = torch.rand(1, spec.input.channels, *spec.input.roi_size)
    expected_scores, scores = (compute_probabilities(item, image) for item in (spec, restored_spec))
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)


def test_different_activations_become_part_of_the_network(random_nuclei: ModelSpec, tmp_path: Path) -> None:
    spec = export_and_import(random_nuclei, tmp_path, "bioimageio")
    assert (spec.activation, spec.decoding) == ("none", random_nuclei.decoding)
    image = torch.randn(2, 1, 16, 16, 16)
    expected_scores, scores = (compute_probabilities(item, image) for item in (random_nuclei, spec))
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)


def test_test_image_is_the_middle_of_the_sample(bands: ModelSpec, phantom: Any, tmp_path: Path) -> None:
    sample = Volume.from_array(phantom.image[None])
    path = export(bands, tmp_path, "bioimageio", sample)
    with np.load(path) as arrays:
        assert np.array_equal(arrays["test_input"][0, 0], phantom.image[4:20, 19:51, 24:56])


def test_smaller_samples_are_padded(bands: ModelSpec, phantom: Any, tmp_path: Path) -> None:
    path = export(bands, tmp_path, "bioimageio", Volume.from_array(phantom.image[None, :9, :40, :40]))
    with np.load(path) as arrays:
        assert arrays["test_input"].shape == (1, 1, 16, 32, 32)


@pytest.mark.parametrize("export_format", FORMATS)
def test_torchscript_is_rejected(
    bands: ModelSpec, bands_network: nn.Module, tmp_path: Path, export_format: ExportFormat
) -> None:
    torch.jit.script(bands_network).save(str(tmp_path / "bands.ts"))
    keys = {**list_keys(bands), "input": bands.input.model_dump(mode="json")}
    spec = import_model(tmp_path / "bands.ts", tmp_path / "models", keys, "script", trust=True).spec
    with pytest.raises(UnsupportedPackage, match="script/1 is a TorchScript program"):
        export(spec, tmp_path, export_format)
    assert not list(tmp_path.glob("script.*"))


def test_failed_export_leaves_no_file(bands_content: dict[str, Any], write_model: Any, tmp_path: Path) -> None:
    content = {
        **bands_content,
        "architecture": {
            "name": "UNet",
            "arguments": {**bands_content["architecture"]["arguments"], "in_channels": 2},
        },
        "input": {
            **bands_content["input"],
            "channels": 2,
            "channel_names": ["a", "b"],
            "normalisation": [{"kind": "zscore"}, {"kind": "percentile"}],
        },
    }
    spec = write_model(content)
    with pytest.raises(UnsupportedPackage, match=r"input\.normalisation: the channels have different normalizations"):
        export(spec, tmp_path, "bioimageio")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert read_spec(export_and_import(spec, tmp_path, "onnx").folder).input == spec.input
