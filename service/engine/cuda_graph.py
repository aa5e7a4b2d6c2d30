"""An explicit CUDA graph around a network of one fixed shape: a forward becomes one launch.

`reduce-overhead` records graphs of its own; this wrapper is for the eager module, and for modules that inductor splits.
Source: the capture pattern of the PyTorch documentation, "CUDA semantics", section CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from service.core.errors import BadParameter
from service.engine.base import ANY_FORMAT, WARM_UP_CALLS, Backend
from service.models.loader import Network


class CudaGraphBackend(Backend):
    """The eager module, recorded as one CUDA graph."""

    memory_formats: ClassVar = {"cuda": ANY_FORMAT}

    def build(self, module: nn.Module, example: Tensor, /, *_: object) -> Network:
        return GraphedNetwork(module, example)


class CudaRecorder:
    """Recording and replay of work on a CUDA device; tests replace it by one that needs no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], Tensor]) -> None:
        """Run `work` on a side stream, so that lazy initialisation is over before the capture."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record `work`, and return the tensor that every replay fills."""
        with torch.cuda.device(self._device), torch.cuda.graph(self._graph):
            return work()

    def replay(self) -> None:
        """Run the recorded work."""
        self._graph.replay()


class GraphedNetwork:
    """One forward of `network` on batches like `example`, recorded and replayed.

    Input and output buffers are fixed: scores are valid until the next call.
    """

    def __init__(self, network: Network, example: Tensor, recorder: CudaRecorder | None = None) -> None:
        self._input = example.clone()
        self._recorder = recorder or CudaRecorder(example.device)
        with torch.inference_mode():
            self._recorder.warm_up(lambda: network(self._input))
            self._output = self._recorder.capture(lambda: network(self._input))

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] of the example's shape and dtype -> scores. Raises BadParameter for any other shape."""
        if x.shape != self._input.shape or x.dtype != self._input.dtype:
            have, want = (f"{tuple(t.shape)} {t.dtype}" for t in (x, self._input))
            raise BadParameter(f"This network was recorded for {want} and cannot run {have}.")
        self._input.copy_(x)
        self._recorder.replay()
        return self._output
