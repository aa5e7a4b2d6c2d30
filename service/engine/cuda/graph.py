"""An explicit CUDA graph around a network of one fixed shape: a forward becomes one launch.

`reduce-overhead` records graphs of its own, which belong to the thread that compiled; this wrapper records one for any
thread, around the eager or the compiled network.
Source: the capture pattern of the PyTorch documentation, "CUDA semantics", section CUDA graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from service.core.errors import BadParameter
from service.core.hardware import devices
from service.core.sections.computing import Engine as EngineSettings
from service.engine.base import ANY_FORMAT, WARM_UP_CALLS, Backend
from service.engine.compile.torch_compile import compile_module
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network

# What these modes add are CUDA graphs by torch, which cannot be recorded within one of ours.
MODES_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}

# Networks record on the same stream, where work by another thread would become part of the graph.
_recording = threading.Lock()

_failed_graphs: list[Any] = []


class CudaGraphBackend(Backend):
    """The whole network, recorded as one CUDA graph: compiled before that where a mode of torch.compile is given."""

    memory_formats: ClassVar = {"cuda": ANY_FORMAT}

    def __init__(
        self,
        record: Callable[[Network, Tensor], Network] | None = None,
        compile_network: Callable[..., Network] = compile_module,
    ) -> None:
        self._record, self._compile = record or GraphedNetwork, compile_network

    def compile_modes(self, settings: EngineSettings, _device: torch.device) -> tuple[str | None, ...]:
        """Return what is set, and then, where that does not run, none; for `auto` what is ready in seconds first."""
        return (None, "reduce-overhead") if settings.compile_mode == "auto" else (settings.compile_mode, None)

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, _settings: EngineSettings, /) -> Network:
        mode = config.compile_mode
        if mode is None:
            return self._record(module, example)
        return self._record(self._compile(module, MODES_WITHOUT_GRAPHS.get(mode, mode), freeze=False), example)


@cache
def _get_capture_stream(device: torch.device, cuda: Any) -> Any:
    """Return the stream for all captures on a device: cuBLAS keeps a workspace for each stream that it has run on."""
    return cuda.Stream(device)


class CudaRecorder:
    """Recording and replay of work on a CUDA device; tests replace it, or `cuda`, by one that needs no GPU.

    bindings  torch's functions in C++ that end the use of a memory pool
    options   more arguments of `torch.cuda.graph`
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, bindings: Any = torch._C, **options: Any) -> None:
        self._device, self._cuda, self._bindings, self._options = device, cuda, bindings, options
        self._stream = _get_capture_stream(device, cuda)
        self._graph, self._pool = cuda.CUDAGraph(), cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Tensor]) -> None:
        """Run `work` on the side stream, so that lazy initialisation is over before the capture."""
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                work()
        current.wait_stream(self._stream)

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record `work`, and return the tensor that every replay fills."""
        # Requests use CUDA in threads of their own meanwhile; the mode "global" would let their calls fail.
        options = {"pool": self._pool, "capture_error_mode": "thread_local"} | self._options
        capture = self._cuda.graph(self._graph, stream=self._stream, **options)
        try:
            # If the capture fails, `torch.cuda.graph` leaves its stream current; the outer `stream` restores it.
            with self._cuda.device(self._device), self._cuda.stream(self._stream), capture:
                return work()
        except Exception:
            self._release_pool()
            raise

    def _release_pool(self) -> None:
        """Release the memory pool of a capture that failed.

        Before torch 2.12 a capture that CUDA has invalidated leaves the caching allocator in capture mode for good, in
        which `torch.cuda.empty_cache` does nothing (pytorch#180395).
        """
        try:
            self._graph.pool()
        except RuntimeError:
            # The allocator of pinned memory keeps a pointer to this graph, which no function removes.
            _failed_graphs.append(self._graph)
            device = self._device.index or 0
            # RuntimeError: torch has ended it, and releases it with the graph.
            with suppress(RuntimeError):
                self._bindings._cuda_endAllocateToPool(device, self._pool)
                self._bindings._cuda_releasePool(device, self._pool)

    def replay(self) -> None:
        """Run the recorded work."""
        self._graph.replay()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory pool that belongs to the recorded work alone."""
        pool = self._graph.pool()
        segments = self._cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == pool)


class GraphedNetwork:
    """One forward of `network` on batches like `example`, recorded and replayed.

    Input and output buffers are fixed: scores are valid until the next call. `nbytes` is what it keeps for them.
    """

    def __init__(self, network: Network, example: Tensor, recorder: CudaRecorder | None = None) -> None:
        # A replay reads the memory of its weights.
        self._network = network
        self._input = example.clone()
        self._recorder = recorder or CudaRecorder(example.device)
        with torch.inference_mode():
            # Others need not wait while a network is compiled, which the first call does.
            network(self._input)
            with _recording:
                self._recorder.warm_up(lambda: network(self._input))
                self._output = self._recorder.capture(lambda: network(self._input))
        self.nbytes = self._input.nbytes + self._recorder.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] of the example's shape and dtype -> scores. Raises BadParameter for any other shape."""
        if x.shape != self._input.shape or x.dtype != self._input.dtype:
            have, want = (f"{tuple(t.shape)} {t.dtype}" for t in (x, self._input))
            raise BadParameter(f"This network was recorded for {want} and cannot run {have}.")
        self._input.copy_(x)
        self._recorder.replay()
        return self._output


class CudaBuild:
    """First calls and memory of a network on a CUDA device; a `DeviceBuild`. Make one before the network."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pools_before = device, devices.count_pools(device)

    def warm_up(self, network: Network, example: Tensor) -> bool:
        """Make the first calls, and return False: recorded graphs write the same memory again."""
        # Scores that are still held would be in the way of graphs that are recorded.
        for _ in range(WARM_UP_CALLS):
            network(example)
        return False

    def count_kept_bytes(self, network: Network, _streams: int) -> int:
        """Return the bytes of buffers and memory pools that came with the network, once its calls are done."""
        torch.cuda.synchronize(self._device)
        return graph_bytes(network, devices.count_pools(self._device) - self._pools_before)

    def count_score_bytes(self, _network: Network) -> None:
        """Return None: a forward allocates more than scores."""


def graph_bytes(network: Network, pools: int) -> int:
    """Return the bytes that a recorded network keeps beside its weights.

    pools  bytes of memory pools that came with it: torch.compile records graphs of its own
    """
    return network.nbytes if isinstance(network, GraphedNetwork) else max(pools, 0)
