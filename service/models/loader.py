"""Load the network of a model folder with its weights.

Every network maps a float image [B, C, z, y, x] to raw scores [B, K, z, y, x]. Activations are applied during decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.architectures.build import build_network, count_tensor_elements
from service.models.graphs.outputs import OutputQuery
from service.models.network import MAX_ELEMENTS, observe_calls
from service.models.spec import PROBABILITY_TOLERANCE, Architecture, ModelSpec
from service.models.spec_parts import get_probability_output

_GRAPHS = "service.models.graphs"
# Modules and functions that load weights files with an embedded network, by `weights.kind`. The modules are imported
# only when a model needs them, because most services have no such model.
_LOADERS = {
    "torchscript": ("torchscript", "load_torchscript"),
    "exported": ("torch_export", "load_torch_export"),
    "onnx": ("onnx.network", "load_onnx"),
}
# Weights with fewer bytes are quantized. Without their scale, they are wrong.
MIN_WEIGHT_BYTES = 2
# Modules that a kind of decoding needs, and the extras that install them.
_DECODING_LIBRARIES = {"boundaries": ("bioimage_cpp", "boundaries"), "star-convex": ("stardist", "stardist")}


def compute_scores(network: nn.Module, x: Tensor) -> Tensor:
    """Return the scores of `network` for `x`."""
    scores: Tensor = network(x)
    return scores


def load_network(spec: ModelSpec, forward: Callable[[nn.Module, Tensor], Tensor] = compute_scores) -> nn.Module:
    """Load the network of a model with its weights, in float32 on the CPU, in evaluation mode, without gradients.

    `forward` runs the network on an empty window to check its scores. Callers can pass a function that also measures
    this run. Raises BrokenModel if the weights do not fit the architecture, or if the shape of the scores does not
    match the model file.
    """
    check_decoding_library(spec)
    # Tensors created in inference mode have no version counter, which the check needs.
    with torch.inference_mode(mode=False):
        network = _read_network(spec).eval().requires_grad_(requires_grad=False).float()
    _check_network(network, spec, forward)
    return network


def check_decoding_library(spec: ModelSpec) -> None:
    """Raise BrokenModel if the decoding needs a library that is not installed."""
    kind = spec.decoding.kind
    module, extra = _DECODING_LIBRARIES.get(kind, (None, None))
    if module is not None and find_spec(module) is None:
        raise BrokenModel(
            f"{spec.folder}: `decoding.kind: {kind}` requires the `{extra}` extra. Install it with: "
            f"pip install 'stackseg[{extra}]'"
        )


def _read_network(spec: ModelSpec) -> nn.Module:
    if spec.architecture is not None:
        return _build_with_weights(spec.architecture, spec)
    if spec.weights.kind == "torchscript" and not spec.weights.trusted:
        raise BrokenModel(
            f"{spec.weights_path}: a TorchScript file is a program that can do everything this process can do; set "
            "weights.trusted: true in model.yaml if you trust its author as you would for a program that you install."
        )
    module, function = _LOADERS[spec.weights.kind]
    load: Callable[[Path, Sequence[int], OutputQuery], nn.Module] = getattr(
        import_module(f"{_GRAPHS}.{module}"), function
    )
    query = OutputQuery(len(spec.outputs), spec.weights.output)
    return load(spec.weights_path, (spec.input.channels, *spec.input.roi_size), query)


def _build_with_weights(architecture: Architecture, spec: ModelSpec) -> nn.Module:
    # Check before allocating memory, because the arguments in a model file could describe a network of any size.
    if count_tensor_elements(architecture) > spec.weights_path.stat().st_size:
        raise BrokenModel(
            f"{spec.weights_path}: the weights do not match {architecture.name}, which has more elements than"
            " the file has bytes."
        )
    network = build_network(architecture)
    try:
        state: dict[str, Any] = load_file(spec.weights_path)
        network.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        summary = _summarize_error(error)
        raise BrokenModel(f"{spec.weights_path}: the weights do not match {architecture.name}: {summary}") from error
    for name, tensor in network.state_dict().items():
        _check_tensor(tensor, state[name].dtype, f"{spec.weights_path}: {name}")
    return network


def _check_tensor(tensor: Tensor, stored_dtype: torch.dtype, location: str) -> None:
    """Raise BrokenModel if a tensor of weights contains NaN or infinity, or was stored in a quantized type."""
    if not tensor.is_floating_point():
        return
    if not stored_dtype.is_floating_point or stored_dtype.itemsize < MIN_WEIGHT_BYTES:
        dtype = str(stored_dtype).removeprefix("torch.")
        raise BrokenModel(f"{location}: quantized weights ({dtype}) are not supported; save the weights as float32.")
    if not bool(torch.isfinite(tensor).all()):
        raise BrokenModel(
            f"{location}: the weights contain NaN or infinity, because the training diverged or the file is damaged;"
            " use another checkpoint."
        )


def _summarize_error(error: Exception) -> str:
    """Return the first two lines of a message in which torch lists every mismatched tensor on a separate line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(lines[:2]) + (f" (and {len(lines) - 2} more)" if len(lines) > 2 else "")


def _check_probability(scores: Tensor, spec: ModelSpec) -> None:
    """Raise BrokenModel if the foreground or boundary in scores [1, K, z, y, x] of an empty window is no probability.

    Logits of an empty window are usually negative.
    """
    name = get_probability_output(spec.decoding)
    if name is None or spec.get_activation(name) != "none":
        return
    lowest, highest = torch.aminmax(scores[:, spec.outputs.index(name)])
    if lowest < -PROBABILITY_TOLERANCE or highest > 1 + PROBABILITY_TOLERANCE:
        raise BrokenModel(
            f"{spec.folder}: activation: the activation of the output {name!r} is none, but its "
            f"scores range from {float(lowest):.3g} to {float(highest):.3g}, so they are not probabilities; use "
            "sigmoid if they are logits."
        )


@torch.inference_mode()
def _check_network(network: nn.Module, spec: ModelSpec, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
    shape = (1, spec.input.channels, *spec.input.roi_size)
    score_size = (length // step for length, step in zip(spec.input.roi_size, spec.tiling.step, strict=True))
    expected_shape = (1, len(spec.outputs), *score_size)
    if max(math.prod(shape), math.prod(expected_shape)) > MAX_ELEMENTS:
        raise BrokenModel(f"{spec.folder}: input.roi_size: a window of shape {shape} is too large; reduce the size.")
    tensors = [*network.parameters(), *network.buffers()]
    versions = [tensor._version for tensor in tensors]
    try:
        with observe_calls(network):
            scores = forward(network, torch.zeros(shape))
    except (RuntimeError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
        raise BrokenModel(
            f"{spec.folder}: the network does not accept a window of shape {shape} (batch, channel, z, y, x): {error}"
        ) from error
    if not isinstance(scores, Tensor):
        raise BrokenModel(
            f"{spec.folder}: the network returned a {type(scores).__name__} instead of a tensor of scores."
        )
    if tuple(scores.shape) != expected_shape:
        raise BrokenModel(
            f"{spec.folder}: the network returned scores of shape {tuple(scores.shape)}, not {expected_shape}. It must"
            " return one channel for each of `outputs`, in the size of the window (`input.roi_size`)."
        )
    _check_probability(scores, spec)
    if [tensor._version for tensor in tensors] != versions:
        raise BrokenModel(
            f"{spec.folder}: the network modifies its own tensors and could retain data from other requests."
        )
