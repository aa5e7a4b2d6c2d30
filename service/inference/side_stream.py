"""A second CUDA stream for one stage of the requests, which does not wait for windows that are launched meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from service.engine.cuda_streams import Purpose, get_stream


class SideStream:
    """The stream of a CUDA device for one purpose, next to the current stream; other devices have none.

    All requests share it. Their threads may use it at the same time, as its work runs in the order of the launches.
    """

    def __init__(self, device: torch.device, purpose: Purpose, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = get_stream(device, purpose, cuda) if device.type == "cuda" else None

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
