"""Build a torch module from a graph of calls that was read from a file, and infer the shapes of its values."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from service.core.errors import BrokenModel
from service.models.network import MAX_ELEMENTS

Shape = tuple[int, ...]
Shapes = Mapping[Node, Shape]

# Permitted types of arguments other than nodes, and the pattern that string arguments must match. Arguments are
# restricted because torch generates and executes Python code for a graph.
PLAIN_TYPES = (bool, int, float, torch.dtype, type(None))
SAFE_STRING = re.compile(r"[A-Za-z0-9_ .,>-]*")
# Maximum total number of elements of all tensors that are in memory at the same time for one window: 32 GiB as float32.
MAX_LIVE_ELEMENTS = 2**33
# Errors that a graph may raise if it cannot process its input.
_GRAPH_ERRORS = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, AttributeError)


def make_graph_module(root: nn.Module, graph: Graph) -> GraphModule:
    """Convert a graph to a module, which runs Python code that torch generates from the graph.

    Raises BrokenModel if anything except identifiers, numbers, plain strings and nodes would become part of that code.
    """
    for node in graph.nodes:
        names = [node.name, *node.kwargs, *(node.target.split(".") if isinstance(node.target, str) else ())]
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
            raise BrokenModel(f"a name in a call is not a valid identifier: {max(names, key=len)[:80]!r}.")
        if not _is_plain([*node.args, *node.kwargs.values()]):
            raise BrokenModel(f"{node.name} has arguments other than numbers, plain strings and values of the graph.")
    return GraphModule(root, graph)


def _is_plain(value: Any) -> bool:
    """Return whether an argument consists only of nodes, numbers, plain strings and lists of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if type(value) is str:
        return SAFE_STRING.fullmatch(value) is not None
    return isinstance(value, Node) or (
        type(value) in PLAIN_TYPES and not (type(value) is int and value.bit_length() > 64)
    )


def infer_shapes(network: GraphModule, shape: Shape) -> dict[Node, Shape]:
    """Return the shapes of all tensors in a forward pass of an image with this shape.

    Raises BrokenModel if the network does not run, or if the size of a tensor exceeds the limits.
    """
    with torch.no_grad(), suppress(*_GRAPH_ERRORS):
        return _ShapeInterpreter(network, "meta").infer_shapes(shape)
    try:
        # Some graphs cannot run on the meta device because they read the values of tensors.
        with torch.no_grad(), limit_sizes():
            return _ShapeInterpreter(network, "cpu").infer_shapes(shape)
    except _GRAPH_ERRORS as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BrokenModel(f"the network does not accept a window of shape {shape}: {reason[0]}") from error


class _ShapeInterpreter(Interpreter):
    """An interpreter that runs a graph in float32, on the CPU or the meta device, and records the shapes of tensors."""

    def __init__(self, network: GraphModule, device: str) -> None:
        super().__init__(network)
        self._device = device
        self.shapes: dict[Node, Shape] = {}
        self._live_elements = 0

    def infer_shapes(self, shape: Shape) -> dict[Node, Shape]:
        """Return the shapes of all tensors for an image with this shape."""
        self.run(torch.zeros(shape, device=self._device))
        return self.shapes

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = tuple(result.shape)
            check_element_count(result.shape)
            self._live_elements += result.numel()
            if self._live_elements > MAX_LIVE_ELEMENTS:
                raise BrokenModel(
                    f"{n.name}: more than {MAX_LIVE_ELEMENTS} elements would be in memory at the same time."
                )
        released_nodes = self.user_to_last_uses.get(n, ())
        self._live_elements -= sum(math.prod(self.shapes[node]) for node in released_nodes if node in self.shapes)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._convert(super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        state = {name: self._convert(tensor) for name, tensor in module.state_dict().items()}
        return functional_call(module, state, args, kwargs)

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, torch.float32 if tensor.is_floating_point() else tensor.dtype)


def check_element_count(shape: Sequence[int]) -> None:
    """Raise BrokenModel if a tensor of this shape has more than `MAX_ELEMENTS` elements."""
    if math.prod(shape) > MAX_ELEMENTS:
        raise BrokenModel(f"a tensor of shape {tuple(shape)} exceeds the limit of {MAX_ELEMENTS} elements.")


def multiply(a: Any, b: Any) -> Any:
    """Return `a * b`. Raises OverflowError if an integer product has more than 64 bits.

    Otherwise, repeated products could exhaust memory.
    """
    product = a * b
    if isinstance(product, int) and product.bit_length() > 64:
        raise OverflowError("a size has more than 64 bits")
    return product


@contextmanager
def limit_sizes() -> Iterator[None]:
    """Within this context, raise BrokenModel for every torch operator whose result would be too large.

    Each operator first runs on the meta device, so that no memory is allocated for a result that is rejected.
    """
    with _SizeLimit():  # type: ignore[no-untyped-call]
        yield


class _SizeLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for result in _compute_on_meta(func, args, kwargs):
            check_element_count(result.shape)
        return func(*args, **kwargs)


def _compute_on_meta(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the results of an operator as meta tensors, or an empty list if it has no meta implementation."""
    args, kwargs = tree_map_only(Tensor, _to_meta, (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs["device"] = torch.device("meta")
    try:
        return [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    except _GRAPH_ERRORS:
        return []


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
