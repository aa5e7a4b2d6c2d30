"""Layers of a network that was read as a graph of functions, as modules: engines replace and fuse these.

Layers whose values only the next one reads become an `nn.Sequential`, which tells engines the order of calls.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Interpreter, Node

from service.core.errors import BrokenModel
from service.models.architectures import DepthToSpace, SpaceToDepth
from service.models.size_limit import check_elements, limit_sizes

Shape = tuple[int, ...]
Shapes = Mapping[Node, Shape]

INPUT_RANK = 5
# What else than nodes may become Python code: torch writes the code of a graph and runs it.
PLAIN = (bool, int, float, torch.dtype, type(None))
TEXT = re.compile(r"[A-Za-z0-9_ .,>-]*")
# Axes [B, C, z, bz, y, by, x, bx] and [B, K, bz, by, bx, z, y, x] in the order of the result of a pixel shuffle.
INTO_CHANNELS, OUT_OF_CHANNELS = (0, 1, 3, 5, 7, 2, 4, 6), (0, 1, 5, 2, 6, 3, 7, 4)
# Most elements of all values that exist at a time for one window: as float32 they take 32 GiB.
MAX_LIVE_ELEMENTS = 2**33
# What a graph may raise that does not fit its image.
_MISFIT = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, AttributeError)


class Layer(NamedTuple):
    """A module that computes the value of the node `result` of that of `source`."""

    module: nn.Module
    source: Node
    result: Node


FindLayer = Callable[[GraphModule, Node, Shapes], Layer | None]
"""Network, a call in it, and shapes of values as far as they are known -> the layer that the call is a part of."""


def make_graph_module(root: nn.Module, graph: Graph) -> GraphModule:
    """Return a graph as a module, which runs Python code that torch writes of the graph.

    Raise BrokenModel where anything but identifiers, numbers, plain texts and nodes would get into that code.
    """
    for node in graph.nodes:
        names = [node.name, *node.kwargs, *(node.target.split(".") if isinstance(node.target, str) else ())]
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
            raise BrokenModel(f"a call has a name that is none: {max(names, key=len)[:80]!r}.")
        if not _is_plain([*node.args, *node.kwargs.values()]):
            raise BrokenModel(f"{node.name} is called with something else than numbers, plain texts and values.")
    return GraphModule(root, graph)


def _is_plain(value: Any) -> bool:
    """Return whether the code of a value is nothing but nodes, numbers, plain texts and lists of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if type(value) is str:
        return TEXT.fullmatch(value) is not None
    return isinstance(value, Node) or (type(value) in PLAIN and not (type(value) is int and value.bit_length() > 64))


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


def infer_shapes(network: GraphModule, shape: Shape) -> dict[Node, Shape]:
    """Return the shapes of all tensors of a forward of an image of `shape`.

    Raise BrokenModel where it does not run, or a value is larger than a part of a network can be.
    """
    with torch.no_grad(), suppress(*_MISFIT):
        return _ShapeInterpreter(network, "meta").find(shape)
    try:
        # Some graphs run with numbers only.
        with torch.no_grad(), limit_sizes():
            return _ShapeInterpreter(network, "cpu").find(shape)
    except _MISFIT as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BrokenModel(f"it does not take a window of shape {shape}: {reason[0]}") from error


def multiply(a: Any, b: Any) -> Any:
    """Return `a * b`. Raise OverflowError for a whole number that no size can be: a few products make it endless."""
    product = a * b
    if isinstance(product, int) and product.bit_length() > 64:
        raise OverflowError("a size of more than 64 bits")
    return product


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


def make_prelu(slope: Tensor) -> nn.PReLU:
    """Return a PReLU with one slope, or one for each channel."""
    module = nn.PReLU(slope.numel())
    module.weight = nn.Parameter(slope.flatten(), requires_grad=False)
    return module


def make_norm(
    groups: int, channels: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> nn.Module:
    """Return a group norm, with as many groups as channels an instance norm; `weight` and `bias` have C numbers."""
    norm: nn.Module = nn.GroupNorm(groups, channels, eps, affine=False)
    if groups == channels:
        norm = nn.InstanceNorm3d(channels, eps, affine=False)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            norm.register_parameter(name, nn.Parameter(tensor.flatten(), requires_grad=False))
    return norm


def find_shuffle(shapes: Shapes, permute: Node, order: Any, reshapes: Set[Any]) -> Layer | None:
    """Return the pixel shuffle that a reshape, a permute with `order` and a reshape are, None if they are none."""
    before, after = first_input(permute), follow(permute, reshapes)
    if after is None or before.target not in reshapes or len(before.users) > 1:
        return None
    source = first_input(before)
    module = _make_shuffle(shapes.get(source, ()), shapes.get(before, ()), tuple(order))
    if module is None or tuple(module(torch.empty(shapes[source], device="meta")).shape) != shapes.get(after):
        return None
    return Layer(module, source, after)


class _ShapeInterpreter(Interpreter):
    """Runs a graph in float32 on a device, which may be the one without numbers, and keeps the shapes of its values."""

    def __init__(self, network: GraphModule, device: str) -> None:
        super().__init__(network)
        self._device = device
        self.shapes: dict[Node, Shape] = {}
        self._live = 0

    def find(self, shape: Shape) -> dict[Node, Shape]:
        """Return the shapes of all values for an image of `shape`."""
        self.run(torch.zeros(shape, device=self._device))
        return self.shapes

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = tuple(result.shape)
            check_elements(result.shape)
            self._live += result.numel()
            if self._live > MAX_LIVE_ELEMENTS:
                raise BrokenModel(f"{n.name}: more than {MAX_LIVE_ELEMENTS} elements would exist at a time.")
        read = self.user_to_last_uses.get(n, ())
        self._live -= sum(math.prod(self.shapes[each]) for each in read if each in self.shapes)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._convert(super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        state = {name: self._convert(tensor) for name, tensor in module.state_dict().items()}
        return functional_call(module, state, args, kwargs)

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, torch.float32 if tensor.is_floating_point() else tensor.dtype)


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
