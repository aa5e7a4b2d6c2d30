"""torch.compile with inductor, for one static shape."""

from __future__ import annotations

import builtins
import os
import sys
import threading
from pathlib import Path
from types import FunctionType
from weakref import finalize

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import list_mode_options
from torch._inductor.codecache import PyCodeCache

from service.networks import Network

# All modules are entered through the same forward, of which torch would compile eight variants and no more.
dynamo.recompile_limit = 1024
dynamo.accumulated_recompile_limit = 1024


def make(module: nn.Module, mode: str, *, freeze: bool) -> Network:
    """Compile for static shapes; the work happens at the first call, whose errors are RuntimeErrors or OSErrors.

    A module that does not become one graph is such an error too: its pieces would run eagerly and be called compiled.

    mode    a mode of torch.compile: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
    freeze  weights become constants: convolutions are repacked for the CPU's kernels once, and fused with what follows
    """
    options = dict(list_mode_options(mode))
    compiled: Network = torch.compile(_entry(module), fullgraph=True, dynamic=False, options=options)
    return _frozen(compiled) if freeze else compiled


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


def _frozen(compiled: Network) -> Network:
    """Calls with freezing switched on.

    It must be on while the module is traced, which happens in the first call, before the options of torch.compile are
    in force: given as one of them, freezing silently does nothing.
    """

    def call(x: Tensor) -> Tensor:
        with inductor.patch(freezing=True):
            return compiled(x)

    return call


def graphs() -> int:
    """How many graphs this process has compiled; while it serves, a further one is a recompilation."""
    return int(counters["stats"]["unique_graphs"])


class Turn:
    """Lets one model be loaded at a time, and knows how many graphs were compiled at other times: none, hopefully."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: int | None = None
        # Those of this process before it served.
        self._expected = graphs()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._before = graphs()

    def __exit__(self, *_: object) -> None:
        self._expected += graphs() - (self._before or 0)
        self._before = None
        self._lock.release()

    @property
    def recompilations(self) -> int:
        """Graphs that were compiled while nothing was loaded."""
        before = self._before
        return (graphs() if before is None else before) - self._expected


def forget() -> None:
    """Let generated code go with the networks that call it; with it go the weights that were frozen into it.

    Inductor keeps every module that it has generated, in a list of its own and in `sys.modules`. The functions of those
    that are still in use hold what they need.
    """
    for module in PyCodeCache.modules:
        sys.modules.pop(module.__name__, None)
    PyCodeCache.cache_clear()


def use_cache(folder: Path) -> None:
    """Keep compiled kernels in `folder`, so that the next start of the same model finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
