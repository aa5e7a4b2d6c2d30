"""Plain ONNX files."""

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
STATED: dict[str, Any] = {
    "input": {"normalisation": {"kind": "range", "low": 0.0, "high": 2800.0}},
    "outputs": ["background", "dim", "bright"],
    "activation": "softmax",
    "decoding": {"kind": "classes"},
}


def test_a_file_says_its_window_and_the_operator_the_rest(bands_network: nn.Module, tmp_path: Path) -> None:
    path = export_onnx(bands_network, tmp_path / "bands.onnx", SHAPE)
    with pytest.raises(UnsupportedPackage, match=r"input\.normalisation: ONNX files do not say it; outputs"):
        import_model(path, tmp_path / "models", {})
    spec = import_model(path, tmp_path / "models", STATED).spec
    assert (spec.name, spec.input.channels, spec.input.roi_size) == ("bands", 1, (16, 32, 32))
    image = torch.rand(2, *SHAPE[1:])
    with torch.inference_mode():
        torch.testing.assert_close(load_network(spec)(image), bands_network(image), rtol=1e-4, atol=1e-4)
    other = {**STATED, "input": {**STATED["input"], "roi_size": [32, 32, 32]}}
    with pytest.raises(BrokenModel, match="fixes its input"):
        import_model(path, tmp_path / "models", other, "other")


def test_tensors_outside_of_the_folder_are_not_taken(bands_network: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    path = export_onnx(bands_network, tmp_path / "package" / "bands.onnx", SHAPE)
    model = onnx.load(path)
    onnx.external_data_helper.convert_model_to_external_data(model, location="bands.data", size_threshold=0)
    onnx.save(model, path)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        assert tensor.data_location == onnx.TensorProto.EXTERNAL
    secret = tmp_path / "secret"
    secret.write_bytes((path.parent / "bands.data").read_bytes())
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedPackage, match=r"\.\./secret: not a file inside the package"):
        import_model(path, tmp_path / "models", STATED)
