"""An explicit CUDA graph around a network of one fixed shape: a forward becomes one launch.

`reduce-overhead` records graphs of its own; this wrapper is for the eager module, and for modules that inductor splits.
Source: the capture pattern of the PyTorch documentation, "CUDA semantics", section CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from service.core.errors import BadParameter
from service.models.loader import Network

WARM_UP_CALLS = 3


class Recorder(Protocol):
    """Runs work once on a side stream, or records it for replay."""

    def warm_up(self, work: Callable[[], Tensor]) -> None:
        """Run `work` on a side stream, so that lazy initialisation is over before the capture."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record `work`; returns the tensor that every replay fills."""

    def replay(self) -> None:
        """Run what was recorded."""


class CudaRecorder:
    """The real one. Everything happens on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], Tensor]) -> None:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.device(self._device), torch.cuda.graph(self._graph):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class GraphedNetwork:
    """Replays one recorded forward. Input and output buffers are fixed: scores are valid until the next call."""

    def __init__(self, network: Network, example: Tensor, recorder: Recorder) -> None:
        self._input = example.clone()
        self._recorder = recorder
        with torch.inference_mode():
            recorder.warm_up(lambda: network(self._input))
            self._output = recorder.capture(lambda: network(self._input))

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] of the example's shape and dtype -> scores. Raises BadParameter for any other shape."""
        if x.shape != self._input.shape or x.dtype != self._input.dtype:
            have, want = (f"{tuple(t.shape)} {t.dtype}" for t in (x, self._input))
            raise BadParameter(f"This network was recorded for {want} and cannot run {have}.")
        self._input.copy_(x)
        self._recorder.replay()
        return self._output


def make(network: Network, example: Tensor) -> Network:
    """Record `network` for the shape of `example` on its CUDA device."""
    return GraphedNetwork(network, example, CudaRecorder(example.device))
