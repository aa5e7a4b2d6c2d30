"""A CUDA graph of a network with one fixed input shape, which turns a forward pass into one launch.

torch.compile's mode `reduce-overhead` also captures CUDA graphs, but only the thread that compiled the network can
replay them. The graph captured here, around the eager or the compiled network, can be replayed by any thread.

Source: the capture pattern in the PyTorch documentation, "CUDA semantics", section CUDA graphs.
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
from service.engine.base import ALL_MEMORY_FORMATS, WARM_UP_CALLS, Backend
from service.engine.compile.torch_compile import compile_module
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network

# Modes of torch.compile that capture CUDA graphs, with the equivalent modes that do not. While a graph is being
# captured, no other graph can be captured.
MODES_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}

# All networks are captured on the same stream. Work that another thread submits to that stream would become part of the
# graph.
_capture_lock = threading.Lock()

# Graphs whose capture failed and that must not be deleted.
_failed_graphs: list[Any] = []


class CudaGraphBackend(Backend):
    """The engine that captures the whole network as one CUDA graph, after compiling it if a compile mode is set."""

    memory_formats: ClassVar = {"cuda": ALL_MEMORY_FORMATS}

    def __init__(
        self,
        record: Callable[[Network, Tensor], Network] | None = None,
        compile_network: Callable[..., Network] = compile_module,
    ) -> None:
        self._record, self._compile = record or GraphedNetwork, compile_network

    def list_compile_modes(self, settings: EngineSettings, _device: torch.device) -> tuple[str | None, ...]:
        """Return the modes to try. For `auto`, None (no compilation) comes first, because it is ready in seconds."""
        return (None, "reduce-overhead") if settings.compile_mode == "auto" else (settings.compile_mode, None)

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, _settings: EngineSettings, /) -> Network:
        mode = config.compile_mode
        if mode is None:
            return self._record(module, example)
        return self._record(self._compile(module, MODES_WITHOUT_GRAPHS.get(mode, mode), freeze=False), example)


@cache
def _get_capture_stream(device: torch.device, cuda: Any) -> Any:
    """Return the stream for all captures on a device. It is shared because cuBLAS holds a workspace for each stream."""
    return cuda.Stream(device)


class CudaRecorder:
    """A recorder that captures and replays work on a CUDA device.

    Tests replace this class, or `cuda`, with a fake that needs no GPU.

    bindings  module with torch's C++ functions that release a memory pool
    options   additional arguments of `torch.cuda.graph`
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, bindings: Any = torch._C, **options: Any) -> None:
        self._device, self._cuda, self._bindings, self._options = device, cuda, bindings, options
        self._stream = _get_capture_stream(device, cuda)
        self._graph, self._pool = cuda.CUDAGraph(), cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Tensor]) -> None:
        """Run `work` on the capture stream, so that lazy initialization is done before the capture."""
        current_stream = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current_stream)
        with self._cuda.stream(self._stream):
            for _ in range(WARM_UP_CALLS):
                work()
        current_stream.wait_stream(self._stream)

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Capture `work`, and return the tensor that every replay fills."""
        # Other threads continue to use CUDA for requests. The capture mode "global" would make their calls fail.
        options = {"pool": self._pool, "capture_error_mode": "thread_local"} | self._options
        capture = self._cuda.graph(self._graph, stream=self._stream, **options)
        try:
            # If the capture fails, `torch.cuda.graph` leaves its stream current. The outer context restores it.
            with self._cuda.device(self._device), self._cuda.stream(self._stream), capture:
                return work()
        except Exception:
            self._release_pool()
            raise

    def _release_pool(self) -> None:
        """Release the memory pool of a failed capture.

        Before torch 2.12, a capture invalidated by CUDA leaves the caching allocator permanently in capture mode, in
        which `torch.cuda.empty_cache` does nothing (pytorch#180395).
        """
        try:
            self._graph.pool()
        except RuntimeError:
            # The allocator of pinned memory holds a pointer to this graph that cannot be removed.
            _failed_graphs.append(self._graph)
            device = self._device.index or 0
            # A RuntimeError means that torch no longer uses the pool, and will release it with the graph.
            with suppress(RuntimeError):
                self._bindings._cuda_endAllocateToPool(device, self._pool)
                self._bindings._cuda_releasePool(device, self._pool)

    def replay(self) -> None:
        """Run the captured work."""
        self._graph.replay()

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory pool used only by the captured work."""
        pool = self._graph.pool()
        segments = self._cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == pool)


class GraphedNetwork:
    """A captured forward pass of `network` on batches like `example`.

    Input and output buffers are fixed, so scores are valid only until the next call. `nbytes` is the size of the memory
    held between calls.
    """

    def __init__(self, network: Network, example: Tensor, recorder: CudaRecorder | None = None) -> None:
        # Keep the network alive: a replay reads its weights.
        self._network = network
        self._input = example.clone()
        self._recorder = recorder or CudaRecorder(example.device)
        with torch.inference_mode():
            # The first call compiles the network, without the lock, so that other captures do not have to wait.
            network(self._input)
            with _capture_lock:
                self._recorder.warm_up(lambda: network(self._input))
                self._output = self._recorder.capture(lambda: network(self._input))
        self.nbytes = self._input.nbytes + self._recorder.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the scores of a batch [B, C, z, y, x]. Raises BadParameter for a different shape or dtype."""
        if x.shape != self._input.shape or x.dtype != self._input.dtype:
            actual, expected = (f"{tuple(t.shape)} {t.dtype}" for t in (x, self._input))
            raise BadParameter(f"This CUDA graph was captured for batches of {expected}, not {actual}.")
        self._input.copy_(x)
        self._recorder.replay()
        return self._output


class CudaBuild:
    """The `DeviceBuild` of CUDA devices. Create it before the network, to measure the memory that the network adds."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool_bytes_before = device, devices.measure_graph_pools(device)

    def warm_up(self, network: Network, example: Tensor) -> bool:
        """Run the warm-up calls, and return False because captured graphs reuse the memory of their scores."""
        # Do not hold the scores: live tensors would interfere with the capture of graphs.
        for _ in range(WARM_UP_CALLS):
            network(example)
        return False

    def count_buffer_bytes(self, network: Network, _stream_count: int) -> int:
        """Return the size in bytes of the buffers and pools that the network has added. Call after `warm_up`."""
        torch.cuda.synchronize(self._device)
        return count_graph_bytes(network, devices.measure_graph_pools(self._device) - self._pool_bytes_before)

    def count_score_bytes(self, _network: Network) -> None:
        """Return None, because a forward pass allocates more than its scores."""


def count_graph_bytes(network: Network, pool_bytes: int) -> int:
    """Return the number of bytes that a captured network holds between calls, excluding its weights.

    pool_bytes  size of the memory pools that the network has added, used if torch.compile captured the graphs
    """
    return network.nbytes if isinstance(network, GraphedNetwork) else max(pool_bytes, 0)
