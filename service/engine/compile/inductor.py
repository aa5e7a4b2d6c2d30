"""Compiling with inductor; importing this module imports torch's compiler, which takes seconds."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from types import FunctionType
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
from service.models.network import Network

# All modules are entered through the same function, of which torch would compile eight variants and no more.
dynamo.recompile_limit = 1024
dynamo.accumulated_recompile_limit = 1024


def compile_unfrozen(module: nn.Module, mode: str) -> Network:
    """Compile `module` with its weights as inputs of the graph, so that inductor's cache keeps it between starts."""
    options = dict(list_mode_options(mode))
    compiled: Network = torch.compile(_make_entry(module), fullgraph=True, dynamic=False, options=options)
    return compiled


class FrozenNetwork:
    """A module on the CPU, compiled at its first call, with its weights as constants of the graph.

    The compiled graph is called without torch.compile's guards: they would hold it to the number of threads that it was
    compiled with, while several callers share the cores, and one that is alone has them all.
    """

    def __init__(self, module: nn.Module, mode: str) -> None:
        self._module = module
        # Loops are divided among the threads that the caller has, instead of those at compilation.
        self._options = dict(list_mode_options(mode)) | {"cpp.dynamic_threads": True}
        self._compiled: tuple[Network, torch.Size, tuple[int, ...]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, K, z, y, x]. Raises BadParameter for another shape or layout than the first call's."""
        if self._compiled is None:
            self._compiled = self._compile(x), x.shape, x.stride()
        network, shape, stride = self._compiled
        if x.shape != shape or x.stride() != stride:
            want, have = f"{tuple(shape)} in strides of {stride}", f"{tuple(x.shape)} in strides of {x.stride()}"
            raise BadParameter(f"This network was compiled for {want}, and cannot run {have}.")
        return network(x)

    def _compile(self, x: Tensor) -> Network:
        graphs: list[tuple[Callable[..., Sequence[Tensor]], int]] = []

        def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
            run = lookup_backend("inductor")(_keep_nan(graph), inputs)
            graphs.append((run, len(inputs)))
            return run

        compiled: Network = torch.compile(_make_entry(self._module), backend=backend, fullgraph=True, dynamic=False)
        # Freezing must be on while the module is traced already: as an option of torch.compile it comes too late, and
        # silently does nothing.
        with inductor.patch(self._options | {"freezing": True}):
            compiled(x)
        # torch keeps every backend for good, and with it whatever this list holds.
        run, inputs = graphs.pop()
        if graphs or inputs != 1:
            raise RuntimeError("weights could not be made constants of the compiled graph")
        return lambda batch: run(batch)[0]


def _make_entry(module: nn.Module) -> Network:
    """Return a function that calls `module`, with code and globals of its own.

    torch keeps compiled code, weights included, for as long as the code object that it compiled. The module's own
    forward lives for ever; this function's code goes with the network.
    """

    def enter(x: Tensor) -> Tensor:
        scores: Tensor = module(x)
        return scores

    entry = FunctionType(enter.__code__.replace(), {"__builtins__": builtins}, closure=enter.__closure__)
    finalize(entry, reset_code, entry.__code__).atexit = False
    return entry


def _keep_nan(graph: GraphModule) -> GraphModule:
    """Replace every ReLU of the graph by a maximum with 0, in place.

    Inductor fuses a ReLU with the convolution before it, and oneDNN's fused ReLU turns NaN into 0: scores that are not
    finite would go unnoticed. A maximum is not fused and propagates NaN.
    """
    functions = {torch.relu, torch.relu_, functional.relu, functional.relu_}
    for node in graph.graph.nodes:
        if node.target in functions or (node.op == "call_method" and node.target in {"relu", "relu_"}):
            in_place = node.target in {"relu_", torch.relu_, functional.relu_} or node.kwargs.get("inplace", False)
            node.op, node.target = "call_function", torch.clamp_min_ if in_place else torch.clamp_min
            node.args, node.kwargs = (node.args[0] if node.args else node.kwargs["input"], 0.0), {}
    graph.recompile()
    return graph
