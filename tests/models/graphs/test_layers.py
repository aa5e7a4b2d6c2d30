from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.networks.nets.basic_unet import BasicUNet
from monai.networks.nets.dynunet import DynUNet
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet
from onnx import helper
from onnx_export import export_onnx, write_onnx
from torch import Tensor, nn

from service.engine.fusion import iter_adjacent_modules
from service.models.architectures.shuffle_unet import DepthToSpace, ShuffleUNet, SpaceToDepth
from service.models.graphs.onnx.network import load_onnx
from service.models.graphs.torch_export import load_torch_export
from service.models.network import observe_calls

WINDOW = (1, 32, 32, 64)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "UNet": lambda: UNet(3, 1, 2, (4, 8), (2,), num_res_units=1),
    "UNet, batch norm": lambda: UNet(3, 1, 2, (4, 8), (2,), num_res_units=1, norm="batch"),
    "BasicUNet": lambda: BasicUNet(3, 1, 2, features=(4, 4, 8, 8, 8, 4)),
    "DynUNet": lambda: DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8]),
    "SegResNet": lambda: SegResNet(3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)),
    "ShuffleUNet": lambda: ShuffleUNet(1, 2, (4, 8)),
}
DYNAMIC_AXES = {"x": {0: "b", 2: "depth", 3: "height", 4: "width"}}
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
LAYER_TYPES = {
    "convolution": (nn.Conv3d, nn.ConvTranspose3d),
    "norm": (nn.InstanceNorm3d, nn.GroupNorm),
    "shuffle": (SpaceToDepth, DepthToSpace),
}


def reload_onnx(network: nn.Module, path: Path, axes: Any = None) -> nn.Module:
    return load_onnx(export_onnx(network, path, (1, *WINDOW), axes), WINDOW)


def reload_torch_export(network: nn.Module, path: Path, sizes: Any = None) -> nn.Module:
    images = (torch.rand(2 if sizes else 1, *WINDOW),)
    torch.export.save(torch.export.export(network.eval(), images, dynamic_shapes=sizes), path.with_suffix(".pt2"))
    return load_torch_export(path.with_suffix(".pt2"), WINDOW)


reload_dynamic_onnx = partial(reload_onnx, axes=DYNAMIC_AXES)
reload_dynamic_torch_export = partial(reload_torch_export, sizes=({0: torch.export.Dim("batch", min=1, max=64)},))


def count_layers(network: nn.Module) -> dict[str, int]:
    return {name: sum(isinstance(module, types) for module in network.modules()) for name, types in LAYER_TYPES.items()}


def count_fusable_activations(network: nn.Module) -> int:
    pairs = iter_adjacent_modules(network)
    return len({second.module for _, second in pairs if isinstance(second.module, ACTIVATIONS)})


STATIC_RELOADS = (reload_onnx, reload_torch_export)
# These networks have the most layers. Without `thorough`, only files with dynamic sizes are tested.
LARGE_NETWORKS = ("BasicUNet", "SegResNet", "DynUNet")


@pytest.mark.parametrize(
    ("name", "reload"),
    [
        pytest.param(
            name,
            reload,
            marks=[pytest.mark.thorough] if reload in STATIC_RELOADS and name in LARGE_NETWORKS else [],
        )
        for name in NETWORKS
        for reload in (*STATIC_RELOADS, reload_dynamic_onnx, reload_dynamic_torch_export)
    ],
)
def test_reloaded_network_has_the_same_scores_and_layers(
    name: str, reload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network, image = NETWORKS[name]().eval(), torch.rand(1, *WINDOW)
    with torch.inference_mode():
        loaded_network = reload(network, tmp_path / "n.onnx")
        with observe_calls(network):
            expected = network(image)
        with observe_calls(loaded_network):
            torch.testing.assert_close(loaded_network(image), expected, rtol=1e-4, atol=1e-4)
        # An ONNX file with batch size 1 is run one window at a time. A torch.export file has a fixed batch size.
        if reload is not reload_torch_export:
            images = torch.rand(2, 1, 32, 48, 64) if reload is reload_dynamic_onnx else torch.rand(3, *WINDOW)
            torch.testing.assert_close(loaded_network(images), network(images), rtol=1e-4, atol=1e-4)
    assert count_layers(loaded_network) == count_layers(network)
    assert count_fusable_activations(loaded_network) >= max(count_fusable_activations(network), 1)


def test_values_used_twice_are_not_overwritten(tmp_path: Path) -> None:
    class SharedFeatures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            features = self.first(x)
            total = features + self.second(features)
            return torch.relu(total) + total

    network, image = SharedFeatures().eval(), torch.rand(1, *WINDOW)
    for reload in (reload_onnx, reload_torch_export):
        with torch.inference_mode():
            torch.testing.assert_close(reload(network, tmp_path / "n.onnx")(image), network(image))


def test_trivial_shuffle_does_not_overwrite_its_input(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Reshape", ["a", "s"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[0, 1, 3, 5, 7, 2, 4, 6]),
        helper.make_node("Reshape", ["c", "t"], ["d"]),
        helper.make_node("Add", ["d", "x"], ["e"]),
        helper.make_node("Add", ["e", "a"], ["y"]),
    ]
    sizes = {"s": np.array([1, 1, 32, 1, 32, 1, 64, 1]), "t": np.array([1, *WINDOW])}
    loaded_network = load_onnx(write_onnx(tmp_path / "m.onnx", nodes, [1, *WINDOW], sizes), WINDOW)
    x = torch.rand(1, *WINDOW)
    torch.testing.assert_close(loaded_network(x), 3 * x)


def test_group_norm_is_not_fused_with_an_addition_that_is_not_per_channel(tmp_path: Path) -> None:
    """The group norm is exported as an instance norm between reshapes, and followed by an addition."""
    numbers = {
        "one": np.ones(2, np.float32),
        "zero": np.zeros(2, np.float32),
        "s": np.array([0, 2, -1]),
        "t": np.array([1, 4, 8, 8, 8]),
        "w": np.arange(8, dtype=np.float32).reshape(8, 1, 1),
    }
    nodes = [
        helper.make_node("Concat", ["x"] * 4, ["c"], axis=1),
        helper.make_node("Reshape", ["c", "s"], ["a"]),
        helper.make_node("InstanceNormalization", ["a", "one", "zero"], ["b"]),
        helper.make_node("Reshape", ["b", "t"], ["d"]),
        helper.make_node("Add", ["d", "w"], ["y"]),
    ]
    path = write_onnx(tmp_path / "m.onnx", nodes, [1, 1, 8, 8, 8], numbers)
    loaded_network, x = load_onnx(path, (1, 8, 8, 8)), torch.rand(1, 1, 8, 8, 8)
    expected = nn.functional.group_norm(x.expand(1, 4, 8, 8, 8), 2) + torch.arange(8.0).reshape(8, 1, 1)
    torch.testing.assert_close(loaded_network(x), expected)
    assert count_layers(loaded_network)["norm"] == 1


@pytest.mark.parametrize("order", [[0, 1, 3, 5, 7, 2, 6, 4], [0, 1, 7, 5, 3, 2, 4, 6]])
def test_other_permutations_are_not_pixel_shuffles(order: list[int], tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "s"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=order),
        helper.make_node("Reshape", ["b", "t"], ["y"]),
    ]
    sizes = {"s": np.array([1, 1, 16, 2, 16, 2, 32, 2]), "t": np.array([1, 8, 16, 16, 32])}
    write_onnx(tmp_path / "m.onnx", nodes, [1, *WINDOW], sizes)
    loaded_network, x = load_onnx(tmp_path / "m.onnx", WINDOW), torch.rand(1, *WINDOW)
    expected = x.reshape(1, 1, 16, 2, 16, 2, 32, 2).permute(order).reshape(1, 8, 16, 16, 32)
    assert torch.equal(loaded_network(x), expected)
