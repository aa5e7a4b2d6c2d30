"""Calls of ONNX's operators in a graph that are layers: activations, norms and pixel shuffles."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from service.models.graphs.layers import (
    FindLayer,
    Layer,
    Shapes,
    find_shuffle,
    first_input,
    follow,
    is_volume,
    make_norm,
    make_prelu,
    read_constant,
)
from service.models.graphs.onnx.operators import OPERATORS

RESHAPES, PRODUCTS, ADDITIONS = ({OPERATORS[name]} for name in ("Reshape", "Mul", "Add"))


def _read_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by the names of the function's parameters, defaults included."""
    assert callable(node.target)  # noqa: S101
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _find_activation(_network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    source, arguments = first_input(node), _read_arguments(node)
    if not is_volume(source, shapes):
        return None
    module = nn.ReLU() if node.target is OPERATORS["Relu"] else nn.LeakyReLU(arguments["alpha"])
    return Layer(module, source, node)


def _find_prelu(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    source, slope = first_input(node), read_constant(network, node.args[1])
    if slope is None or not is_volume(source, shapes):
        return None
    fits = slope.numel() == 1 or _is_per_channel(slope, shapes[source][1])
    return Layer(make_prelu(slope), source, node) if fits else None


def _is_per_channel(tensor: Tensor, channels: int) -> bool:
    """Return whether a tensor has one number for each channel of a volume."""
    return tensor.numel() == channels and tuple(tensor.shape[-4:]) == (channels, 1, 1, 1)


def _find_norm(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    arguments, source = _read_arguments(node), first_input(node)
    scale, bias = (read_constant(network, arguments[name]) for name in ("scale", "bias"))
    if scale is None or bias is None:
        return None
    if not is_volume(source, shapes):
        return _find_grouped_norm(network, node, shapes, scale, bias)
    channels = shapes[source][1]
    groups = arguments.get("num_groups", channels)
    if len(scale) != channels:
        scale, bias = (each.repeat_interleave(channels // groups) for each in (scale, bias))
    return Layer(make_norm(groups, channels, scale, bias, eps=arguments["epsilon"]), source, node)


def _find_grouped_norm(network: GraphModule, node: Node, shapes: Shapes, scale: Tensor, bias: Tensor) -> Layer | None:
    """Find a group norm that was exported as an instance norm of groups, between reshapes."""
    before, after = first_input(node), follow(node, RESHAPES)
    plain = bool((scale == 1).all() and (bias == 0).all())
    if not plain or after is None or before.target not in RESHAPES or len(shapes.get(before, ())) != 3:
        return None
    source = first_input(before)
    if not is_volume(source, shapes) or shapes[source] != shapes[after]:
        return None
    groups, channels, epsilon = shapes[before][1], shapes[source][1], _read_arguments(node)["epsilon"]
    result, weights = _follow_affine(network, after, channels)
    return Layer(make_norm(groups, channels, *weights, eps=epsilon), source, result)


def _follow_affine(network: GraphModule, result: Node, channels: int) -> tuple[Node, list[Tensor]]:
    """Follow a product and then a sum with numbers of each channel; return the last of them, and the numbers."""
    weights = list[Tensor]()
    for functions in (PRODUCTS, ADDITIONS):
        call = follow(result, functions)
        weight = read_constant(network, call.args[1]) if call is not None else None
        if call is None or weight is None or not _is_per_channel(weight, channels):
            break
        result = call
        weights.append(weight)
    return result, weights


def _find_shuffle(_network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    return find_shuffle(shapes, node, node.kwargs.get("perm", ()), RESHAPES)


FINDERS: dict[Any, FindLayer] = {
    OPERATORS[name]: find
    for name, find in {
        "Relu": _find_activation,
        "LeakyRelu": _find_activation,
        "PRelu": _find_prelu,
        "InstanceNormalization": _find_norm,
        "GroupNormalization": _find_norm,
        "Transpose": _find_shuffle,
    }.items()
}
