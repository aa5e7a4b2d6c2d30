"""torch.compile itself, imported with the first network that is compiled: that takes seconds, and many need none."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config as dynamo
from torch._dynamo import lookup_backend
from torch._inductor import config as inductor
from torch._inductor import list_mode_options
from torch.fx import GraphModule
from torch.nn import functional

from service.core.errors import BadParameter
from service.models.loader import Network

# All modules are entered through the same forward, of which torch would compile eight variants and no more.
dynamo.recompile_limit = 1024
dynamo.accumulated_recompile_limit = 1024


def make(module: nn.Module, mode: str, *, freeze: bool) -> Network:
    """See `service.engine.torch_compile.make`."""
    options = dict(list_mode_options(mode))
    if freeze:
        return _Frozen(module, options)
    compiled: Network = torch.compile(_entry(module), fullgraph=True, dynamic=False, options=options)
    return compiled


def _entry(module: nn.Module) -> Network:
    """A way into the module with code and globals of its own, and with them what torch keeps of its compilation.

    That of the module's own code would be there for ever, weights included. This is let go of with the network.
    """

    def enter(x: Tensor) -> Tensor:
        scores: Tensor = module(x)
        return scores

    own = FunctionType(enter.__code__.replace(), {"__builtins__": builtins}, closure=enter.__closure__)
    finalize(own, reset_code, own.__code__).atexit = False
    return own


class _Frozen:
    """A module on the CPU whose weights are constants of its graph.

    Once compiled, the graph is called without torch.compile's guards: they would hold it to the number of threads that
    it was compiled with, while several callers share the cores, and one that is alone has them all.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._module = module
        # Loops are cut for the threads that the caller has, instead of those that were there when it was compiled.
        self._options = options | {"cpp.dynamic_threads": True}
        self._compiled: tuple[Network, torch.Size, tuple[int, ...]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Raises BadParameter for another shape or layout than that of the first call."""
        if self._compiled is None:
            self._compiled = self._compile(x), x.shape, x.stride()
        network, shape, stride = self._compiled
        if x.shape != shape or x.stride() != stride:
            this, that = f"{tuple(shape)} in strides of {stride}", f"{tuple(x.shape)} in strides of {x.stride()}"
            raise BadParameter(f"This network was compiled for {this}, and cannot run {that}.")
        return network(x)

    def _compile(self, x: Tensor) -> Network:
        made: list[tuple[Callable[..., Sequence[Tensor]], int]] = []

        def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
            run = lookup_backend("inductor")(_keep_nan(graph), inputs)
            made.append((run, len(inputs)))
            return run

        compiled: Network = torch.compile(_entry(self._module), backend=backend, fullgraph=True, dynamic=False)
        # Freezing must be on while the module is traced already: as an option of torch.compile it comes too late, and
        # silently does nothing.
        with inductor.patch(self._options | {"freezing": True}):
            compiled(x)
        # torch keeps every backend for good, and with it whatever this list holds.
        run, inputs = made.pop()
        if made or inputs != 1:
            raise RuntimeError("weights could not be made constants of the compiled graph")
        return lambda batch: run(batch)[0]


def _keep_nan(graph: GraphModule) -> GraphModule:
    """Rectifiers as maxima, in place: inductor fuses a convolution with the former, and oneDNN's makes zero of NaN.

    It would be lost then in the middle of a network, and with it the news that scores are wrong.
    """
    functions = {torch.relu, torch.relu_, functional.relu, functional.relu_}
    for node in graph.graph.nodes:
        if node.target in functions or (node.op == "call_method" and node.target in {"relu", "relu_"}):
            in_place = node.target in {"relu_", torch.relu_, functional.relu_} or node.kwargs.get("inplace", False)
            node.op, node.target = "call_function", torch.clamp_min_ if in_place else torch.clamp_min
            node.args, node.kwargs = (node.args[0] if node.args else node.kwargs["input"], 0.0), {}
    graph.recompile()
    return graph
