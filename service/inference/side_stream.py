"""A stream of its own for a part of a request, which waits for no windows that are launched meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A stream of a CUDA device beside the current one; on another device, which computes in order, it is none."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None

    def current(self) -> AbstractContextManager[object]:
        """Let the work of this thread go to this stream."""
        return nullcontext() if self._stream is None else self._cuda.stream(self._stream)

    def take_over(self, tensor: Tensor) -> None:
        """Let this stream use a tensor of the thread's current one, after all that this has to do by now."""
        if self._stream is not None:
            self._order(tensor, self._cuda.current_stream(self._device), self._stream)

    def hand_over(self, tensor: Tensor) -> None:
        """Let the thread's current stream use a tensor of this one, after all that this has to do by now."""
        if self._stream is not None:
            self._order(tensor, self._stream, self._cuda.current_stream(self._device))

    def _order(self, tensor: Tensor, before: Any, after: Any) -> None:
        # Its memory belongs to the first, which would otherwise use it again as soon as nobody refers to it.
        tensor.record_stream(after)
        after.wait_stream(before)
