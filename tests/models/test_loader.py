"""Loading networks: their weights, and weights or windows that do not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from service.core.errors import BrokenModel
from service.inference.runner.memory_estimate import activation_bytes, measure_activations
from service.models.architectures import ShuffleUNet, build_network
from service.models.loader import compute_scores, load_network
from service.models.network import is_sequence
from service.models.spec import Architecture, ModelSpec, Weights

WriteModel = Callable[..., ModelSpec]

VAST = {"arguments": {"in_channels": 1, "out_channels": 2, "widths": [2**20, 2**20]}}


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


def test_weights_of_another_network_or_without_a_layer_are_refused(random_nuclei: ModelSpec, tmp_path: Path) -> None:
    elsewhere = random_nuclei.model_copy(update={"folder": tmp_path})
    save_file(ShuffleUNet(1, 2, (8, 16)).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(BrokenModel, match=r"weights\.safetensors: the weights do not fit ShuffleUNet: .* more\)$"):
        load_network(elsewhere)
    state = load_network(random_nuclei).state_dict()
    state.pop("head.bias")
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(BrokenModel, match=r"Missing key.*head\.bias"):
        load_network(elsewhere)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 64])
def test_weights_that_are_no_safetensors_are_refused_and_never_unpickled(
    content: bytes, random_nuclei: ModelSpec, tmp_path: Path
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(content)
    stated = Weights(sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(BrokenModel, match="the weights do not fit"):
        load_network(random_nuclei.model_copy(update={"folder": tmp_path, "weights": stated}))


@pytest.mark.parametrize(
    ("key", "changed", "reason"),
    [
        ("architecture", VAST, "do not fit ShuffleUNet, which has more numbers"),
        ("input", {"roi_size": (2**12,) * 3}, r"input\.roi_size: a window of shape \(1, 1, 4096, 4096, 4096\) is too"),
        ("input", {"roi_size": (16, 15, 16)}, r"does not take a window of shape \(1, 1, 16, 15, 16\)"),
    ],
)
def test_a_network_or_window_for_which_there_are_no_weights_or_memory_is_not_made(
    random_nuclei: ModelSpec, key: str, changed: dict[str, Any], reason: str
) -> None:
    part = getattr(random_nuclei, key).model_copy(update=changed)
    with pytest.raises(BrokenModel, match=reason):
        load_network(random_nuclei.model_copy(update={key: part}))


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


def test_more_stated_outputs_than_scores_are_refused(random_nuclei: ModelSpec) -> None:
    spec = random_nuclei.model_copy(update={"outputs": ("foreground", "distance", "boundary")})
    with pytest.raises(BrokenModel, match=r"returned \(1, 2, 16, 16, 16\) where \(1, 3, 16, 16, 16\) was expected"):
        load_network(spec)


def test_what_is_no_tensor_is_refused_as_scores(random_nuclei: ModelSpec) -> None:
    def in_list(network: nn.Module, x: torch.Tensor) -> Any:
        return [compute_scores(network, x)]

    with pytest.raises(BrokenModel, match="returned a list where scores were expected"):
        load_network(random_nuclei, in_list)
