"""Compilation with inductor. Importing this module imports torch's compiler, which takes several seconds."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from types import FunctionType
from weakref import finalize

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch.fx import GraphModule
from torch.nn import functional

from service.core.errors import BadParameter
from service.models.network import Network

# Every module is compiled through the same entry function, and by default torch compiles only eight variants of it.
dynamo_config.recompile_limit = 1024
dynamo_config.accumulated_recompile_limit = 1024


def compile_unfrozen(module: nn.Module, mode: str) -> Network:
    """Compile `module` with its weights as graph inputs, so that inductor can reuse cached code after a restart."""
    options = dict(list_mode_options(mode))
    compiled_module: Network = torch.compile(_make_entry(module), fullgraph=True, dynamic=False, options=options)
    return compiled_module


class FrozenNetwork:
    """A module on the CPU, compiled at its first call, with its weights as constants of the graph.

    The compiled graph is called without torch.compile's guards, because the guards fix the number of threads to the
    number at compilation time. Here, the number of threads of a caller depends on how many callers share the cores.
    """

    def __init__(self, module: nn.Module, mode: str) -> None:
        self._module = module
        # Divide loops by the number of threads of the caller, not by the number at compilation time.
        self._options = dict(list_mode_options(mode)) | {"cpp.dynamic_threads": True}
        self._compiled: tuple[Network, torch.Size, tuple[int, ...]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute scores [B, K, z, y, x] of a batch [B, C, z, y, x].

        Raises BadParameter if the shape or the strides differ from those of the first call.
        """
        if self._compiled is None:
            self._compiled = self._compile(x), x.shape, x.stride()
        network, shape, stride = self._compiled
        if x.shape != shape or x.stride() != stride:
            expected_layout, actual_layout = (
                f"{tuple(shape)} with strides {stride}",
                f"{tuple(x.shape)} with strides {x.stride()}",
            )
            raise BadParameter(
                f"This network was compiled for batches of shape {expected_layout}, not {actual_layout}."
            )
        return network(x)

    def _compile(self, x: Tensor) -> Network:
        graphs: list[tuple[Callable[..., Sequence[Tensor]], int]] = []

        def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
            run_graph = lookup_backend("inductor")(_replace_relus(graph), inputs)
            graphs.append((run_graph, len(inputs)))
            return run_graph

        compiled_module: Network = torch.compile(
            _make_entry(self._module), backend=backend, fullgraph=True, dynamic=False
        )
        # Freezing must be enabled before the module is traced. As an option of torch.compile, it would be applied too
        # late and silently ignored.
        with inductor_config.patch(self._options | {"freezing": True}):
            compiled_module(x)
        # torch never releases a backend, so everything left in this list would stay in memory.
        run_graph, input_count = graphs.pop()
        if graphs or input_count != 1:
            raise RuntimeError("torch.compile could not turn the weights into constants of one graph")
        return lambda batch: run_graph(batch)[0]


def _make_entry(module: nn.Module) -> Network:
    """Return a function that calls `module`, with its own code object and globals.

    torch retains compiled code, including weights, as long as the code object from which it was compiled exists. The
    code of the module's `forward` is never released, but the code of this function is released with the network.
    """

    def enter(x: Tensor) -> Tensor:
        scores: Tensor = module(x)
        return scores

    entry = FunctionType(enter.__code__.replace(), {"__builtins__": builtins}, closure=enter.__closure__)
    finalize(entry, reset_code, entry.__code__).atexit = False
    return entry


def _replace_relus(graph: GraphModule) -> GraphModule:
    """Replace every ReLU in the graph with `torch.clamp_min`, in place.

    Inductor fuses a ReLU with the preceding convolution, and oneDNN's fused ReLU turns NaN into 0, which would hide
    non-finite scores. `torch.clamp_min` is not fused and propagates NaN.
    """
    relu_functions = {torch.relu, torch.relu_, functional.relu, functional.relu_}
    for node in graph.graph.nodes:
        if node.target in relu_functions or (node.op == "call_method" and node.target in {"relu", "relu_"}):
            is_in_place = node.target in {"relu_", torch.relu_, functional.relu_} or node.kwargs.get("inplace", False)
            node.op, node.target = "call_function", torch.clamp_min_ if is_in_place else torch.clamp_min
            node.args, node.kwargs = (node.args[0] if node.args else node.kwargs["input"], 0.0), {}
    graph.recompile()
    return graph
