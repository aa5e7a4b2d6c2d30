"""torch.compile with inductor, for one static shape."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from torch import nn

from service.models.loader import Network


def make(module: nn.Module, mode: str, *, freeze: bool) -> Network:
    """Compile for static shapes; the work happens at the first call, whose errors are RuntimeErrors or OSErrors.

    A module that does not become one graph is such an error too: its pieces would run eagerly and be called compiled.

    mode    a mode of torch.compile: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
    freeze  weights become constants: convolutions are repacked for the CPU's kernels once, and fused with what follows
    """
    from service.engine import inductor  # noqa: PLC0415 - seconds, of each start of a service that compiles nothing

    return inductor.make(module, mode, freeze=freeze)


def graphs() -> int:
    """How many graphs this process has compiled; while it serves, a further one is a recompilation."""
    # Nothing is compiled before this is imported, which may be about to happen.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


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
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if cache is None:
        return
    for module in cache.modules:
        sys.modules.pop(module.__name__, None)
    cache.cache_clear()


def use_cache(folder: Path) -> None:
    """Keep compiled kernels in `folder`, so that the next start of the same model finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
