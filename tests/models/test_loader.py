"""Networks: the shuffles, every architecture by name, and weights that do not fit."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.networks.nets.basic_unet import BasicUNet
from safetensors.torch import save_file
from torch import nn

from service.core.errors import BrokenModel
from service.inference.estimate import activation_bytes, measure_activations
from service.models import monai_architectures
from service.models.architectures import ARCHITECTURES, ShuffleUNet, build_network, depth_to_space, space_to_depth
from service.models.loader import compute_scores, load_network
from service.models.module_tree import is_sequence
from service.models.spec import Architecture, ModelSpec, Weights

WriteModel = Callable[..., ModelSpec]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "ShuffleUNet": {"in_channels": 2, "out_channels": 3, "widths": [4, 8], "block": [1, 2, 2]},
    "UNet": {"spatial_dims": 3, "in_channels": 2, "out_channels": 3, "channels": [4, 8], "strides": [2]},
    "BasicUNet": {"spatial_dims": 3, "in_channels": 2, "out_channels": 3, "features": [4, 4, 8, 8, 8, 4]},
    "DynUNet": {
        "spatial_dims": 3,
        "in_channels": 2,
        "out_channels": 3,
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 8],
    },
    "SegResNet": {"spatial_dims": 3, "in_channels": 2, "out_channels": 3, "init_filters": 8},
}

edges = st.tuples(*[st.integers(1, 3)] * 3)


@given(st.integers(1, 2), st.integers(1, 3), edges, edges)
def test_shuffles_are_inverses(batch: int, channels: int, blocks: tuple[int, ...], block: tuple[int, ...]) -> None:
    size = [n * b for n, b in zip(blocks, block, strict=True)]
    x = torch.arange(batch * channels * size[0] * size[1] * size[2]).reshape(batch, channels, *size)
    depth = space_to_depth(x, block)
    assert depth.shape == (batch, channels * block[0] * block[1] * block[2], *blocks)
    assert torch.equal(depth_to_space(depth, block), x)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_shuffle_within_planes_is_the_one_of_torch(channels: int, planes: int, factor: int) -> None:
    x = torch.rand(1, channels, planes, 2 * factor, 3 * factor)
    ours = space_to_depth(x, (1, factor, factor))
    for plane in range(planes):
        assert torch.equal(ours[:, :, plane], nn.functional.pixel_unshuffle(x[:, :, plane], factor))


def test_block_becomes_the_channels_of_one_position() -> None:
    x = torch.arange(4 * 4 * 4).reshape(1, 1, 4, 4, 4)
    assert torch.equal(space_to_depth(x, (2, 2, 2))[0, :, 1, 0, 1], x[0, 0, 2:4, 0:2, 2:4].flatten())


def test_every_architecture_is_tried_here() -> None:
    assert set(ARGUMENTS) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_keeps_the_grid(name: str) -> None:
    network = build_network(Architecture(name=name, arguments=ARGUMENTS[name])).eval()
    with torch.inference_mode():
        scores = network(torch.rand(2, 2, 16, 32, 32))
    assert scores.shape == (2, 3, 16, 32, 32)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shuffle_unet_takes_any_edges_that_its_strides_divide(dtype: torch.dtype) -> None:
    network = ShuffleUNet(1, 2, widths=(4, 8, 8), block=(1, 2, 2)).eval().to(dtype)
    with torch.inference_mode():
        assert network(torch.rand(1, 1, 4, 8, 24, dtype=dtype)).shape == (1, 2, 4, 8, 24)


def test_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BrokenModel, match=r"no architecture 'UNext'; known are ShuffleUNet, UNet,"):
        build_network(Architecture(name="UNext"))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("UNet", {}),
        ("UNet", {"chanels": [4, 8]}),
        ("UNet", {"channels": [4]}),
        ("UNet", {"in_channels": -1}),
        ("UNet", {"in_channels": "two"}),
        ("UNet", {"spatial_dims": 7}),
        ("UNet", {"norm": "batchnrm"}),
        ("BasicUNet", {"features": [1, 2]}),
        ("DynUNet", {"strides": [1, 2]}),
        ("SegResNet", {"init_filters": 7}),
        ("SegResNet", {"upsample_mode": "magic"}),
        ("ShuffleUNet", {"block": [2, 2]}),
        ("ShuffleUNet", {"widths": []}),
        ("ShuffleUNet", {"widths": [-4, 8]}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, arguments: dict[str, Any]) -> None:
    given_arguments = ARGUMENTS[name] | arguments if arguments else {}
    with pytest.raises(BrokenModel, match=f"^{name} does not take the arguments in the model file: "):
        build_network(Architecture(name=name, arguments=given_arguments))


def test_loaded_network_is_the_one_that_was_saved(bands: ModelSpec, bands_network: nn.Module) -> None:
    network = load_network(bands)
    x = torch.rand(1, 1, *bands.input.roi_size)
    with torch.inference_mode():
        assert torch.equal(network(x), bands_network(x))


def test_loaded_network_is_for_inference_in_float32(
    write_model: WriteModel, random_nuclei_content: dict[str, Any]
) -> None:
    halved = build_network(Architecture(**random_nuclei_content["architecture"])).half()
    network = load_network(write_model(random_nuclei_content, halved))
    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    floating = [tensor.dtype for tensor in network.state_dict().values() if tensor.is_floating_point()]
    assert set(floating) == {torch.float32}


def test_weights_of_another_network_are_refused(write_model: WriteModel, random_nuclei_content: dict[str, Any]) -> None:
    wider = build_network(
        Architecture(name="ShuffleUNet", arguments={"in_channels": 1, "out_channels": 2, "widths": [8, 16]})
    )
    with pytest.raises(BrokenModel, match=r"weights\.safetensors: the weights do not fit ShuffleUNet: .* more\)$"):
        load_network(write_model(random_nuclei_content, wider))


def test_weights_with_a_missing_layer_are_refused(random_nuclei: ModelSpec, tmp_path: Path) -> None:
    state = load_network(random_nuclei).state_dict()
    state.pop("head.bias")
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(BrokenModel, match=r"Missing key.*head\.bias"):
        load_network(random_nuclei.model_copy(update={"folder": tmp_path}))


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 64])
def test_weights_that_are_no_safetensors_are_refused_and_never_unpickled(
    content: bytes, random_nuclei: ModelSpec, tmp_path: Path
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(content)
    stated = Weights(sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(BrokenModel, match="the weights do not fit"):
        load_network(random_nuclei.model_copy(update={"folder": tmp_path, "weights": stated}))


def test_window_that_the_network_cannot_take_is_refused(
    write_model: WriteModel, random_nuclei_content: dict[str, Any]
) -> None:
    odd = random_nuclei_content["input"] | {"roi_size": [16, 15, 16]}
    with pytest.raises(BrokenModel, match=r"does not take a window of shape \(1, 1, 16, 15, 16\)"):
        load_network(write_model(random_nuclei_content | {"input": odd}))


def test_the_one_window_that_is_computed_while_loading_can_be_watched(random_nuclei: ModelSpec) -> None:
    seen = []

    def first(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(x.shape), activation_bytes(network, tuple(x.shape))))
        scores, nbytes = measure_activations(network, x)
        assert nbytes == seen[-1][1]
        assert torch.equal(scores, compute_scores(network, x))
        return scores

    load_network(random_nuclei, first)
    assert [shape for shape, _ in seen] == [(1, 1, 16, 16, 16)]


def test_first_window_tells_which_sequences_are_called_whole(random_nuclei: ModelSpec) -> None:
    def in_parts(network: nn.Module, window: torch.Tensor) -> torch.Tensor:
        scores = compute_scores(network, window)
        stem = network.get_submodule("stem")
        assert isinstance(stem, nn.Sequential)
        stem[2](scores)
        return scores

    assert is_sequence(load_network(random_nuclei).get_submodule("stem"))
    network = load_network(random_nuclei, in_parts)
    assert not is_sequence(network.get_submodule("stem"))
    assert is_sequence(network.get_submodule("down.0"))


def test_more_stated_outputs_than_scores_are_refused(
    write_model: WriteModel, random_nuclei_content: dict[str, Any]
) -> None:
    outputs = ["foreground", "distance", "boundary"]
    with pytest.raises(BrokenModel, match=r"returned \(1, 2, 16, 16, 16\) where \(1, 3, 16, 16, 16\) was expected"):
        load_network(write_model(random_nuclei_content | {"outputs": outputs}))


@pytest.mark.parametrize("edges", [(32, 32, 32), (33, 36, 34)])
def test_basic_unet_is_monais_and_becomes_one_graph(edges):
    arguments = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "features": [8] * 6}
    theirs = BasicUNet(**arguments).eval()
    ours = build_network(Architecture(name="BasicUNet", arguments=arguments)).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(1, 1, *edges)
    graph = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(graph(x), theirs(x))


def test_what_monai_does_without_is_hidden_from_its_own_import_alone(tmp_path, monkeypatch):
    (tmp_path / "plotter_of_nothing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with monai_architectures.hide_packages(frozenset(["plotter_of_nothing"])):
        with pytest.raises(ModuleNotFoundError, match="plotter_of_nothing"):
            import_module("plotter_of_nothing.colours")
        with ThreadPoolExecutor(1) as other:
            assert other.submit(import_module, "plotter_of_nothing").result().__name__ == "plotter_of_nothing"
    assert find_spec("plotter_of_nothing") is not None
    del sys.modules["plotter_of_nothing"]
