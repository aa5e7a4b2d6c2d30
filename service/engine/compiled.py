"""torch.compile with inductor, for one static shape."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch._inductor import list_mode_options

from service.networks import Network


def make(module: nn.Module, mode: str, *, freeze: bool) -> Network:
    """Compile for static shapes; the work happens at the first call, whose errors are RuntimeErrors or OSErrors.

    A module that does not become one graph is such an error too: its pieces would run eagerly and be called compiled.

    mode    a mode of torch.compile: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
    freeze  weights become constants: convolutions are repacked for the CPU's kernels once, not at every call
    """
    options = dict(list_mode_options(mode)) | ({"freezing": True} if freeze else {})
    compiled: Network = torch.compile(module, fullgraph=True, dynamic=False, options=options)
    return compiled


def use_cache(folder: Path) -> None:
    """Keep compiled kernels in `folder`, so that the next start of the same model finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
