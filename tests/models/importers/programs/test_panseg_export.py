"""Tests of importing the bioimage.io packages that PanSeg exports."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from importing import import_model
from paths import ROOT

from service.core.errors import ModelError
from service.models.importers.programs import panseg_export

PACKAGE = ROOT / "tests" / "data" / "plantseg" / "panseg_export"
pytest.importorskip("bioimage_cpp", reason="requires the extra boundaries")


def write_package(folder: Path, description: Any) -> Path:
    shutil.copytree(PACKAGE, folder)
    (folder / "rdf.yaml").write_text(yaml.safe_dump(description))
    return folder


def read_description() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((PACKAGE / "rdf.yaml").read_text())
    return content


def test_export_is_imported_and_its_python_file_is_not_needed(tmp_path: Path) -> None:
    assert not (PACKAGE / "model.py").exists()
    spec, notes = import_model(PACKAGE, tmp_path, {})
    assert spec.network_name == "UNet3D"
    assert spec.activation == "sigmoid"
    assert spec.decoding.kind == "boundaries"
    assert spec.input.normalisation.kind == "zscore"
    assert any("test_in.npy was reproduced" in note for note in notes)
    assert any("voxels of 0.5, 0.25, 0.25 um" in note for note in notes)


def test_description_in_format_0_4_is_imported(tmp_path: Path) -> None:
    description = read_description()
    entry = description["weights"]["pytorch_state_dict"]
    kwargs = entry["architecture"]["kwargs"]
    entry |= {"architecture": "plantseg.training.model:UNet3D", "kwargs": kwargs}
    description["format_version"] = "0.4.10"
    for tensor in (*description["inputs"], *description["outputs"]):
        tensor["axes"] = "bczyx"
        tensor["name"] = tensor.pop("id")
        tensor["shape"] = [1, 1, 16, 32, 32]
        del tensor["test_tensor"]
        for step in tensor.pop("preprocessing", []):
            tensor.setdefault("preprocessing", []).append({"name": step["id"], "kwargs": step.get("kwargs", {})})
    description["inputs"][0]["preprocessing"] = []
    description |= {"test_inputs": ["test_in.npy"], "test_outputs": ["test_out.npy"]}
    spec, _ = import_model(write_package(tmp_path / "package", description), tmp_path / "models", {})
    assert spec.network_name == "UNet3D"
    assert spec.input.roi_size == (16, 32, 32)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("callable", "UNet2D", "the axes are batch, channel, z_in"),
        ("callable", "Evil3D", "the axes are batch, channel, z_in"),
        ("import_from", "evil.module", "the axes are batch, channel, z_in"),
        ("kwargs", {"f_maps": [4, 8], "layer_order": "gcr"}, "must be divisible by num_groups"),
        ("kwargs", {"f_maps": [4, 8], "layer_order": "bce"}, "the output 'boundary' differs from the package's"),
        ("kwargs", {"f_maps": 10**9}, "f_maps must contain numbers"),
        ("kwargs", {"in_channels": "x"}, "in_channels: expected a number"),
        ("kwargs", "f_maps", "kwargs: expected a mapping"),
    ],
)
def test_other_networks_and_arguments_are_rejected(key: str, value: Any, message: str, tmp_path: Path) -> None:
    description = read_description()
    description["weights"]["pytorch_state_dict"]["architecture"][key] = value
    with pytest.raises(ModelError, match=message):
        import_model(write_package(tmp_path / "package", description), tmp_path / "models", {})


@pytest.mark.parametrize("path", ["weights", "inputs", "outputs", "inputs.0.axes", "outputs.0.axes.2", "tags"])
@pytest.mark.parametrize("value", [None, "text", [1], {"a": 1}])
def test_malformed_descriptions_are_rejected_without_other_errors(path: str, value: Any, tmp_path: Path) -> None:
    description = copy.deepcopy(read_description())
    *parents, key = path.split(".")
    inner: Any = description
    for parent in parents:
        inner = inner[int(parent) if parent.isdigit() else parent]
    inner[int(key) if key.isdigit() else key] = value
    package = write_package(tmp_path / "package", description)
    with pytest.raises(ModelError):
        import_model(package, tmp_path / "models", {})


def test_other_packages_are_left_to_the_reader_of_bioimage_io(tmp_path: Path) -> None:
    description = read_description()
    description["weights"]["pytorch_state_dict"]["architecture"] = "monai.networks.nets.UNet"
    assert not panseg_export.is_package(write_package(tmp_path / "package", description))
    assert not panseg_export.is_package(tmp_path)
