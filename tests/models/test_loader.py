"""Tests of loading networks, and of weights or windows that do not fit."""

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
from service.inference.runner.memory_estimate import measure_activation_bytes, measure_activations
from service.models.architectures.build import build_network
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.models.loader import compute_scores, load_network
from service.models.network import is_plain_sequential
from service.models.spec import Architecture, ModelSpec, Weights

WriteModel = Callable[..., ModelSpec]

HUGE_ARCHITECTURE = {"arguments": {"in_channels": 1, "out_channels": 2, "widths": [2**20, 2**20]}}


def test_loaded_network_gives_the_scores_of_the_saved_one(bands: ModelSpec, bands_network: nn.Module) -> None:
    network = load_network(bands)
    x = torch.rand(1, 1, *bands.input.roi_size)
    with torch.inference_mode():
        assert torch.equal(network(x), bands_network(x))


def test_loaded_network_is_in_float32_and_evaluation_mode(
    write_model: WriteModel, random_nuclei_content: dict[str, Any]
) -> None:
    half_network = build_network(Architecture(**random_nuclei_content["architecture"])).half()
    network = load_network(write_model(random_nuclei_content, half_network))
    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    floating_dtypes = [tensor.dtype for tensor in network.state_dict().values() if tensor.is_floating_point()]
    assert set(floating_dtypes) == {torch.float32}


def test_weights_of_a_different_network_or_without_a_layer_are_rejected(
    random_nuclei: ModelSpec, tmp_path: Path
) -> None:
    copied_spec = random_nuclei.model_copy(update={"folder": tmp_path})
    save_file(ShuffleUNet(1, 2, (8, 16)).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(BrokenModel, match=r"weights\.safetensors: the weights do not match ShuffleUNet: .* more\)$"):
        load_network(copied_spec)
    state = load_network(random_nuclei).state_dict()
    state.pop("head.bias")
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(BrokenModel, match=r"Missing key.*head\.bias"):
        load_network(copied_spec)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights: weights * torch.inf, "contain NaN or infinity"),
        (lambda weights: weights.index_fill(0, torch.tensor([0]), torch.nan), "contain NaN or infinity"),
        (lambda weights: weights.to(torch.int8), r"quantized weights \(int8\)"),
        (lambda weights: weights.to(torch.int32), r"quantized weights \(int32\)"),
        (lambda weights: weights.to(torch.float8_e4m3fn), r"quantized weights \(float8_e4m3fn\)"),
    ],
)
def test_weights_without_usable_numbers_are_rejected(
    random_nuclei: ModelSpec, tmp_path: Path, edit: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    state = load_network(random_nuclei).state_dict()
    state["head.bias"] = edit(state["head.bias"])
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(BrokenModel, match=message):
        load_network(random_nuclei.model_copy(update={"folder": tmp_path}))


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"\xff" * 64])
def test_weights_other_than_safetensors_are_rejected_without_unpickling(
    content: bytes, random_nuclei: ModelSpec, tmp_path: Path
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(content)
    weights = Weights(sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(BrokenModel, match="the weights do not match"):
        load_network(random_nuclei.model_copy(update={"folder": tmp_path, "weights": weights}))


@pytest.mark.parametrize(
    ("key", "updates", "reason"),
    [
        ("architecture", HUGE_ARCHITECTURE, "do not match ShuffleUNet, which has more elements than"),
        ("input", {"roi_size": (2**12,) * 3}, r"input\.roi_size: a window of shape \(1, 1, 4096, 4096, 4096\) is too"),
        ("input", {"roi_size": (16, 15, 16)}, r"does not accept a window of shape \(1, 1, 16, 15, 16\)"),
    ],
)
def test_oversized_networks_and_invalid_windows_are_rejected(
    random_nuclei: ModelSpec, key: str, updates: dict[str, Any], reason: str
) -> None:
    section = getattr(random_nuclei, key).model_copy(update=updates)
    with pytest.raises(BrokenModel, match=reason):
        load_network(random_nuclei.model_copy(update={key: section}))


def test_forward_pass_during_loading_can_be_measured(random_nuclei: ModelSpec) -> None:
    calls = []

    def measure(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append((tuple(x.shape), measure_activation_bytes(network, tuple(x.shape))))
        scores, nbytes = measure_activations(network, x)
        assert nbytes == calls[-1][1]
        assert torch.equal(scores, compute_scores(network, x))
        return scores

    load_network(random_nuclei, measure)
    assert [shape for shape, _ in calls] == [(1, 1, 16, 16, 16)]


def test_sequences_called_in_parts_are_detected_while_loading(random_nuclei: ModelSpec) -> None:
    def call_partially(network: nn.Module, window: torch.Tensor) -> torch.Tensor:
        scores = compute_scores(network, window)
        stem = network.get_submodule("stem")
        assert isinstance(stem, nn.Sequential)
        stem[2](scores)
        return scores

    assert is_plain_sequential(load_network(random_nuclei).get_submodule("stem"))
    network = load_network(random_nuclei, call_partially)
    assert not is_plain_sequential(network.get_submodule("stem"))
    assert is_plain_sequential(network.get_submodule("down.0"))


def test_model_file_with_more_outputs_than_scores_is_rejected(random_nuclei: ModelSpec) -> None:
    spec = random_nuclei.model_copy(update={"outputs": ("foreground", "distance", "boundary")})
    with pytest.raises(BrokenModel, match=r"returned scores of shape \(1, 2, 16, 16, 16\), not \(1, 3, 16, 16, 16\)"):
        load_network(spec)


def test_logits_declared_as_probabilities_are_rejected(random_nuclei: ModelSpec) -> None:
    def add_logits(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return compute_scores(network, x) - 5

    load_network(random_nuclei, add_logits)
    with pytest.raises(BrokenModel, match="activation: the activation of the output 'foreground' is none"):
        load_network(random_nuclei.model_copy(update={"activation": "none"}), add_logits)


def test_scores_other_than_a_tensor_are_rejected(random_nuclei: ModelSpec) -> None:
    def compute_list(network: nn.Module, x: torch.Tensor) -> Any:
        return [compute_scores(network, x)]

    with pytest.raises(BrokenModel, match="returned a list instead of a tensor"):
        load_network(random_nuclei, compute_list)
