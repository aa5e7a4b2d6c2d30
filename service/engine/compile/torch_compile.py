"""torch.compile with inductor, for one static shape; and what it leaves in the process: counters and generated code."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import threading
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from service.core.sections.computing import Engine as EngineSettings
from service.engine.base import ANY_FORMAT, Backend
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network


class TorchCompileBackend(Backend):
    """torch.compile of the whole network."""

    # On the CPU inductor lays convolutions out by itself, and the input's format matters little.
    memory_formats: ClassVar = {"cpu": ("channels_last_3d",), "cuda": ANY_FORMAT}

    def compile_modes(self, settings: EngineSettings, device: torch.device) -> tuple[str | None, ...]:
        """Return what is set; for `auto`, modes with CUDA graphs on a GPU, where launches cost, else the default."""
        if settings.compile_mode != "auto":
            return (settings.compile_mode,)
        if device.type != "cuda":
            return ("default",)
        return ("reduce-overhead", "max-autotune") if settings.kind == "auto" else ("reduce-overhead",)

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, settings: EngineSettings, /) -> Network:
        freeze = settings.freeze and example.device.type == "cpu"
        return compile_module(module, config.compile_mode or "default", freeze=freeze)


def explain_missing_compiler() -> str | None:
    """Return what torch.compile lacks on a CPU, where it writes C++; None where it has it."""
    compiler = (os.environ.get("CXX") or "g++").split()[0]
    if shutil.which(compiler) is None:
        return f"compiling for a CPU needs a C++ compiler, and there is no {compiler}; install g++, or set CXX"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"compiling for a CPU needs Python's headers, and there is no {header}; install them (python3-dev)"
    return None


def compile_module(module: nn.Module, mode: str, *, freeze: bool) -> Network:
    """Compile for static shapes; the work happens at the first call, whose errors are RuntimeErrors or OSErrors.

    A module that does not become one graph is such an error too: its pieces would run eagerly and be called compiled.

    mode    of torch.compile: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
    freeze  makes weights constants: convolutions are repacked for the CPU's kernels once, and fused with what follows
    """
    from service.engine.compile import inductor  # noqa: PLC0415 - seconds, of each start of a service that compiles nothing

    if freeze:
        return inductor.FrozenNetwork(module, mode)
    return inductor.compile_unfrozen(module, mode)


def count_graphs() -> int:
    """Return how many graphs this process has compiled; while it serves, a further one is a recompilation."""
    # Nothing is compiled before this is imported, which may be about to happen.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


class LoadingLock:
    """A lock under which one model is loaded at a time; it counts graphs that are compiled while nobody holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs_before: int | None = None
        # Graphs that this process compiled before it served are no recompilations.
        self._expected = count_graphs()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._graphs_before = count_graphs()

    def __exit__(self, *_: object) -> None:
        self._expected += count_graphs() - (self._graphs_before or 0)
        self._graphs_before = None
        self._lock.release()

    @property
    def recompilations(self) -> int:
        """Graphs that were compiled while nothing was loaded."""
        before = self._graphs_before
        return (count_graphs() if before is None else before) - self._expected


def drop_generated_code() -> None:
    """Let generated code go with the networks that call it; with it go the weights that were frozen into it.

    Inductor keeps every module that it has generated, in a list of its own and in `sys.modules`. The functions of
    those that are still in use hold what they need.
    """
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if cache is None:
        return
    for module in cache.modules:
        sys.modules.pop(module.__name__, None)
    cache.cache_clear()


def set_cache_folder(folder: Path) -> None:
    """Keep compiled kernels in `folder`, so that the next start of the same model finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
