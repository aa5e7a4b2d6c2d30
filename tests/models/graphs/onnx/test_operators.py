"""Tests that every operator gives the same results as ONNX's reference implementation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_export import write_onnx

from service.core.errors import BrokenModel
from service.models.graphs.onnx.elementwise import UnsupportedCall
from service.models.graphs.onnx.network import load_onnx

SHAPE = (2, 4, 6, 6, 8)
INTS, FLOATS = np.int64, np.float32


def write_model(
    path: Path, nodes: list[onnx.NodeProto], stored_tensors: dict[str, np.ndarray], opset: int = 18
) -> Path:
    return write_onnx(path, nodes, ["b", *SHAPE[1:]], stored_tensors, opset)


def assert_matches_reference(path: Path) -> None:
    image = np.random.default_rng(0).normal(size=SHAPE).astype(FLOATS)
    (expected,) = ReferenceEvaluator(onnx.load(path)).run(None, {"x": image})
    with torch.inference_mode():
        actual = load_onnx(path, SHAPE[1:])(torch.from_numpy(image))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-5)


UNARY_OPERATORS = (
    "Relu Sigmoid Tanh Exp Abs Neg Floor Ceil Round Softplus HardSwish Mish Identity Dropout LeakyRelu Elu HardSigmoid"
)


@pytest.mark.parametrize("name", UNARY_OPERATORS.split())
def test_elementwise_functions_match_the_reference(name: str, tmp_path: Path) -> None:
    assert_matches_reference(write_model(tmp_path / "m.onnx", [helper.make_node(name, ["x"], ["y"])], {}))


def make_case(
    operator: str, inputs: dict[str, Any] | None = None, attributes: dict[str, Any] | None = None, opset: int = 18
) -> tuple[str, dict[str, Any], dict[str, Any], int]:
    return operator, inputs or {}, attributes or {}, opset


CASES = {
    "prelu": make_case("PRelu", {"slope": np.arange(4, dtype=FLOATS).reshape(4, 1, 1, 1)}),
    "clip": make_case("Clip", {"low": FLOATS(-0.5), "high": FLOATS(0.25)}),
    "clip without lower limit": make_case("Clip", {"": None, "high": FLOATS(0.25)}),
    "clip before opset 11": make_case("Clip", {}, {"min": -0.1, "max": 0.2}, 10),
    "softmax": make_case("Softmax", {}, {"axis": 1}),
    "add": make_case("Add", {"b": np.arange(8, dtype=FLOATS)}),
    "divide": make_case("Div", {"b": FLOATS(3)}),
    "power": make_case("Pow", {"b": FLOATS(2)}),
    "maximum": make_case("Max", {"b": FLOATS(0.3)}),
    "minimum": make_case("Min", {"b": FLOATS(0.3)}),
    "transpose": make_case("Transpose", {}, {"perm": [0, 4, 1, 3, 2]}),
    "flatten": make_case("Flatten", {}, {"axis": 2}),
    "reshape": make_case("Reshape", {"s": np.array([0, 2, -1, 8], INTS)}),
    "unsqueeze": make_case("Unsqueeze", {"a": np.array([1, -1], INTS)}),
    "unsqueeze before opset 13": make_case("Unsqueeze", {}, {"axes": [2]}, 11),
    "slice": make_case(
        "Slice", {"s": np.array([1, -3], INTS), "e": np.array([2**62, -1], INTS), "a": np.array([2, -1], INTS)}
    ),
    "slice backwards": make_case(
        "Slice", {"s": np.array([-1], INTS), "e": np.array([-(2**62)], INTS), "a": np.array([3]), "t": np.array([-2])}
    ),
    "gather": make_case("Gather", {"i": np.array([3, -4, 1], INTS)}, {"axis": 1}),
    "gather one index": make_case("Gather", {"i": np.array(-1, INTS)}, {"axis": 2}),
    "expand": make_case("Expand", {"s": np.array([3, 1, 1, 1, 1, 1], INTS)}),
    "tile": make_case("Tile", {"r": np.array([1, 2, 1, 1, 3], INTS)}),
    "einsum": make_case(
        "Einsum", {"w": np.linspace(-1, 1, 24, dtype=FLOATS).reshape(8, 3)}, {"equation": "bczyx,xk->bkczy"}
    ),
    "gather nd": make_case("GatherND", {"i": np.array([[0, 3], [1, -1]], INTS)}),
    "scatter nd": make_case("ScatterND", {"i": np.array([[1, 3], [0, 0]], INTS), "u": np.ones((2, 6, 6, 8), FLOATS)}),
    "remainder": make_case("Mod", {"b": FLOATS(0.3)}, {"fmod": 1}),
    "gather 2D indices": make_case("Gather", {"i": np.array([[3, -4], [1, 0]], INTS)}, {"axis": -1}),
    "pad": make_case("Pad", {"p": np.array([0, 0, 1, 0, 2, 0, 1, 0, 3, 0], INTS), "v": FLOATS(0.5)}),
    "pad by reflection": make_case("Pad", {"p": np.array([0, 0, 1, 0, 2, 0, 0, 0, 3, 0], INTS)}, {"mode": "reflect"}),
    "pad with edges": make_case("Pad", {"p": np.array([0, 0, 1, 0, 2, 0, 0, 0, 3, 0], INTS)}, {"mode": "edge"}),
    "resize to nearest": make_case(
        "Resize",
        {"": None, "s": np.array([1, 1, 2, 2, 3], FLOATS)},
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    "resize by interpolation": make_case(
        "Resize", {"": None, "s": np.array([1, 1, 2, 0.5, 1.5], FLOATS)}, {"mode": "linear"}
    ),
    "resize to a size": make_case(
        "Resize",
        {"": None, " ": None, "s": np.array([2, 4, 11, 12, 15], INTS)},
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    ),
    "max pooling": make_case(
        "MaxPool", {}, {"kernel_shape": [2, 2, 3], "strides": [2, 1, 2], "pads": [1, 0, 0, 0, 0, 2]}
    ),
    # The last window along x would start in the padding, so it is left out.
    "max pooling with ceil mode": make_case(
        "MaxPool",
        {},
        {"kernel_shape": [3, 1, 2], "strides": [2, 1, 3], "pads": [1, 0, 1, 1, 0, 1], "ceil_mode": 1},
        22,
    ),
    "average pooling": make_case("AveragePool", {}, {"kernel_shape": [3, 3, 3], "strides": [2, 2, 2], "pads": [1] * 6}),
    "global average pooling": make_case("GlobalAveragePool"),
    "mean": make_case("ReduceMean", {"a": np.array([2, -1], INTS)}, {"keepdims": 0}),
    "mean before opset 18": make_case("ReduceMean", {}, {"axes": [1]}, 13),
    "instance norm": make_case("InstanceNormalization", {"s": np.arange(4, dtype=FLOATS), "b": np.ones(4, FLOATS)}),
    "layer norm": make_case("LayerNormalization", {"s": np.arange(8, dtype=FLOATS), "b": np.ones(8, FLOATS)}),
    "group norm": make_case(
        "GroupNormalization", {"s": np.arange(4, dtype=FLOATS), "b": np.ones(4, FLOATS)}, {"num_groups": 2}, 21
    ),
    "batch norm": make_case(
        "BatchNormalization",
        {name: np.arange(1, 5, dtype=FLOATS) * factor for name, factor in zip("sbmv", (1, 2, 0.1, 0.5), strict=True)},
    ),
    "convolution": make_case(
        "Conv",
        {"w": np.linspace(-1, 1, 6 * 2 * 27, dtype=FLOATS).reshape(6, 2, 3, 3, 3), "b": np.arange(6, dtype=FLOATS)},
        {"group": 2, "strides": [1, 2, 2], "pads": [1] * 6},
    ),
    "convolution with asymmetric padding": make_case(
        "Conv", {"w": np.linspace(-1, 1, 4 * 8, dtype=FLOATS).reshape(1, 4, 2, 2, 2)}, {"auto_pad": "SAME_UPPER"}
    ),
    "transposed convolution": make_case(
        "ConvTranspose",
        {"w": np.linspace(-1, 1, 4 * 3 * 27, dtype=FLOATS).reshape(4, 3, 3, 3, 3)},
        {"strides": [2, 2, 2], "pads": [1] * 6, "output_padding": [1, 1, 1]},
    ),
    "matrix product": make_case("MatMul", {"w": np.linspace(-1, 1, 24, dtype=FLOATS).reshape(8, 3)}),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_with_attributes_match_the_reference(name: str, tmp_path: Path) -> None:
    operator, inputs, attributes, opset = CASES[name]
    stored_tensors = {key: np.asarray(value) for key, value in inputs.items() if value is not None}
    node = helper.make_node(operator, ["x", *(key.strip() for key in inputs)], ["y"], **attributes)
    assert_matches_reference(write_model(tmp_path / "m.onnx", [node], stored_tensors, opset))


def test_softmax_before_opset_13_covers_all_following_axes(tmp_path: Path) -> None:
    loaded_network = load_onnx(
        write_model(tmp_path / "m.onnx", [helper.make_node("Softmax", ["x"], ["y"], axis=2)], {}, 11), SHAPE[1:]
    )
    assert torch.allclose(loaded_network(torch.rand(SHAPE)).sum((2, 3, 4)), torch.ones(SHAPE[:2]))


def test_computed_sizes_match_the_reference(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["width"]),
        helper.make_node("Div", ["width", "two"], ["half"]),
        helper.make_node("Mul", ["half", "two"], ["even"]),
        helper.make_node("Unsqueeze", ["even", "zero"], ["row"]),
        helper.make_node("Slice", ["shape", "zero", "three"], ["head"]),
        helper.make_node("Concat", ["head", "rest", "row"], ["sizes"], axis=0),
        helper.make_node("Equal", ["sizes", "rest"], ["is_rest"]),
        helper.make_node("Where", ["is_rest", "rest", "sizes"], ["target"]),
        helper.make_node("Reshape", ["x", "target"], ["reshaped"]),
        helper.make_node("Cast", ["half"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["reshaped", "factor"], ["y"]),
    ]
    stored_tensors = {
        "last": np.array(4),
        "two": np.array(2),
        "zero": np.array([0]),
        "three": np.array([3]),
        "rest": np.array([-1]),
    }
    assert_matches_reference(write_model(tmp_path / "m.onnx", nodes, stored_tensors))


HUGE_SHAPE = np.array([2**12] * 3, INTS)


@pytest.mark.parametrize(
    ("name", "inputs", "attributes"),
    [
        ("Tile", ["x", "t"], {}),
        ("Expand", ["x", "s"], {}),
        ("ConstantOfShape", ["s"], {}),
        ("ConstantOfShape", ["l"], {}),
        ("Range", ["0", "last", "1"], {}),
        ("Einsum", ["w", "w", "w"], {"equation": "i,j,k->ijk"}),
        ("Einsum", ["x", "w", "w", "w"], {"equation": "...,i,j,k->...ijk"}),
    ],
)
def test_operators_with_huge_results_are_rejected(
    name: str, inputs: list[str], attributes: dict[str, Any], tmp_path: Path
) -> None:
    stored_tensors = {
        "s": HUGE_SHAPE,
        "t": np.array([2**9, 2**9, 2**9, 1, 1], INTS),
        "l": np.array([2**40], INTS),
        "w": np.ones(2**12, FLOATS),
        "0": np.array(0),
        "last": np.array(2**40),
        "1": np.array(1),
    }
    nodes = [helper.make_node(name, inputs, ["v"], **attributes), helper.make_node("Add", ["x", "v"], ["y"])]
    with pytest.raises((BrokenModel, UnsupportedCall), match=r"more than \d+ elements|limit of \d+ elements"):
        load_onnx(write_model(tmp_path / "m.onnx", nodes, stored_tensors), SHAPE[1:])(torch.rand(SHAPE))


@pytest.mark.parametrize("name", ["Pow", "Mul", "Concat"])
def test_exponentially_growing_numbers_are_rejected(name: str, tmp_path: Path) -> None:
    attributes = {"axis": 0} if name == "Concat" else {}
    nodes = [helper.make_node(name, [f"s{i}", f"s{i}"], [f"s{i + 1}"], **attributes) for i in range(64)]
    nodes += [helper.make_node("ReduceProd", ["s64"], ["p"]), helper.make_node("Add", ["x", "p"], ["y"])]
    with pytest.raises((BrokenModel, UnsupportedCall), match=r"bits|elements"):
        load_onnx(write_model(tmp_path / "m.onnx", nodes, {"s0": np.array([9, 9], INTS)}), SHAPE[1:])
    nodes.insert(0, helper.make_node("Shape", ["x"], ["s0"]))
    with pytest.raises((BrokenModel, UnsupportedCall, OverflowError), match=r"bits|elements"):
        load_onnx(write_model(tmp_path / "m.onnx", nodes, {}), SHAPE[1:])(torch.rand(SHAPE))


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Div", ["one", "zero"], ["v"]),
        helper.make_node("Cast", ["infinity"], ["v"], to=TensorProto.INT64),
        helper.make_node("Transpose", [""], ["v"]),
    ],
    ids=lambda node: str(node.op_type),
)
def test_constants_that_cannot_be_computed_are_rejected(node: onnx.NodeProto, tmp_path: Path) -> None:
    stored_tensors = {"one": np.array(1), "zero": np.array(0), "infinity": np.array(math.inf, FLOATS)}
    nodes = [node, helper.make_node("Add", ["x", "v"], ["y"])]
    with pytest.raises(BrokenModel, match="cannot be converted to a network"):
        load_onnx(write_model(tmp_path / "m.onnx", nodes, stored_tensors), SHAPE[1:])


def test_strings_in_a_file_do_not_become_code(tmp_path: Path) -> None:
    code = "__import__('os').abort()"
    nodes = [helper.make_node("Relu", ["x"], [code]), helper.make_node("Elu", [code], ["y"], alpha=-math.inf)]
    image = torch.rand(SHAPE)
    assert torch.equal(load_onnx(write_model(tmp_path / "m.onnx", nodes, {}), SHAPE[1:])(image), image)
    for node in (
        helper.make_node("Gemm", ["x", "x"], ["y"], **{f"alpha={code}, beta": 1.0}),
        helper.make_node("Pad", ["x", "p"], ["y"], mode=f"'+{code}+'"),
    ):
        with pytest.raises((BrokenModel, ValueError)):
            load_onnx(write_model(tmp_path / "m.onnx", [node], {"p": np.zeros(10, INTS)}), SHAPE[1:])(image)


def test_split_matches_the_reference(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=1),
        helper.make_node("ReduceSum", ["b", "one"], ["c"]),
        helper.make_node("Sub", ["a", "c"], ["y"]),
    ]
    assert_matches_reference(write_model(tmp_path / "m.onnx", nodes, {"sizes": np.array([1, 3]), "one": np.array([1])}))
