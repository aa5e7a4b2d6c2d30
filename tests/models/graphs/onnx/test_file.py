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
    "truths": np.array([True, False]),
    "none": np.zeros((0, 3), np.float32),
    "one": np.array(7),
}
KINDS = {
    "floats": TensorProto.FLOAT,
    "halves": TensorProto.FLOAT16,
    "doubles": TensorProto.DOUBLE,
    "longs": TensorProto.INT64,
}


def written(path: Path, tensors: dict[str, Any], **attributes: object) -> Path:
    node = helper.make_node("Relu", ["x", ""], ["y"], **attributes)
    return write_onnx(path, [node], ["b", 1, 8, None, 8], tensors, 17)


def test_tensors_are_read_however_they_are_stored(tmp_path: Path) -> None:
    listed = {
        f"{n}!": helper.make_tensor(f"{n}!", kind, ARRAYS[n].shape, ARRAYS[n].ravel().tolist())
        for n, kind in KINDS.items()
    }
    model = file.read(written(tmp_path / "m.onnx", ARRAYS | listed))
    for name, expected in (ARRAYS | {f"{name}!": ARRAYS[name] for name in KINDS}).items():
        assert np.array_equal(model.tensors[name], expected)
        assert model.tensors[name].dtype == expected.dtype


def test_calls_have_their_attributes(tmp_path: Path) -> None:
    attributes = {"whole": -3, "real": 0.25, "text": "reflect", "wholes": [1, -2], "reals": [0.5, -1.0]}
    model = file.read(written(tmp_path / "m.onnx", {}, **attributes))
    (node,) = model.nodes
    assert (model.opset, node.operator, node.domain, node.inputs, node.outputs) == (17, "Relu", "", ("x", ""), ("y",))
    assert node.attributes == attributes | {"wholes": (1, -2), "reals": (0.5, -1.0)}
    assert model.inputs == (file.TensorInfo("x", 1, (None, 1, 8, None, 8)),)


def test_tensors_beside_the_file_are_taken_in_and_not_followed(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = written(tmp_path / "m.onnx", {"w": array})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.data", size_threshold=0)
    with pytest.raises(BrokenModel, match="'w' lies in another file"):
        file.read(path)
    asked = []

    def beside(name: str, offset: int, length: int | None) -> bytes:
        asked.append(name)
        return (tmp_path / name).read_bytes()[offset:][:length]

    whole = file.embed_external_data(path.read_bytes(), beside)
    assert asked == ["m.data"]
    assert np.array_equal(file.parse(whole, path).tensors["w"], array)
    (tensor,) = onnx.load_from_string(whole).graph.initializer
    assert np.array_equal(numpy_helper.to_array(tensor), array)


def test_no_tensor_is_read_from_a_place_that_a_file_names(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(bytes(4))
    stored = TensorProto(data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL, name="w")
    stored.external_data.add(key="location", value=str(tmp_path / "w.data"))
    with pytest.raises(BrokenModel, match="'w' lies in another file"):
        file.read(written(tmp_path / "m.onnx", {}, value=stored))


def test_what_no_memory_or_stack_would_hold_is_refused(tmp_path: Path) -> None:
    vast = TensorProto(data_type=TensorProto.FLOAT, dims=[2**40, 2**40], raw_data=b"1234", name="w")
    folded = TensorProto(data_type=TensorProto.FLOAT, dims=[2, -1], raw_data=bytes(16), name="w")
    for tensor in (vast, folded):
        with pytest.raises(BrokenModel, match="cannot be read as ONNX"):
            file.read(written(tmp_path / "m.onnx", {"w": tensor}))
    # A graph in an attribute of a node of a graph, and so on; longer messages than 127 bytes have a longer length.
    nested = b""
    for number in [7, *[1, 5, 6] * 60][::-1]:
        length = len(nested)
        digits = [length & 127 | 128, length >> 7] if length > 127 else [length]
        nested = bytes([number << 3 | 2, *digits]) + nested
    with pytest.raises(BrokenModel, match="cannot be read as ONNX"):
        file.parse(nested, tmp_path / "m.onnx")


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "m.onnx", {})
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BrokenModel, match=r"pip install 'stackseg\[onnx\]'"):
        file.read(path)


def test_files_that_are_damaged_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", {"w": np.ones((3, 4), np.float32)})
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    damaged = [data[:length] for length in range(len(data))]
    for place in range(len(data)):
        damaged.append(data[:place] + bytes([rng.integers(256)]) + data[place + 1 :])
    for other in damaged:
        try:
            file.parse(other, path)
        except BrokenModel:
            refused += 1
    assert refused > len(damaged) / 2
    for other in (b"\xff" * 40, b"# not a model", b""):
        with pytest.raises(BrokenModel):
            file.parse(other, path)
    with pytest.raises(BrokenModel, match="cannot be read"):
        file.read(tmp_path / "missing.onnx")
