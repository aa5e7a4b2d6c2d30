"""Model folder -> torch module with its weights.

Every network maps float [B, C, z, y, x] to raw scores [B, K, z, y, x]; activations belong to decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.architectures import build_network, count_parameters
from service.models.network import MAX_ELEMENTS, observe_calls
from service.models.spec import Architecture, ModelSpec

_GRAPHS = "service.models.graphs"
# Module and function that read weights which bring their own network, by `weights.kind`. Each is imported when a model
# needs it: most services serve no such model.
_READERS = {
    "torchscript": ("torchscript", "load_torchscript"),
    "exported": ("torch_export", "load_torch_export"),
    "onnx": ("onnx.network", "load_onnx"),
}


def compute_scores(network: nn.Module, x: Tensor) -> Tensor:
    """Return the scores of `network` for `x`."""
    scores: Tensor = network(x)
    return scores


def load_network(spec: ModelSpec, forward: Callable[[nn.Module, Tensor], Tensor] = compute_scores) -> nn.Module:
    """Load the network of a model with its weights, float32 on the CPU, in evaluation mode, gradients off.

    `forward` runs the network on an empty window, whose scores are checked; a caller may measure that run. Raise
    BrokenModel where the weights do not fit, or the scores do not have the shape that the model file states.
    """
    # Tensors that are made in inference mode do not count how often they are changed.
    with torch.inference_mode(mode=False):
        network = _load(spec).eval().requires_grad_(requires_grad=False).float()
    _check_shapes(network, spec, forward)
    return network


def _load(spec: ModelSpec) -> nn.Module:
    if spec.architecture is not None:
        return _build_with_weights(spec.architecture, spec)
    if spec.weights.kind == "torchscript" and not spec.weights.trusted:
        raise BrokenModel(
            f"{spec.weights_path}: TorchScript is a program, which can do whatever this process can; say "
            "weights.trusted: true in model.yaml if you trust its author like one of a program that you install."
        )
    module, function = _READERS[spec.weights.kind]
    read: Callable[[Path, Sequence[int]], nn.Module] = getattr(import_module(f"{_GRAPHS}.{module}"), function)
    return read(spec.weights_path, (spec.input.channels, *spec.input.roi_size))


def _build_with_weights(architecture: Architecture, spec: ModelSpec) -> nn.Module:
    # Before there is memory for it: arguments in a model file ask for any network.
    if count_parameters(architecture) > spec.weights_path.stat().st_size:
        raise BrokenModel(f"{spec.weights_path}: the weights do not fit {architecture.name}, which has more numbers.")
    network = build_network(architecture)
    try:
        state: dict[str, Any] = load_file(spec.weights_path)
        network.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        summary = _summarise(error)
        raise BrokenModel(f"{spec.weights_path}: the weights do not fit {architecture.name}: {summary}") from error
    return network


def _summarise(error: Exception) -> str:
    """Return the first two lines of a message in which torch lists every tensor that differs, one a line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(lines[:2]) + (f" (and {len(lines) - 2} more)" if len(lines) > 2 else "")


@torch.inference_mode()
def _check_shapes(network: nn.Module, spec: ModelSpec, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
    shape = (1, spec.input.channels, *spec.input.roi_size)
    expected = (1, len(spec.outputs), *spec.input.roi_size)
    if max(math.prod(shape), math.prod(expected)) > MAX_ELEMENTS:
        raise BrokenModel(f"{spec.folder}: input.roi_size: a window of shape {shape} is too large.")
    stored = [*network.parameters(), *network.buffers()]
    versions = [tensor._version for tensor in stored]
    try:
        with observe_calls(network):
            scores = forward(network, torch.zeros(shape))
    except (RuntimeError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
        raise BrokenModel(f"{spec.folder}: the network does not take a window of shape {shape}: {error}") from error
    if not isinstance(scores, Tensor):
        raise BrokenModel(f"{spec.folder}: the network returned a {type(scores).__name__} where scores were expected.")
    if tuple(scores.shape) != expected:
        raise BrokenModel(f"{spec.folder}: the network returned {tuple(scores.shape)} where {expected} was expected.")
    if [tensor._version for tensor in stored] != versions:
        raise BrokenModel(f"{spec.folder}: the network changes its own tensors, and would keep what others have sent.")
