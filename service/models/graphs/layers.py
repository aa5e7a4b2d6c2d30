"""Layers of a network that was read as a graph of calls, as modules: engines replace and fuse these.

A finder recognises one kind of layer by a call, whether of an operator of ATen or of a function for one of ONNX. Layers
whose values only the next one reads become an `nn.Sequential`, which tells engines the order of calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from service.models.architectures import DepthToSpace, SpaceToDepth
from service.models.graphs.graph_module import Shape, Shapes, infer_shapes

INPUT_RANK = 5
# Axes [B, C, z, bz, y, by, x, bx] and [B, K, bz, by, bx, z, y, x] in the order of the result of a pixel shuffle.
INTO_CHANNELS, OUT_OF_CHANNELS = (0, 1, 3, 5, 7, 2, 4, 6), (0, 1, 5, 2, 6, 3, 7, 4)
# ATen's names for arguments that ONNX calls otherwise.
ATEN_NAMES = {"alpha": "negative_slope", "scale": "weight", "slope": "weight", "epsilon": "eps", "perm": "dims"}


class Layer(NamedTuple):
    """A module that computes the value of the node `result` of that of `source`."""

    module: nn.Module
    source: Node
    result: Node


FindLayer = Callable[[GraphModule, Node, Shapes], Layer | None]
"""Network, a call in it, and shapes of values as far as they are known -> the layer that the call is a part of."""


def add_layers(
    network: GraphModule, window: Sequence[int], finders: Mapping[Any, FindLayer], additions: Set[Any]
) -> GraphModule:
    """Return the network with modules for its layers, in sequences where they follow each other.

    window     [C, z, y, x] that the network is for
    finders    how to find layers, by the function of one of their calls
    additions  functions that add two values
    """
    graph = network.graph
    graph.eliminate_dead_code()
    shapes = infer_shapes(network, (1, *window))
    for node in list(graph.nodes):
        find = finders.get(node.target) if node.op == "call_function" else None
        layer = find(network, node, shapes) if find is not None else None
        if layer is not None:
            shapes[_put_layer(network, layer)] = shapes.get(layer.result, ())
    graph.eliminate_dead_code()
    _join_layers(network)
    _add_in_place(network, additions)
    graph.lint()
    # A new module has no attributes but those that nodes name.
    return GraphModule(network, graph)


def read_constant(network: GraphModule, argument: Any) -> Tensor | None:
    """Return the stored tensor that an argument names, None for anything else."""
    if isinstance(argument, Node) and argument.op == "get_attr":
        tensor: Tensor = getattr(network, str(argument.target))
        return tensor
    return None


def first_input(node: Node) -> Any:
    """Return the first argument of a call."""
    return next(iter((*node.args, *node.kwargs.values())), None)


def is_volume(node: Any, shapes: Shapes) -> bool:
    """Return whether a value is known to have the axes batch, channel, z, y and x."""
    return len(shapes.get(node, ())) == INPUT_RANK


def follow(node: Node, functions: Set[Any]) -> Node | None:
    """Return the only call that reads a value, None where there are several, or where it is of no such function."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in functions else None


def read_arguments(network: GraphModule, node: Node) -> dict[str, Any]:
    """Return the arguments of a call by ATen's names, stored tensors as tensors, defaults included."""
    if isinstance(node.target, OpOverload):
        schema = node.target._schema.arguments
        arguments = {each.name: each.default_value for each in schema if each.has_default_value()} | node.kwargs
    elif callable(node.target):
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        arguments = {ATEN_NAMES.get(name, name): value for name, value in bound.arguments.items()}
    else:
        raise TypeError(f"{node.target} is not a call")
    stored = {name: read_constant(network, value) for name, value in arguments.items()}
    return {name: value if stored[name] is None else stored[name] for name, value in arguments.items()}


def make_convolution(
    weight: Tensor, bias: Tensor | None, *, groups: int, transposed: bool = False, **settings: Any
) -> nn.Conv3d | nn.ConvTranspose3d:
    """Return an `nn.Conv3d`, or an `nn.ConvTranspose3d`, whose parameters are `weight` and `bias`.

    `weight` is [out, in / groups, z, y, x], of a transposed convolution [in, out / groups, z, y, x]. `settings` are
    further keyword arguments of the module.
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
    """Return a group norm, with as many groups as channels an instance norm.

    `weight` and `bias` have a number for each channel, or for each group.
    """
    norm: nn.Module = nn.GroupNorm(groups, channels, eps, affine=False)
    if groups == channels:
        norm = nn.InstanceNorm3d(channels, eps, affine=False)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            numbers = tensor.flatten().repeat_interleave(channels // tensor.numel())
            norm.register_parameter(name, nn.Parameter(numbers, requires_grad=False))
    return norm


def find_activation(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find a ReLU or LeakyReLU."""
    source = first_input(node)
    in_place = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    # Others read what a call in place leaves behind, in the source or in what it is a view of.
    alone = source.op == "call_module" and len(source.users) == 1
    if not is_volume(source, shapes) or (in_place and not alone):
        return None
    slope = read_arguments(network, node).get("negative_slope")
    return Layer(nn.ReLU() if slope is None else nn.LeakyReLU(slope), source, node)


def find_prelu(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find a PReLU with one slope, or one for each channel."""
    source, slope = first_input(node), read_arguments(network, node)["weight"]
    if not isinstance(slope, Tensor) or not is_volume(source, shapes):
        return None
    # ONNX aligns the last axes of slopes with those of the image; ATen counts channels.
    if slope.numel() > 1 and not isinstance(node.target, OpOverload) and not is_per_channel(slope, shapes[source][1]):
        return None
    module = nn.PReLU(slope.numel())
    module.weight = nn.Parameter(slope.flatten(), requires_grad=False)
    return Layer(module, source, node)


def is_per_channel(tensor: Tensor, channels: int) -> bool:
    """Return whether a tensor has one number for each channel of a volume."""
    return tensor.numel() == channels and tuple(tensor.shape[-4:]) == (channels, 1, 1, 1)


def find_norm(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    """Find an instance or group norm with stored weights and without running statistics."""
    settings, source = read_arguments(network, node), first_input(node)
    weight, bias = settings["weight"], settings["bias"]
    computed = isinstance(weight, Node) or isinstance(bias, Node) or settings.get("running_mean") is not None
    if computed or not is_volume(source, shapes):
        return None
    channels = shapes[source][1]
    norm = make_norm(settings.get("num_groups", channels), weight, bias, channels=channels, eps=settings["eps"])
    return Layer(norm, source, node)


def make_shuffle_finder(reshapes: Set[Any]) -> FindLayer:
    """Return a finder of the pixel shuffles that a reshape, a permute and a reshape are."""

    def find_shuffle(network: GraphModule, permute: Node, shapes: Shapes) -> Layer | None:
        before, after = first_input(permute), follow(permute, reshapes)
        if after is None or before.target not in reshapes or len(before.users) > 1:
            return None
        source, order = first_input(before), tuple(read_arguments(network, permute)["dims"])
        module = _make_shuffle(shapes.get(source, ()), shapes.get(before, ()), order)
        if module is None or tuple(module(torch.empty(shapes[source], device="meta")).shape) != shapes.get(after):
            return None
        return Layer(module, source, after)

    return find_shuffle


def _put_layer(network: GraphModule, layer: Layer) -> Node:
    """Call the module of a layer instead of what computes its result, and return that call."""
    name = f"layer_{layer.result.name}"
    network.add_module(name, layer.module)
    with network.graph.inserting_before(layer.result):
        call = network.graph.call_module(name, (layer.source,))
    layer.result.replace_all_uses_with(call)
    network.graph.erase_node(layer.result)
    return call


def _make_shuffle(shape: Shape, split: Shape, axes: tuple[Any, ...]) -> SpaceToDepth | DepthToSpace | None:
    """Return the shuffle of an image of `shape` that reshapes it to `split` and permutes `axes`, None if none does."""
    if len(shape) != INPUT_RANK or len(split) != 8:
        return None
    edges = shape[2:]
    if axes == INTO_CHANNELS:
        block = split[3::2]
        voxels = tuple(size for edge, step in zip(edges, block, strict=True) for size in (edge // step, step))
        return SpaceToDepth(block) if split == (*shape[:2], *voxels) else None
    if axes == OUT_OF_CHANNELS:
        return DepthToSpace(split[2:5]) if (split[0], *split[5:]) == (shape[0], *edges) else None
    return None


def _join_layers(network: GraphModule) -> None:
    """Make an `nn.Sequential` of every two layers of which the second alone reads what the first one gives."""
    for node in list(network.graph.nodes):
        before = node.args[0] if node.op == "call_module" else None
        if not isinstance(before, Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        first, second = (network.get_submodule(str(each.target)) for each in (before, node))
        if isinstance(first, nn.Sequential):
            first.append(second)
        else:
            setattr(network, str(before.target), nn.Sequential(first, second))
        node.replace_all_uses_with(before)
        network.graph.erase_node(node)


def _add_in_place(network: GraphModule, additions: Set[Any]) -> None:
    """Add into the later of two terms that a layer makes for the sum alone: memory for the sum takes time."""
    order = {node: index for index, node in enumerate(network.graph.nodes)}
    for node in network.graph.nodes:
        terms = sorted(node.all_input_nodes, key=order.__getitem__)
        # Other arguments, such as a factor of one term, make another sum.
        if node.target in additions and len(terms) == len({*node.args, *node.kwargs.values()}) == 2:
            other, last = terms
            if len(last.users) == 1 and _owns_result(network, last):
                node.target, node.args, node.kwargs = add_into, (last, other), {}


def _owns_result(network: GraphModule, node: Node) -> bool:
    """Return whether a node is a layer whose result has memory of its own; shuffles of single voxels have none."""
    if node.op != "call_module":
        return False
    module = network.get_submodule(str(node.target))
    layers = module if isinstance(module, nn.Sequential) else (module,)
    return not all(isinstance(layer, SpaceToDepth | DepthToSpace) for layer in layers)


def add_into(x: Tensor, other: Tensor) -> Tensor:
    """Return `x + other`, in the memory of `x` where the sum has its shape and dtype."""
    alike = isinstance(other, Tensor) and (x.shape, x.dtype) == (other.shape, other.dtype)
    return x.add_(other) if alike else x + other
