"""Replace the calls in a graph that make up layers with layer modules, which engines can replace and fuse.

A finder recognizes one kind of layer by a call to an ATen operator or to the function that implements an ONNX operator.
Consecutive layers become an `nn.Sequential` if no other call reads the value between them, so that engines know the
order of calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from service.models.architectures.shuffle_unet import DepthToSpace, SpaceToDepth
from service.models.graphs.graph_module import Shape, Shapes, infer_shapes

INPUT_RANK = 5
# Permutations that space-to-depth applies to the axes [B, C, z, bz, y, by, x, bx], and depth-to-space to the axes
# [B, K, bz, by, bx, z, y, x].
SPACE_TO_DEPTH_AXES = (0, 1, 3, 5, 7, 2, 4, 6)
DEPTH_TO_SPACE_AXES = (0, 1, 5, 2, 6, 3, 7, 4)
# ATen's names for arguments with different names in ONNX.
ATEN_ARGUMENT_NAMES = {
    "alpha": "negative_slope",
    "scale": "weight",
    "slope": "weight",
    "epsilon": "eps",
    "perm": "dims",
}


class Layer(NamedTuple):
    """A module that computes the value of the node `result` from the value of the node `source`."""

    module: nn.Module
    source: Node
    result: Node


LayerFinder = Callable[[GraphModule, Node, Shapes], Layer | None]
"""Function (network, call, known shapes) that returns the layer to which the call belongs, or None."""


def add_layers(
    network: GraphModule,
    window_shape: Sequence[int],
    finders: Mapping[Any, LayerFinder],
    add_functions: Set[Any],
    batch_size: int = 1,
) -> GraphModule:
    """Return the network with layer modules, and with sequences for consecutive layers.

    window_shape   shape [C, z, y, x] of the windows that the network processes
    finders        maps the function called by each kind of layer to the finder for that layer
    add_functions  functions that each add two values
    batch_size     number of windows that the network accepts
    """
    graph = network.graph
    graph.eliminate_dead_code()
    shapes = infer_shapes(network, (batch_size, *window_shape))
    for node in list(graph.nodes):
        find_layer = finders.get(node.target) if node.op == "call_function" else None
        layer = find_layer(network, node, shapes) if find_layer is not None else None
        if layer is not None:
            shapes[_insert_layer(network, layer)] = shapes.get(layer.result, ())
    graph.eliminate_dead_code()
    _join_layers(network)
    _add_in_place(network, add_functions)
    graph.lint()
    # A new module has only the attributes that its nodes use.
    return GraphModule(network, graph)


def read_constant(network: GraphModule, argument: Any) -> Tensor | None:
    """Return the constant tensor to which an argument refers, or None for any other argument."""
    if isinstance(argument, Node) and argument.op == "get_attr":
        tensor: Tensor = getattr(network, str(argument.target))
        return tensor
    return None


def get_first_input(node: Node) -> Any:
    """Return the first argument of a call, or None if there is none."""
    return next(iter((*node.args, *node.kwargs.values())), None)


def is_volume(node: Any, shapes: Shapes) -> bool:
    """Return whether a value has a known shape with the axes batch, channel, z, y and x."""
    return len(shapes.get(node, ())) == INPUT_RANK


def get_only_user(node: Node, functions: Set[Any]) -> Node | None:
    """Return the call to one of `functions` that is the only user of a value, or None if there is no such call."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in functions else None


def read_arguments(network: GraphModule, node: Node) -> dict[str, Any]:
    """Return the arguments of a call, including defaults, keyed by ATen's names. Nodes of constants become tensors."""
    if isinstance(node.target, OpOverload):
        schema = node.target._schema.arguments
        arguments = {
            parameter.name: parameter.default_value for parameter in schema if parameter.has_default_value()
        } | node.kwargs
    elif callable(node.target):
        bound_arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound_arguments.apply_defaults()
        arguments = {ATEN_ARGUMENT_NAMES.get(name, name): value for name, value in bound_arguments.arguments.items()}
    else:
        raise TypeError(f"{node.target} is not a call")
    constants = {name: read_constant(network, value) for name, value in arguments.items()}
    return {name: value if constants[name] is None else constants[name] for name, value in arguments.items()}


def make_convolution(
    weight: Tensor, bias: Tensor | None, *, groups: int, transposed: bool = False, **settings: Any
) -> nn.Conv3d | nn.ConvTranspose3d:
    """Return an `nn.Conv3d`, or an `nn.ConvTranspose3d`, whose parameters are `weight` and `bias`.

    The shape of `weight` is [out, in / groups, z, y, x], or [in, out / groups, z, y, x] for a transposed convolution.
    `settings` are additional keyword arguments of the module.
    """
    module_type: Any = nn.ConvTranspose3d if transposed else nn.Conv3d
    channels = (weight.shape[1] * groups, weight.shape[0])
    with torch.device("meta"):
        module: nn.Conv3d | nn.ConvTranspose3d = module_type(
            *(reversed(channels) if transposed else channels),
            tuple(weight.shape[2:]),
            groups=groups,
            bias=False,
            **settings,
        )
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return module


def make_norm(groups: int, weight: Tensor | None, bias: Tensor | None, *, channels: int, eps: float) -> nn.Module:
    """Return a group norm, or an instance norm if there are as many groups as channels.

    `weight` and `bias` have one element per channel or per group.
    """
    norm: nn.Module = nn.GroupNorm(groups, channels, eps, affine=False)
    if groups == channels:
        norm = nn.InstanceNorm3d(channels, eps, affine=False)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            channel_values = tensor.flatten().repeat_interleave(channels // tensor.numel())
            norm.register_parameter(name, nn.Parameter(channel_values, requires_grad=False))
    return norm


def find_activation(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find a ReLU or LeakyReLU."""
    source = get_first_input(node)
    is_in_place = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    # An in-place call changes its source, and any tensor of which the source is a view, for all other calls.
    is_only_user = source.op == "call_module" and len(source.users) == 1
    if not is_volume(source, shapes) or (is_in_place and not is_only_user):
        return None
    slope = read_arguments(network, node).get("negative_slope")
    return Layer(nn.ReLU() if slope is None else nn.LeakyReLU(slope), source, node)


def find_prelu(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find a PReLU with one slope or one slope per channel."""
    source, slope = get_first_input(node), read_arguments(network, node)["weight"]
    if not isinstance(slope, Tensor) or not is_volume(source, shapes):
        return None
    # ONNX broadcasts slopes along the last axes of the image. ATen expects one slope per channel.
    if slope.numel() > 1 and not isinstance(node.target, OpOverload) and not is_per_channel(slope, shapes[source][1]):
        return None
    module = nn.PReLU(slope.numel())
    module.weight = nn.Parameter(slope.flatten(), requires_grad=False)
    return Layer(module, source, node)


def is_per_channel(tensor: Tensor, channels: int) -> bool:
    """Return whether a tensor has one element per channel and broadcasts along the channels of a volume."""
    return tensor.numel() == channels and tuple(tensor.shape[-4:]) == (channels, 1, 1, 1)


def find_norm(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find an instance or group norm with constant weights and without running statistics."""
    settings, source = read_arguments(network, node), get_first_input(node)
    weight, bias = settings["weight"], settings["bias"]
    is_unsupported = isinstance(weight, Node) or isinstance(bias, Node) or settings.get("running_mean") is not None
    if is_unsupported or not is_volume(source, shapes):
        return None
    channels = shapes[source][1]
    norm = make_norm(settings.get("num_groups", channels), weight, bias, channels=channels, eps=settings["eps"])
    return Layer(norm, source, node)


def make_shuffle_finder(reshapes: Set[Any]) -> LayerFinder:
    """Return a finder of pixel shuffles, which consist of a reshape, a permutation and a reshape."""

    def find_shuffle(network: GraphModule, permute: Node, shapes: Shapes) -> Layer | None:
        first_reshape, second_reshape = get_first_input(permute), get_only_user(permute, reshapes)
        if second_reshape is None or first_reshape.target not in reshapes or len(first_reshape.users) > 1:
            return None
        source, order = get_first_input(first_reshape), tuple(read_arguments(network, permute)["dims"])
        module = _make_shuffle(shapes.get(source, ()), shapes.get(first_reshape, ()), order)
        if module is None or tuple(module(torch.empty(shapes[source], device="meta")).shape) != shapes.get(
            second_reshape
        ):
            return None
        return Layer(module, source, second_reshape)

    return find_shuffle


def _insert_layer(network: GraphModule, layer: Layer) -> Node:
    """Replace the computation of a layer's result with a call to its module, and return that call."""
    name = f"layer_{layer.result.name}"
    network.add_module(name, layer.module)
    with network.graph.inserting_before(layer.result):
        call = network.graph.call_module(name, (layer.source,))
    layer.result.replace_all_uses_with(call)
    network.graph.erase_node(layer.result)
    return call


def _make_shuffle(shape: Shape, split_shape: Shape, axes: tuple[Any, ...]) -> SpaceToDepth | DepthToSpace | None:
    """Return the pixel shuffle that reshapes an image of `shape` to `split_shape` and permutes `axes`, or None."""
    if len(shape) != INPUT_RANK or len(split_shape) != 8:
        return None
    spatial_size = shape[2:]
    if axes == SPACE_TO_DEPTH_AXES:
        block = split_shape[3::2]
        split_sizes = tuple(
            size for length, step in zip(spatial_size, block, strict=True) for size in (length // step, step)
        )
        return SpaceToDepth(block) if split_shape == (*shape[:2], *split_sizes) else None
    if axes == DEPTH_TO_SPACE_AXES:
        return (
            DepthToSpace(split_shape[2:5]) if (split_shape[0], *split_shape[5:]) == (shape[0], *spatial_size) else None
        )
    return None


def _join_layers(network: GraphModule) -> None:
    """Join two layers into an `nn.Sequential` if only the second layer reads the result of the first layer."""
    for node in list(network.graph.nodes):
        previous_call = node.args[0] if node.op == "call_module" else None
        if not isinstance(previous_call, Node) or previous_call.op != "call_module" or len(previous_call.users) > 1:
            continue
        first, second = (network.get_submodule(str(call.target)) for call in (previous_call, node))
        if isinstance(first, nn.Sequential):
            first.append(second)
        else:
            setattr(network, str(previous_call.target), nn.Sequential(first, second))
        node.replace_all_uses_with(previous_call)
        network.graph.erase_node(node)


def _add_in_place(network: GraphModule, add_functions: Set[Any]) -> None:
    """Compute sums in place if only the sum reads its later term, because allocating memory for a sum takes time."""
    order = {node: index for index, node in enumerate(network.graph.nodes)}
    for node in network.graph.nodes:
        terms = sorted(node.all_input_nodes, key=order.__getitem__)
        # Sums with additional arguments, such as a factor of one term, cannot be replaced.
        if node.target in add_functions and len(terms) == len({*node.args, *node.kwargs.values()}) == 2:
            earlier_term, later_term = terms
            if len(later_term.users) == 1 and _owns_result(network, later_term):
                node.target, node.args, node.kwargs = add_into, (later_term, earlier_term), {}


def _owns_result(network: GraphModule, node: Node) -> bool:
    """Return whether a node is a layer whose result does not share memory with its input.

    The results of some shuffles share memory with their inputs.
    """
    if node.op != "call_module":
        return False
    module = network.get_submodule(str(node.target))
    layers = module if isinstance(module, nn.Sequential) else (module,)
    return not all(isinstance(layer, SpaceToDepth | DepthToSpace) for layer in layers)


def add_into(x: Tensor, other: Tensor) -> Tensor:
    """Return `x + other`, computed in place in `x` if both have the same shape and dtype."""
    is_compatible = isinstance(other, Tensor) and (x.shape, x.dtype) == (other.shape, other.dtype)
    return x.add_(other) if is_compatible else x + other
