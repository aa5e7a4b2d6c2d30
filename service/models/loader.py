"""Networks by name, and model folder -> torch module with its weights.

Every network maps float [B, C, z, y, x] to raw scores [B, K, z, y, x]; activations belong to the decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.architectures import build
from service.models.module_tree import observed
from service.models.onnx.network import load_onnx
from service.models.spec import Architecture, ModelSpec
from service.models.torch_export import load_exported
from service.models.torchscript import load_torchscript

Network = Callable[[Tensor], Tensor]
"""What an engine makes of a module and windows are run through: [B, C, z, y, x] -> [B, K, z, y, x], one fixed shape."""


# Files that bring a network of their own.
_OWN: dict[str, Callable[[Path], nn.Module]] = {
    "torchscript": load_torchscript,
    "exported": load_exported,
    "onnx": load_onnx,
}


def run(network: nn.Module, x: Tensor) -> Tensor:
    """The scores of `network` for `x`."""
    scores: Tensor = network(x)
    return scores


def load(spec: ModelSpec, first: Callable[[nn.Module, Tensor], Tensor] = run) -> nn.Module:
    """The network of a model with its weights, float32 on the CPU, in evaluation mode, gradients off.

    first  computes the scores of a first window, which are checked; it may look at how that is done

    Raises BrokenModel where the weights do not fit, and where scores do not have the shape that the model file states.
    """
    if spec.architecture is not None:
        network = _with_weights(spec.architecture, spec)
    else:
        network = _OWN[spec.weights.kind](spec.weights_path)
    network = network.eval().requires_grad_(requires_grad=False).float()
    _check_shapes(network, spec, first)
    return network


def weight_bytes(network: nn.Module) -> int:
    """Bytes of its parameters and buffers; tensors that share memory count once."""
    tensors = itertools.chain(network.parameters(), network.buffers())
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _with_weights(architecture: Architecture, spec: ModelSpec) -> nn.Module:
    network = build(architecture)
    try:
        state: dict[str, Any] = load_file(spec.weights_path)
        network.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        faults = _first_faults(error)
        raise BrokenModel(f"{spec.weights_path}: the weights do not fit {architecture.name}: {faults}") from error
    return network


def _first_faults(error: Exception) -> str:
    """The head of a message in which torch gives every tensor that differs a line of its own, below a headline."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(lines[:2]) + (f" (and {len(lines) - 2} more)" if len(lines) > 2 else "")


@torch.inference_mode()
def _check_shapes(network: nn.Module, spec: ModelSpec, first: Callable[[nn.Module, Tensor], Tensor]) -> None:
    shape = (1, spec.input.channels, *spec.input.roi_size)
    expected = (1, len(spec.outputs), *spec.input.roi_size)
    try:
        with observed(network):
            scores = first(network, torch.zeros(shape))
    except (RuntimeError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
        raise BrokenModel(f"{spec.folder}: the network does not take a window of shape {shape}: {error}") from error
    if tuple(scores.shape) != expected:
        raise BrokenModel(f"{spec.folder}: the network returned {tuple(scores.shape)} where {expected} was expected.")
