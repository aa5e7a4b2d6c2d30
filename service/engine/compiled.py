"""torch.compile with inductor, for one static shape."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor import list_mode_options

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
    compiled: Network = torch.compile(module, fullgraph=True, dynamic=False, options=options)
    return _frozen(compiled) if freeze else compiled


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


def use_cache(folder: Path) -> None:
    """Keep compiled kernels in `folder`, so that the next start of the same model finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
