"""Finders of layers in graphs of ONNX operators: activations, norms and pixel shuffles."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from service.models.graphs.graph_module import Shapes
from service.models.graphs.layers import (
    Layer,
    LayerFinder,
    find_activation,
    find_norm,
    find_prelu,
    get_first_input,
    get_only_user,
    is_per_channel,
    is_volume,
    make_norm,
    make_shuffle_finder,
    read_arguments,
    read_constant,
)
from service.models.graphs.onnx.operators import OPERATORS

RESHAPES, MULTIPLICATIONS, ADDITIONS = ({OPERATORS[name]} for name in ("Reshape", "Mul", "Add"))


def _find_norm(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find a norm of a volume, or a group norm exported as an instance norm of its groups between two reshapes."""
    if is_volume(get_first_input(node), shapes):
        return find_norm(network, node, shapes)
    settings, first_reshape, second_reshape = (
        read_arguments(network, node),
        get_first_input(node),
        get_only_user(node, RESHAPES),
    )
    if second_reshape is None or first_reshape.target not in RESHAPES or len(shapes.get(first_reshape, ())) != 3:
        return None
    source = get_first_input(first_reshape)
    has_identity_affine = _is_filled_with(settings["weight"], 1) and _is_filled_with(settings["bias"], 0)
    if not has_identity_affine or not is_volume(source, shapes) or shapes[source] != shapes[second_reshape]:
        return None
    groups, channels = shapes[first_reshape][1], shapes[source][1]
    result, weight, bias = _find_affine(network, second_reshape, channels)
    return Layer(make_norm(groups, weight, bias, channels=channels, eps=settings["eps"]), source, result)


def _is_filled_with(values: Any, number: float) -> bool:
    """Return whether `values` is a constant tensor in which every element is `number`."""
    return isinstance(values, Tensor) and bool((values == number).all())


def _find_affine(network: GraphModule, result: Node, channels: int) -> tuple[Node, Tensor | None, Tensor | None]:
    """Find a multiplication and then an addition of per-channel constants after `result`.

    Return the last of these calls, the weight and the bias, which are None if not found.
    """
    weights = list[Tensor]()
    for functions in (MULTIPLICATIONS, ADDITIONS):
        call = get_only_user(result, functions)
        weight = read_constant(network, call.args[1]) if call is not None else None
        if call is None or weight is None or not is_per_channel(weight, channels):
            break
        result = call
        weights.append(weight)
    weight, bias = (*weights, None, None)[:2]
    return result, weight, bias


LAYER_FINDERS: dict[Any, LayerFinder] = {
    OPERATORS["Relu"]: find_activation,
    OPERATORS["LeakyRelu"]: find_activation,
    OPERATORS["PRelu"]: find_prelu,
    OPERATORS["InstanceNormalization"]: _find_norm,
    OPERATORS["GroupNormalization"]: _find_norm,
    OPERATORS["Transpose"]: make_shuffle_finder(RESHAPES),
}
