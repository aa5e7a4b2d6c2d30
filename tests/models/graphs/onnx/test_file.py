from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_export import write_onnx

from service.core.errors import BrokenModel
from service.models.graphs.onnx import file

ARRAYS = {
    "floats": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "halves": np.array([0.5, -2], np.float16),
    "doubles": np.array([1e-300, 3.0]),
    "longs": np.array([-1, 2**62]),
    "bytes": np.array([[0, 255]], np.uint8),
    "booleans": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(7),
}
DATA_TYPES = {
    "floats": TensorProto.FLOAT,
    "halves": TensorProto.FLOAT16,
    "doubles": TensorProto.DOUBLE,
    "longs": TensorProto.INT64,
}


def write_file(path: Path, tensors: dict[str, Any], **attributes: object) -> Path:
    node = helper.make_node("Relu", ["x", ""], ["y"], **attributes)
    return write_onnx(path, [node], ["b", 1, 8, None, 8], tensors, 17)


def test_tensors_of_all_types_are_read_from_raw_and_typed_data(tmp_path: Path) -> None:
    typed_arrays = {
        f"{n}!": helper.make_tensor(f"{n}!", data_type, ARRAYS[n].shape, ARRAYS[n].ravel().tolist())
        for n, data_type in DATA_TYPES.items()
    }
    model = file.read_model(write_file(tmp_path / "m.onnx", ARRAYS | typed_arrays))
    for name, expected in (ARRAYS | {f"{name}!": ARRAYS[name] for name in DATA_TYPES}).items():
        assert np.array_equal(model.tensors[name], expected)
        assert model.tensors[name].dtype == expected.dtype


def test_attributes_of_nodes_are_read(tmp_path: Path) -> None:
    attributes = {"int": -3, "float": 0.25, "text": "reflect", "ints": [1, -2], "floats": [0.5, -1.0]}
    model = file.read_model(write_file(tmp_path / "m.onnx", {}, **attributes))
    (node,) = model.nodes
    assert (model.opset, node.operator, node.domain, node.inputs, node.outputs) == (17, "Relu", "", ("x", ""), ("y",))
    assert node.attributes == attributes | {"ints": (1, -2), "floats": (0.5, -1.0)}
    assert model.inputs == (file.TensorInfo("x", 1, (None, 1, 8, None, 8)),)


def test_external_tensors_are_embedded_but_never_read_implicitly(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write_file(tmp_path / "m.onnx", {"w": array})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.data", size_threshold=0)
    with pytest.raises(BrokenModel, match="'w' is stored in another file"):
        file.read_model(path)
    requested_files = []

    def read_part(name: str, offset: int, length: int | None) -> bytes:
        requested_files.append(name)
        return (tmp_path / name).read_bytes()[offset:][:length]

    embedded_model = file.embed_external_data(path.read_bytes(), read_part)
    assert requested_files == ["m.data"]
    assert np.array_equal(file.parse_model(embedded_model, path).tensors["w"], array)
    (tensor,) = onnx.load_from_string(embedded_model).graph.initializer
    assert np.array_equal(numpy_helper.to_array(tensor), array)


def test_external_tensors_in_attributes_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(bytes(4))
    external_tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL, name="w")
    external_tensor.external_data.add(key="location", value=str(tmp_path / "w.data"))
    with pytest.raises(BrokenModel, match="'w' is stored in another file"):
        file.read_model(write_file(tmp_path / "m.onnx", {}, value=external_tensor))


def test_huge_tensors_and_deeply_nested_graphs_are_rejected(tmp_path: Path) -> None:
    huge_tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[2**40, 2**40], raw_data=b"1234", name="w")
    negative_tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[2, -1], raw_data=bytes(16), name="w")
    for tensor in (huge_tensor, negative_tensor):
        with pytest.raises(BrokenModel, match="cannot be read as ONNX"):
            file.read_model(write_file(tmp_path / "m.onnx", {"w": tensor}))
    # Nest each graph in an attribute of a node of the next one. The length of messages over 127 bytes takes two bytes.
    nested_graphs = b""
    for number in [7, *[1, 5, 6] * 60][::-1]:
        length = len(nested_graphs)
        digits = [length & 127 | 128, length >> 7] if length > 127 else [length]
        nested_graphs = bytes([number << 3 | 2, *digits]) + nested_graphs
    with pytest.raises(BrokenModel, match="cannot be read as ONNX"):
        file.parse_model(nested_graphs, tmp_path / "m.onnx")


def test_missing_onnx_raises_an_installation_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "m.onnx", {})
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BrokenModel, match=r"pip install 'stackseg\[onnx\]'"):
        file.read_model(path)


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.onnx", {"w": np.ones((3, 4), np.float32)})
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    rejected_count = 0
    damaged_contents = [data[:length] for length in range(len(data))]
    for index in range(len(data)):
        damaged_contents.append(data[:index] + bytes([rng.integers(256)]) + data[index + 1 :])
    for content in damaged_contents:
        try:
            file.parse_model(content, path)
        except BrokenModel:
            rejected_count += 1
    assert rejected_count > len(damaged_contents) / 2
    for content in (b"\xff" * 40, b"# not a model", b""):
        with pytest.raises(BrokenModel):
            file.parse_model(content, path)
    with pytest.raises(BrokenModel, match="cannot be read"):
        file.read_model(tmp_path / "missing.onnx")
