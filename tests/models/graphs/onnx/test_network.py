"""ONNX files of others: what is run of them, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from monai.networks.nets.swin_unetr import SwinUNETR
from monai.networks.nets.unetr import UNETR
from monai.networks.nets.vnet import VNet
from onnx import TensorProto, helper
from onnx_export import export_onnx, write_onnx
from torch import nn

from service.core.errors import BrokenModel
from service.core.sections.computing import Engine as EngineSettings
from service.engine.openvino import OpenVinoBackend
from service.engine.prepare import prepare
from service.engine.tuning.plans import EngineConfig
from service.models.architectures import ShuffleUNet
from service.models.graphs.onnx.network import load_onnx

SHAPE = (2, 1, 32, 32, 32)
CPU = torch.device("cpu")
OF_ONE_WINDOW: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "VNet": (lambda: VNet(3, 1, 2), (16, 16, 16)),
    "UNETR": (lambda: UNETR(1, 2, (32, 16, 16), 4, 24, 32, 2), (32, 16, 16)),
    "SwinUNETR": (
        lambda: SwinUNETR(1, 2, depths=(2, 1, 1, 1), num_heads=(1, 1, 2, 2), feature_size=12),
        (64, 32, 32),
    ),
}
OPEN = {"x": {0: "b", 2: "depth", 3: "height", 4: "width"}}


@pytest.mark.parametrize("name", ["VNet", "UNETR", pytest.param("SwinUNETR", marks=pytest.mark.thorough)])
def test_a_network_of_one_window_gives_what_it_gave_before(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, size = OF_ONE_WINDOW[name]
    network, image = make(), torch.rand(1, 1, *size)
    loaded = load_onnx(export_onnx(network, tmp_path / "n.onnx", image.shape, {"x": {0: "b"}}), (1, *size))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(image), network(image), rtol=1e-4, atol=1e-4)


def test_engines_run_it_like_any_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loaded = load_onnx(export_onnx(ShuffleUNet(1, 2, (4, 8)), tmp_path / "n.onnx", SHAPE, OPEN), SHAPE[1:])
    image = torch.rand(SHAPE)
    with torch.inference_mode():
        expected = loaded(image)
        narrow = prepare(loaded, CPU, torch.bfloat16, torch.channels_last_3d)
        torch.testing.assert_close(narrow(image.bfloat16()), expected, rtol=0.1, atol=0.1)
        if OpenVinoBackend().explain_missing() is None:
            module = prepare(loaded, CPU, torch.float32, torch.contiguous_format)
            config = EngineConfig("openvino", "fp32", "contiguous", len(image))
            other = OpenVinoBackend().build(module, image, config, EngineSettings())
            torch.testing.assert_close(other(image), expected, rtol=1e-3, atol=1e-3)


def test_a_file_for_one_window_takes_no_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loaded = load_onnx(export_onnx(ShuffleUNet(1, 2, (4, 8)), tmp_path / "n.onnx", (1, *SHAPE[1:])), SHAPE[1:])
    with pytest.raises(ValueError, match="fixes its input"):
        loaded(torch.rand(1, 1, 32, 32, 16))


RELU = [helper.make_node("Relu", ["x"], ["y"])]
FLAT = helper.make_node("Conv", ["x", "w"], ["y"])
VOLUME = ["b", 1, 8, 8, 8]


@pytest.mark.parametrize(
    ("shape", "nodes", "more", "word"),
    [
        (["b", 1, 8, 8], RELU, {}, "graph.input x: 4 axes"),
        ([4, 1, 8, 8, 8], RELU, {}, "graph.input x: a batch of 4"),
        (VOLUME, RELU, {"dtype": TensorProto.INT64}, "graph.input x: data type"),
        (VOLUME, RELU, {"also": [helper.make_tensor_value_info("t", TensorProto.FLOAT, [1])]}, "takes 2 inputs"),
        (VOLUME, [helper.make_node("Custom", ["x"], ["y"], domain="com.acme")], {}, "Custom of com.acme"),
        (VOLUME, [helper.make_node("Loop", ["x"], ["y"])], {}, "Loop is not on the list"),
        (VOLUME, [helper.make_node("Relu", ["z"], ["y"])], {}, "Relu: z: nothing makes it"),
        (VOLUME, [helper.make_node("Relu", ["x"], ["z"])], {}, "graph.output y: nothing makes it"),
        (VOLUME, [FLAT], {"stored": {"w": np.zeros((2, 1, 3, 3), np.float32)}}, "Conv: W: 2 axes"),
        (VOLUME, [helper.make_node("Conv", ["x", "x"], ["y"])], {}, "Conv: input 1"),
        (VOLUME, [helper.make_node("Resize", ["x", "", "w"], ["y"], mode="cubic")], {}, "Resize: mode: cubic"),
        (VOLUME, [helper.make_node("Softmax", ["x"], ["y"], depth=3)], {}, "Softmax: depth"),
    ],
)
def test_what_cannot_be_honoured_is_named(
    tmp_path: Path, shape: list[Any], nodes: list[onnx.NodeProto], more: dict[str, Any], word: str
) -> None:
    with pytest.raises(BrokenModel, match=word):
        load_onnx(write_onnx(tmp_path / "m.onnx", nodes, shape, **more), (1, 8, 8, 8))


def test_a_graph_whose_shapes_are_not_known_before_it_runs_cannot_take_all_memory(tmp_path: Path) -> None:
    """Numbers of the shape of the image become a tensor on the CPU, which no tensor without numbers goes with."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Reshape", ["sizes", "five"], ["row"]),
        helper.make_node("Cast", ["row"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["floats"], ["factor"], keepdims=1),
        helper.make_node("Mul", ["x", "factor"], ["grown"]),
        helper.make_node("Pad", ["grown", "pads"], ["vast"]),
        helper.make_node("GlobalMaxPool", ["vast"], ["y"]),
    ]
    stored = {"five": [1, 1, 1, 1, 5], "pads": [0] * 7 + [2**12] * 3}
    path = write_onnx(tmp_path / "vast.onnx", nodes, ["b", 1, "z", "y", "w"], stored, 13)
    with pytest.raises(BrokenModel, match=r"makes a value of \(1, 1, 4112, 4128, 4128\), too large"):
        load_onnx(path, (1, 16, 32, 32))


@pytest.mark.parametrize(
    ("constant", "reason"), [(True, "constants have more than 536870912 elements"), (False, "would exist at a time")]
)
def test_a_few_nodes_cannot_take_all_memory_together(tmp_path: Path, *, constant: bool, reason: str) -> None:
    """Each of their values is allowed."""
    nodes = [helper.make_node("Expand", ["one" if constant else "x", "size"], [f"v{n}"]) for n in range(6)]
    nodes.append(helper.make_node("Sum", ["x"] if constant else [f"v{n}" for n in range(6)], ["y"]))
    size = [1, 1, 512, 512, 1024] if constant else [1, 4, 1024, 512, 1024]
    stored = {"one": np.ones((1, 1, 1, 1, 1), np.float32), "size": size}
    with pytest.raises(BrokenModel, match=reason):
        load_onnx(write_onnx(tmp_path / "m.onnx", nodes, ["b", 1, "z", "y", "w"], stored, 13), (1, 1, 1, 1))
