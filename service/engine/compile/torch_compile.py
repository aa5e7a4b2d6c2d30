"""The torch.compile engine for one static shape, and the compiler's process-wide state: counters and generated code."""

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
from service.engine.base import ALL_MEMORY_FORMATS, Backend
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network


class TorchCompileBackend(Backend):
    """The engine that compiles the whole network with torch.compile."""

    # On the CPU, inductor chooses the layout of convolutions itself, so the format of the input hardly matters.
    memory_formats: ClassVar = {"cpu": ("channels_last_3d",), "cuda": ALL_MEMORY_FORMATS}

    def list_compile_modes(self, settings: EngineSettings, device: torch.device) -> tuple[str | None, ...]:
        """Return the modes to try. `auto` means modes with CUDA graphs on a GPU, and the default mode on a CPU."""
        if settings.compile_mode != "auto":
            return (settings.compile_mode,)
        if device.type != "cuda":
            return ("default",)
        return ("reduce-overhead", "max-autotune") if settings.kind == "auto" else ("reduce-overhead",)

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, settings: EngineSettings, /) -> Network:
        freeze = settings.freeze and example.device.type == "cpu"
        return compile_module(module, config.compile_mode or "default", freeze=freeze)


def explain_missing_compiler() -> str | None:
    """Explain which requirement of torch.compile on a CPU is missing and how to install it; None if none is missing."""
    compiler = (os.environ.get("CXX") or "g++").split()[0]
    if shutil.which(compiler) is None:
        return f"torch.compile on a CPU needs a C++ compiler, but {compiler} was not found; install g++ or set CXX"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"torch.compile on a CPU needs Python's headers, but {header} does not exist; install python3-dev"
    return None


def compile_module(module: nn.Module, mode: str, *, freeze: bool) -> Network:
    """Return a compiled module for static shapes. It is compiled at the first call.

    The first call raises RuntimeError or OSError if compilation fails. Compilation to more than one graph counts as a
    failure, because code between the graphs would silently run eagerly.

    mode    mode of torch.compile: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs
    freeze  whether weights become constants, so that the weights of convolutions are packed for the CPU only once, and
            convolutions are fused with the layers that follow
    """
    from service.engine.compile import inductor  # noqa: PLC0415 - slow, and many services never compile

    if freeze:
        return inductor.FrozenNetwork(module, mode)
    return inductor.compile_unfrozen(module, mode)


def count_graphs() -> int:
    """Return how many graphs this process has compiled. Each graph added during serving is a recompilation."""
    # Nothing has been compiled before torch._dynamo is imported. The import may still be in progress.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


class LoadingLock:
    """A lock that lets only one model load at a time, and counts the graphs compiled while no model is loading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graph_count_at_entry: int | None = None
        # Graphs compiled before serving began do not count as recompilations.
        self._expected_graph_count = count_graphs()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._graph_count_at_entry = count_graphs()

    def __exit__(self, *_: object) -> None:
        self._expected_graph_count += count_graphs() - (self._graph_count_at_entry or 0)
        self._graph_count_at_entry = None
        self._lock.release()

    @property
    def recompilation_count(self) -> int:
        """Number of graphs that were compiled while no model was loading."""
        graph_count_at_entry = self._graph_count_at_entry
        return (count_graphs() if graph_count_at_entry is None else graph_count_at_entry) - self._expected_graph_count


def drop_generated_code() -> None:
    """Drop inductor's references to generated code, so that it is freed together with the networks that use it.

    Frozen weights are part of that code. Inductor stores every generated module in its own list and in `sys.modules`.
    Modules still in use stay alive through the functions that the networks hold.
    """
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if cache is None:
        return
    for module in cache.modules:
        sys.modules.pop(module.__name__, None)
    cache.cache_clear()


def set_cache_folder(folder: Path) -> None:
    """Store compiled kernels in `folder`, so that later starts with the same model reuse them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
