"""CUDA streams, one for each device and purpose, made once.

A new stream for each request would do harm in two ways. The caching allocator reuses freed memory only on the stream
that it was allocated on (pytorch#97419), so each request would allocate from the driver again and leave its memory
reserved. And torch hands out 32 streams of a device in turn (pytorch#173729), so the 33rd would be the stream that
captures graphs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

Purpose = Literal["capture", "prepare", "decode"]


@cache
def get_stream(device: torch.device, purpose: Purpose, cuda: Any = torch.cuda) -> Any:  # noqa: ARG001 - key of the cache
    """Return the stream of a CUDA device for one purpose; tests replace `cuda`.

    All captures share one, since cuBLAS keeps a workspace for every stream that it has run on.
    """
    return cuda.Stream(device)
