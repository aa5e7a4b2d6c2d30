"""Tests of importing ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from importing import import_model
from onnx_export import export_onnx
from torch import nn

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.loader import load_network

SHAPE = (1, 1, 16, 32, 32)
OVERRIDES: dict[str, Any] = {
    "input": {"normalisation": {"kind": "range", "low": 0.0, "high": 2800.0}},
    "outputs": ["background", "dim", "bright"],
    "activation": "softmax",
    "decoding": {"kind": "classes"},
}


def test_window_is_read_from_the_file_and_other_keys_are_required(bands_network: nn.Module, tmp_path: Path) -> None:
    path = export_onnx(bands_network, tmp_path / "bands.onnx", SHAPE)
    with pytest.raises(UnsupportedPackage, match=r"input\.normalisation; outputs"):
        import_model(path, tmp_path / "models", {})
    spec = import_model(path, tmp_path / "models", OVERRIDES).spec
    assert (spec.name, spec.input.channels, spec.input.roi_size) == ("bands", 1, (16, 32, 32))
    image = torch.rand(2, *SHAPE[1:])
    with torch.inference_mode():
        torch.testing.assert_close(load_network(spec)(image), bands_network(image), rtol=1e-4, atol=1e-4)
    other_overrides = {**OVERRIDES, "input": {**OVERRIDES["input"], "roi_size": [32, 32, 32]}}
    with pytest.raises(BrokenModel, match="accepts only inputs of shape"):
        import_model(path, tmp_path / "models", other_overrides, "other")


def move_tensors(path: Path, location: str, **position: int) -> None:
    """Change an ONNX file so that all its tensors are stored in another file."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, location, **position)
        tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("location", ["../secret", "link", "{folder}/secret", "file:../secret"])
def test_tensors_outside_the_folder_are_rejected(bands_network: nn.Module, tmp_path: Path, location: str) -> None:
    (tmp_path / "package").mkdir()
    path = export_onnx(bands_network, tmp_path / "package" / "bands.onnx", SHAPE)
    (tmp_path / "secret").write_bytes(bytes(2**20))
    (path.parent / "link").symlink_to(tmp_path / "secret")
    move_tensors(path, location.format(folder=tmp_path))
    with pytest.raises(UnsupportedPackage, match="not a file inside the package"):
        import_model(path, tmp_path / "models", OVERRIDES)


def test_huge_length_does_not_allocate_memory(bands_network: nn.Module, tmp_path: Path) -> None:
    path = export_onnx(bands_network, tmp_path / "bands.onnx", SHAPE)
    (tmp_path / "bands.data").write_bytes(bytes(8))
    move_tensors(path, "bands.data", offset=4, length=2**60)
    with pytest.raises(BrokenModel, match="cannot be read as ONNX"):
        import_model(path, tmp_path / "models", OVERRIDES)
