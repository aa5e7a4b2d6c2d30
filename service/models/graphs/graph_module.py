"""A graph of calls, read from a file, as a torch module, and the shapes of its values within limits."""

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

# What else than nodes may become Python code: torch writes the code of a graph and runs it.
PLAIN = (bool, int, float, torch.dtype, type(None))
TEXT = re.compile(r"[A-Za-z0-9_ .,>-]*")
# Most elements of all values that exist at a time for one window: as float32 they take 32 GiB.
MAX_LIVE_ELEMENTS = 2**33
# What a graph may raise that does not fit its image.
_MISFIT = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, AttributeError)


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


def check_elements(shape: Sequence[int]) -> None:
    """Raise BrokenModel where a value of this shape has more than `MAX_ELEMENTS`."""
    if math.prod(shape) > MAX_ELEMENTS:
        raise BrokenModel(f"makes a value of {tuple(shape)}, too large for a part of a network.")


def multiply(a: Any, b: Any) -> Any:
    """Return `a * b`. Raise OverflowError for a whole number that no size can be: a few products make it endless."""
    product = a * b
    if isinstance(product, int) and product.bit_length() > 64:
        raise OverflowError("a size of more than 64 bits")
    return product


@contextmanager
def limit_sizes() -> Iterator[None]:
    """Raise BrokenModel, as long as the context lasts, for an operator of torch whose result would be too large.

    Each operator runs without numbers first, so that no memory is taken for what is refused.
    """
    with _SizeLimit():  # type: ignore[no-untyped-call]
        yield


class _SizeLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for result in _compute_without_numbers(func, args, kwargs):
            check_elements(result.shape)
        return func(*args, **kwargs)


def _compute_without_numbers(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the results of an operator as meta tensors, none where it cannot run without numbers."""
    args, kwargs = tree_map_only(Tensor, _to_meta, (args, kwargs))
    if any(each.name == "device" for each in func._schema.arguments):
        kwargs["device"] = torch.device("meta")
    try:
        return [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    except _MISFIT:
        return []


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
