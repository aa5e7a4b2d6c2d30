"""Calls of ONNX's operators in a graph that are layers: activations, norms and pixel shuffles."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from service.models.graphs.graph_module import Shapes
from service.models.graphs.layers import (
    FindLayer,
    Layer,
    find_activation,
    find_norm,
    find_prelu,
    first_input,
    follow,
    is_per_channel,
    is_volume,
    make_norm,
    make_shuffle_finder,
    read_arguments,
    read_constant,
)
from service.models.graphs.onnx.operators import OPERATORS

RESHAPES, PRODUCTS, ADDITIONS = ({OPERATORS[name]} for name in ("Reshape", "Mul", "Add"))


def _find_norm(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find a norm of a volume, or a group norm that was exported as an instance norm of groups, between reshapes."""
    if is_volume(first_input(node), shapes):
        return find_norm(network, node, shapes)
    settings, before, after = read_arguments(network, node), first_input(node), follow(node, RESHAPES)
    if after is None or before.target not in RESHAPES or len(shapes.get(before, ())) != 3:
        return None
    source = first_input(before)
    plain = _has_only(settings["weight"], 1) and _has_only(settings["bias"], 0)
    if not plain or not is_volume(source, shapes) or shapes[source] != shapes[after]:
        return None
    groups, channels = shapes[before][1], shapes[source][1]
    result, weight, bias = _follow_affine(network, after, channels)
    return Layer(make_norm(groups, weight, bias, channels=channels, eps=settings["eps"]), source, result)


def _has_only(values: Any, number: float) -> bool:
    """Return whether values are a stored tensor of one number alone."""
    return isinstance(values, Tensor) and bool((values == number).all())


def _follow_affine(network: GraphModule, result: Node, channels: int) -> tuple[Node, Tensor | None, Tensor | None]:
    """Follow a product and then a sum with numbers of each channel; return the last of them, and the numbers."""
    weights = list[Tensor]()
    for functions in (PRODUCTS, ADDITIONS):
        call = follow(result, functions)
        weight = read_constant(network, call.args[1]) if call is not None else None
        if call is None or weight is None or not is_per_channel(weight, channels):
            break
        result = call
        weights.append(weight)
    weight, bias = (*weights, None, None)[:2]
    return result, weight, bias


FINDERS: dict[Any, FindLayer] = {
    OPERATORS["Relu"]: find_activation,
    OPERATORS["LeakyRelu"]: find_activation,
    OPERATORS["PRelu"]: find_prelu,
    OPERATORS["InstanceNormalization"]: _find_norm,
    OPERATORS["GroupNormalization"]: _find_norm,
    OPERATORS["Transpose"]: make_shuffle_finder(RESHAPES),
}
