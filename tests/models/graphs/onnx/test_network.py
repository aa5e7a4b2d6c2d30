"""Tests of networks from untrusted ONNX files, and of the checks that reject files before anything runs."""

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
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.models.graphs.onnx.network import load_onnx

SHAPE = (2, 1, 32, 32, 32)
CPU = torch.device("cpu")
FIXED_SIZE_NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "VNet": (lambda: VNet(3, 1, 2), (16, 16, 16)),
    "UNETR": (lambda: UNETR(1, 2, (32, 16, 16), 4, 24, 32, 2), (32, 16, 16)),
    "SwinUNETR": (
        lambda: SwinUNETR(1, 2, depths=(2, 1, 1, 1), num_heads=(1, 1, 2, 2), feature_size=12),
        (64, 32, 32),
    ),
}
DYNAMIC_AXES = {"x": {0: "b", 2: "depth", 3: "height", 4: "width"}}


@pytest.mark.parametrize("name", ["VNet", "UNETR", pytest.param("SwinUNETR", marks=pytest.mark.thorough)])
def test_loaded_fixed_size_network_gives_the_scores_of_the_original(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, size = FIXED_SIZE_NETWORKS[name]
    network, image = make(), torch.rand(1, 1, *size)
    loaded_network = load_onnx(export_onnx(network, tmp_path / "n.onnx", image.shape, {"x": {0: "b"}}), (1, *size))
    with torch.inference_mode():
        torch.testing.assert_close(loaded_network(image), network(image), rtol=1e-4, atol=1e-4)


def test_engines_can_run_loaded_networks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loaded_network = load_onnx(
        export_onnx(ShuffleUNet(1, 2, (4, 8)), tmp_path / "n.onnx", SHAPE, DYNAMIC_AXES), SHAPE[1:]
    )
    image = torch.rand(SHAPE)
    with torch.inference_mode():
        expected = loaded_network(image)
        bfloat16_network = prepare(loaded_network, CPU, torch.bfloat16, torch.channels_last_3d)
        torch.testing.assert_close(bfloat16_network(image.bfloat16()), expected, rtol=0.1, atol=0.1)
        if OpenVinoBackend().explain_unavailability() is None:
            module = prepare(loaded_network, CPU, torch.float32, torch.contiguous_format)
            config = EngineConfig("openvino", "fp32", "contiguous", len(image))
            openvino_network = OpenVinoBackend().build(module, image, config, EngineSettings())
            torch.testing.assert_close(openvino_network(image), expected, rtol=1e-3, atol=1e-3)


def test_file_with_a_fixed_window_rejects_other_windows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loaded_network = load_onnx(export_onnx(ShuffleUNet(1, 2, (4, 8)), tmp_path / "n.onnx", (1, *SHAPE[1:])), SHAPE[1:])
    with pytest.raises(ValueError, match="accepts only inputs of shape"):
        loaded_network(torch.rand(1, 1, 32, 32, 16))


RELU = [helper.make_node("Relu", ["x"], ["y"])]
CONV_2D = helper.make_node("Conv", ["x", "w"], ["y"])
VOLUME = ["b", 1, 8, 8, 8]


@pytest.mark.parametrize(
    ("shape", "nodes", "options", "reason"),
    [
        (["b", 1, 8, 8], RELU, {}, "graph.input x: the input has 4 axes"),
        (VOLUME, RELU, {"dtype": TensorProto.INT64}, "graph.input x: the data type.*example input of float32"),
        (
            VOLUME,
            RELU,
            {"also": [helper.make_tensor_value_info("t", TensorProto.FLOAT, [1])]},
            "the network has 2 inputs",
        ),
        (VOLUME, [helper.make_node("Custom", ["x"], ["y"], domain="com.acme")], {}, "Custom from the domain com.acme"),
        (VOLUME, [helper.make_node("Loop", ["x"], ["y"])], {}, "Loop is not supported"),
        (VOLUME, [helper.make_node("Relu", ["z"], ["y"])], {}, "Relu: z: this input is not defined"),
        (VOLUME, [helper.make_node("Relu", ["x"], ["z"])], {}, "graph.output y is not computed from the image"),
        (
            VOLUME,
            [CONV_2D],
            {"stored": {"w": np.zeros((2, 1, 3, 3), np.float32)}},
            "Conv: W: the weights have 2 spatial axes",
        ),
        (VOLUME, [helper.make_node("Conv", ["x", "x"], ["y"])], {}, "Conv: input 1"),
        (
            VOLUME,
            [helper.make_node("Resize", ["x", "", "w"], ["y"], mode="cubic")],
            {},
            "Resize: mode: the combination",
        ),
        (VOLUME, [helper.make_node("Softmax", ["x"], ["y"], depth=3)], {}, "Softmax: depth"),
        (
            VOLUME,
            [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2, 2], pads=[0, 0, 0, 0, 0, 1], ceil_mode=1)],
            {},
            "MaxPool: ceil_mode, pads: .* export without ceil_mode",
        ),
        (
            VOLUME,
            [helper.make_node("Upsample", ["x", "w"], ["y"], mode="linear")],
            {"stored": {"w": np.array([1, 1, 2, 2, 2], np.float32)}},
            "Upsample: mode: .*Export the network with opset 11 or later",
        ),
    ],
)
def test_unsupported_files_are_rejected_with_the_reason(
    tmp_path: Path, shape: list[Any], nodes: list[onnx.NodeProto], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BrokenModel, match=reason):
        load_onnx(write_onnx(tmp_path / "m.onnx", nodes, shape, **options), (1, 8, 8, 8))


def test_graph_that_cannot_run_on_the_meta_device_cannot_exhaust_memory(tmp_path: Path) -> None:
    """The shape of the image becomes a tensor on the CPU, which cannot be combined with meta tensors."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Reshape", ["sizes", "five"], ["row"]),
        helper.make_node("Cast", ["row"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["floats"], ["factor"], keepdims=1),
        helper.make_node("Mul", ["x", "factor"], ["grown"]),
        helper.make_node("Pad", ["grown", "pads"], ["huge"]),
        helper.make_node("GlobalMaxPool", ["huge"], ["y"]),
    ]
    stored_tensors = {"five": [1, 1, 1, 1, 5], "pads": [0] * 7 + [2**12] * 3}
    path = write_onnx(tmp_path / "huge.onnx", nodes, ["b", 1, "z", "y", "w"], stored_tensors, 13)
    with pytest.raises(BrokenModel, match=r"a tensor of shape \(1, 1, 4112, 4128, 4128\) exceeds the limit"):
        load_onnx(path, (1, 16, 32, 32))


@pytest.mark.parametrize(
    ("is_constant", "reason"),
    [(True, "constants of the graph have more than 536870912"), (False, "in memory at the same time")],
)
def test_total_memory_of_all_nodes_is_limited(tmp_path: Path, *, is_constant: bool, reason: str) -> None:
    """Each individual value is within its limit."""
    nodes = [helper.make_node("Expand", ["one" if is_constant else "x", "size"], [f"v{n}"]) for n in range(6)]
    nodes.append(helper.make_node("Sum", ["x"] if is_constant else [f"v{n}" for n in range(6)], ["y"]))
    size = [1, 1, 512, 512, 1024] if is_constant else [1, 4, 1024, 512, 1024]
    stored_tensors = {"one": np.ones((1, 1, 1, 1, 1), np.float32), "size": size}
    with pytest.raises(BrokenModel, match=reason):
        load_onnx(write_onnx(tmp_path / "m.onnx", nodes, ["b", 1, "z", "y", "w"], stored_tensors, 13), (1, 1, 1, 1))
