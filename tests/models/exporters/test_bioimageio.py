"""Tests of exported bioimage.io packages, which `bioimageio.spec` validates and, if available, `bioimageio.core` runs.

Set BIOIMAGEIO_PYTHON to the interpreter of the environment that `scripts/fixtures/bioimageio_core.py` describes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from bioimageio.spec import InvalidDescr, ValidationContext, build_description
from importing import import_model
from paths import ROOT
from torch import nn

from service.core.errors import UnsupportedPackage
from service.core.types import Selection, Volume
from service.formats import stack_reader
from service.inference.preprocessing.resample import prepare_tensor
from service.models.exporters.export_model import ExportRequest, export_model
from service.models.loader import load_network
from service.models.repository import read_spec
from service.models.spec import Citation, ModelSpec

BIOIMAGEIO_PYTHON = os.environ.get("BIOIMAGEIO_PYTHON")
SCRIPT = ROOT / "scripts" / "fixtures" / "bioimageio_core.py"
CREDITS = {"authors": ("A. Tester",), "cite": (Citation(text="Fake", doi="10.1234/fake"), Citation(text="Thesis"))}


def export(spec: ModelSpec, path: Path, sample: Volume | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Write a package. Return its description and the notes."""
    notes = export_model(spec, ExportRequest(path, "bioimageio", sample), prepare_tensor)
    with zipfile.ZipFile(path) as archive:
        return yaml.safe_load(archive.read("rdf.yaml")), notes


def assert_is_valid(path: Path) -> None:
    """Validate a description. bioimageio.spec does not close files that it reads, so it does not check them here."""
    folder = unpack_and_change(path, lambda _: None)
    with ValidationContext(root=folder, perform_io_checks=False):
        description = build_description(yaml.safe_load((folder / "rdf.yaml").read_text()))
    assert not isinstance(description, InvalidDescr), description.validation_summary.format()


def unpack_and_change(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Unpack a package, and change its description. Return the folder."""
    folder = path.with_suffix("")
    shutil.unpack_archive(path, folder)
    description = yaml.safe_load((folder / "rdf.yaml").read_text())
    change(description)
    (folder / "rdf.yaml").write_text(yaml.safe_dump(description))
    return folder


def test_package_is_valid_and_complete(bands: ModelSpec, tmp_path: Path) -> None:
    description, notes = export(bands.model_copy(update=CREDITS), tmp_path / "bands.zip")
    assert_is_valid(tmp_path / "bands.zip")
    assert (description["license"], description["version"]) == ("Apache-2.0", "1")
    assert description["authors"] == [{"name": "A. Tester"}]
    assert description["cite"] == [{"text": "Fake", "doi": "10.1234/fake"}]
    channels = [description[side][0]["axes"][1]["channel_names"] for side in ("inputs", "outputs")]
    assert channels == [["signal"], ["background", "dim", "bright"]]
    assert [axis["size"] for axis in description["inputs"][0]["axes"][2:]] == [16, 32, 32]
    assert not any("--author" in note for note in notes)
    restored = import_model(tmp_path / "bands.zip", tmp_path / "models", {}).spec
    assert (restored.authors, restored.cite) == (CREDITS["authors"], CREDITS["cite"][:1])


def test_bundled_model_is_exported_with_its_card(tmp_path: Path) -> None:
    spec = read_spec(ROOT / "models" / "tissue")
    assert spec.sample is not None
    sample = stack_reader.read(spec.folder / spec.sample.input, Selection(), 2**30)
    path = tmp_path / "tissue.zip"
    description, notes = export(spec, path, sample)
    assert_is_valid(path)
    assert any("use --cite." in note for note in notes)
    assert description["authors"] == [{"name": "StackSeg maintainers"}]
    assert description["inputs"][0]["axes"][2] == {
        "type": "space",
        "id": "z",
        "size": {"min": 64, "step": 16},
        "scale": 1.0,
    }
    with zipfile.ZipFile(path) as archive:
        assert archive.read("README.md") == (spec.folder / "README.md").read_bytes()
        assert archive.read("example.png") == (spec.folder / "example.png").read_bytes()
    if BIOIMAGEIO_PYTHON is not None:
        check_with_bioimageio_core(spec, path, tmp_path)


def check_with_bioimageio_core(spec: ModelSpec, path: Path, folder: Path) -> None:
    """Compare the probabilities of bioimageio.core for the test input with those of the original model."""
    assert BIOIMAGEIO_PYTHON is not None
    command = [BIOIMAGEIO_PYTHON, str(SCRIPT), "predict", str(path), str(folder / "core.npy")]
    subprocess.run(command, check=True, cwd=folder)
    with np.load(path) as arrays:
        image = arrays["test_input"]
    with torch.inference_mode():
        scores = load_network(spec)(prepare_tensor(Volume.from_array(image[0]), spec))
    probabilities = torch.softmax(scores, 1) if spec.activation == "softmax" else torch.sigmoid(scores)
    assert np.abs(np.load(folder / "core.npy") - probabilities.numpy()).max() < 1e-3


@pytest.mark.skipif(BIOIMAGEIO_PYTHON is None, reason="needs bioimageio.core")
@pytest.mark.parametrize("name", ["nuclei", "embryos", "membranes"])
def test_bioimageio_core_computes_the_same_probabilities(tmp_path: Path, name: str) -> None:
    spec = read_spec(ROOT / "models" / name)
    assert spec.sample is not None
    sample = stack_reader.read(spec.folder / spec.sample.input, Selection(), 2**30)
    export(spec, tmp_path / "model.zip", sample)
    check_with_bioimageio_core(spec, tmp_path / "model.zip", tmp_path)


def test_network_of_monai_is_stored_as_state_dict_as_well(
    bands: ModelSpec, bands_network: nn.Module, tmp_path: Path
) -> None:
    description, _ = export(bands, tmp_path / "bands.zip")
    weights = description["weights"]
    assert weights["onnx"]["parent"] == "pytorch_state_dict"
    assert weights["pytorch_state_dict"]["architecture"]["callable"] == "UNet"
    restored_spec = import_model(tmp_path / "bands.zip", tmp_path / "models", {}).spec
    assert restored_spec.architecture == bands.architecture
    for name, tensor in load_network(restored_spec).state_dict().items():
        assert torch.equal(tensor, bands_network.state_dict()[name])


def test_other_licences_and_versions_are_only_stored_for_stackseg(
    bands_content: dict[str, Any], write_model: Any, tmp_path: Path
) -> None:
    spec = write_model({**bands_content, "name": "abc", "version": "v2-beta", "licence": "Ask the author."})
    description, notes = export(spec, tmp_path / "abc.zip")
    assert "license" not in description
    assert "version" not in description
    assert any("'Ask the author.' is not a common SPDX identifier" in note for note in notes)
    assert_is_valid(tmp_path / "abc.zip")
    restored_spec = import_model(tmp_path / "abc.zip", tmp_path / "imported", {}).spec
    assert (restored_spec.identifier, restored_spec.licence) == (spec.identifier, spec.licence)


def test_texts_of_the_description_have_precedence(bands: ModelSpec, tmp_path: Path) -> None:
    export(bands, tmp_path / "bands.zip")
    folder = unpack_and_change(
        tmp_path / "bands.zip", lambda rdf: rdf.update({"description": "Other.", "license": "MIT"})
    )
    spec = import_model(folder, tmp_path / "models", {}).spec
    assert (spec.summary, spec.licence, spec.training_data) == ("Other.", "MIT", bands.training_data)


@pytest.mark.parametrize(
    ("side", "steps", "key"),
    [
        ("inputs", {"preprocessing": [{"id": "zero_mean_unit_variance"}]}, "input.normalisation"),
        ("outputs", {"postprocessing": [{"id": "sigmoid"}]}, "activation"),
    ],
)
def test_changed_steps_are_rejected(
    bands: ModelSpec, tmp_path: Path, side: str, steps: dict[str, Any], key: str
) -> None:
    export(bands, tmp_path / "bands.zip")
    folder = unpack_and_change(tmp_path / "bands.zip", lambda rdf: rdf[side][0].update(steps))
    with pytest.raises(UnsupportedPackage, match=rf"config\.stackseg\.{key}: the stored value does not match"):
        import_model(folder, tmp_path / "models", {})
