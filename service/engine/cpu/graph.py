"""The forward pass of a network on a CPU, captured once and replayed as one call, like a CUDA graph.

Each kernel call from Python allocates memory and may wait for the global interpreter lock. Capturing saves a fifth of
the CPU time. A graph is captured while the module runs and StackSeg's kernels report their arguments. The only ATen
operators allowed are views, empty tensors, sums of two tensors, and constants. Intermediate tensors share an arena, in
which each tensor occupies memory, mostly in the caches, only from its first write to its last read.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.core.buffers import ALIGNMENT_BYTES, BufferPool
from service.engine.cpu import strided_conv
from service.engine.cpu.kernel_call import OUT_OF_MEMORY_MESSAGE, SUPPORTED_DTYPES, KernelCall, Kernels, observe_calls
from service.models.network import Network

# Maximum total size in bytes of the unused score buffers that are retained for later calls.
MAX_IDLE_SCORE_BYTES = 2**24

# Place of a tensor's memory: at a fixed address, in the batch, in the scores, or in the arena.
FIXED_ADDRESS, BATCH, SCORES, ARENA = range(4)

KERNELS = Kernels(["stackseg_add"], [("stackseg_replay", "pqpi", "i")])

_ATEN = torch.ops.aten
ALLOCATION_OPERATORS = {
    *(_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}
ADD_OPERATORS = {_ATEN.add.Tensor, _ATEN.add_.Tensor}

# Functions that give Python access to the values of a tensor. Results computed from the values are invisible to ATen.
VALUE_READING_FUNCTIONS: set[Any] = {Tensor.numpy, Tensor.tolist}

log = logging.getLogger(__name__)


class CaptureError(Exception):
    """The network contains an operation that cannot be replayed."""


class CpuGraph:
    """A module captured for batches like `example` [B, C, z, y, x] and for smaller batches, with unchanged scores.

    All other batches are passed to the module itself. Threads may call the graph concurrently; each has its own arena.

    Raises CaptureError if the module cannot be captured, and OSError if the kernels are missing.
    """

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        KERNELS.require()
        self._module = module
        # Layers may pack their weights in the first call, which must not be captured.
        module((batch := _randomize_like(example, 0))[:1])
        batches = [batch[:length] for length in range(1, len(batch) + 1)]
        self._graphs = {example_batch.shape: capture_graph(module, example_batch) for example_batch in batches}
        self._batch_layout = (batch.dtype, batch.stride())
        self.nbytes = max(graph.arena_bytes for graph in self._graphs.values())
        self.score_bytes = self._graphs[batch[:1].shape].score_bytes
        max_score_bytes = max(graph.score_bytes for graph in self._graphs.values())
        self._score_pool = BufferPool(max_score_bytes, MAX_IDLE_SCORE_BYTES // max_score_bytes)
        self._thread_local = threading.local()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute scores [B, K, z, y, x] of a batch [B, C, z, y, x]. Later calls do not overwrite the scores."""
        graph = self._graphs.get(x.shape)
        if graph is None or (x.dtype, x.stride()) != self._batch_layout:
            scores: Tensor = self._module(x)
            return scores
        arena = getattr(self._thread_local, "arena", None)
        if arena is None:
            arena = self._thread_local.arena = Arena(self.nbytes)
        return graph.replay(x, arena, self._score_pool)


class Arena:
    """A memory block of `nbytes` bytes for intermediate tensors, used by one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        # Base address of each place: null for fixed addresses; each forward pass sets the addresses of its batch and
        # scores.
        self.base_addresses = (ctypes.c_void_p * 4)(None, None, None, self.memory.data_ptr())


class CapturedGraph:
    """The recorded kernel calls that compute the scores of a batch.

    encoded_calls   the calls in the encoding of `cpu_graph.cpp`
    call_count      number of calls
    arena_bytes     size of the arena for intermediate tensors
    example_scores  scores tensor from which shape, strides and dtype are taken
    fixed_tensors   tensors whose addresses occur in the encoded calls, referenced to keep the tensors alive
    """

    def __init__(
        self,
        encoded_calls: Sequence[int],
        call_count: int,
        arena_bytes: int,
        example_scores: Tensor,
        fixed_tensors: Sequence[Tensor],
    ) -> None:
        self.call_count, self.arena_bytes = call_count, arena_bytes
        self._calls = (ctypes.c_int64 * len(encoded_calls))(*encoded_calls)
        self._shape, self._strides, self._dtype = example_scores.shape, example_scores.stride(), example_scores.dtype
        self.score_bytes = example_scores.nbytes
        self._fixed_tensors = tuple(fixed_tensors)

    def replay(self, x: Tensor, arena: Arena, pool: BufferPool) -> Tensor:
        """Return the scores of `x`, in memory from the pool. Raises MemoryError."""
        scores = torch.from_numpy(pool.take()).view(self._dtype).as_strided(self._shape, self._strides)
        base_addresses = arena.base_addresses
        base_addresses[BATCH], base_addresses[SCORES] = x.data_ptr(), scores.data_ptr()
        if KERNELS.call("stackseg_replay", self._calls, self.call_count, base_addresses, torch.get_num_threads()):
            raise MemoryError(OUT_OF_MEMORY_MESSAGE)
        return scores


def capture(module: nn.Module, example: Tensor) -> Network:
    """Return `module` captured for batches like `example`, or the module itself if it cannot be captured."""
    try:
        return CpuGraph(module, example)
    except (CaptureError, RuntimeError) as error:
        # TorchScript turns every error into a RuntimeError. A module that cannot run at all raises its own error later.
        log.debug("The network cannot be captured and runs layer by layer: %s", error)
        return module


def capture_graph(module: nn.Module, x: Tensor) -> CapturedGraph:
    """Capture the forward pass of `module` for batches like `x`. Raises CaptureError."""
    recorder = _Recorder(x)
    with _ValueReadingGuard(), recorder, observe_calls(recorder.add_call):
        scores = module(x)
    graph = recorder.make_graph(scores)
    # Check with a different batch: the scores may depend on the first batch in a way that the recorder cannot see.
    other_batch = _randomize_like(x, 1)
    if not torch.equal(
        graph.replay(other_batch, Arena(graph.arena_bytes), BufferPool(graph.score_bytes, 0)), module(other_batch)
    ):
        raise CaptureError("replaying the recorded calls gives different scores")
    return graph


def _randomize_like(batch: Tensor, seed: int) -> Tensor:
    """Return a batch of the same shape and layout, filled with random numbers between 0 and 1."""
    return torch.empty_like(batch).uniform_(generator=torch.Generator().manual_seed(seed))


class _ValueReadingGuard(TorchFunctionMode):
    """A mode that raises CaptureError if Python code reads the values of a tensor."""

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in VALUE_READING_FUNCTIONS:
            raise CaptureError(f"{function.__name__}() cannot be replayed")
        return function(*args, **(kwargs or {}))


class _Buffer:
    """Memory written by each forward pass, and the indices of the first and last call that use it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.first_call = self.last_call = -1
        self.place, self.offset = ARENA, 0

    @property
    def is_in_arena(self) -> bool:
        """Whether the buffer is in the arena and a recorded call uses it."""
        return self.place == ARENA and self.first_call >= 0

    def overlaps(self, other: _Buffer) -> bool:
        """Return whether both buffers are in use at the same time."""
        return self.first_call <= other.last_call and other.first_call <= self.last_call


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that intercepts every ATen operator and records every kernel call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default would import torch's compiler, which takes several seconds.
        return False

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._x = x
        self._calls: list[KernelCall] = []
        # Buffers by address. All tensors are kept alive, so that no address is used twice.
        self._buffers: dict[int, _Buffer] = {}
        self._live_tensors = [x]

    def add_call(self, call: KernelCall) -> None:
        """Record a kernel call."""
        self._calls.append(call)

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and record it if necessary. Raises CaptureError if it cannot be replayed."""
        inputs, result = _list_tensors((args, kwargs)), operator(*args, **(kwargs or {}))
        outputs = _list_tensors(result)
        self._live_tensors += outputs
        if operator in ALLOCATION_OPERATORS:
            self._buffers.update(
                (_get_storage_address(tensor), _Buffer(tensor.untyped_storage().nbytes())) for tensor in outputs
            )
        elif operator in ADD_OPERATORS and _is_plain_sum(args, kwargs):
            self._record_sum(args[0], args[1], result)
        elif operator._schema.is_mutable or not (_are_views(inputs, outputs) or self._is_constant(operator, inputs)):
            raise CaptureError(f"{operator} cannot be replayed")
        return result

    def make_graph(self, scores: Any) -> CapturedGraph:
        """Return the graph of the recorded calls, with the output `scores`. Raises CaptureError."""
        self._set_lifetimes()
        self._find_scores_buffer(scores).place = SCORES
        arena_bytes = _place_in_arena([buffer for buffer in self._buffers.values() if buffer.is_in_arena])
        encoded_calls = [number for call in self._calls for number in self._encode(call)]
        tensors = (tensor for call in self._calls for tensor in call.tensors if tensor is not None)
        fixed_tensors = [tensor for tensor in tensors if not self._is_variable(tensor)]
        return CapturedGraph(encoded_calls, len(self._calls), arena_bytes, scores, fixed_tensors)

    def _find_scores_buffer(self, scores: Any) -> _Buffer:
        """Return the buffer that the scores fill and a kernel writes to. Raises CaptureError if there is none."""
        fills_storage = isinstance(scores, Tensor) and scores.nbytes == scores.untyped_storage().nbytes()
        buffer = self._find_buffer(scores) if fills_storage else None
        if buffer is None or buffer.first_call < 0:
            raise CaptureError("the scores are not a separate tensor written by a kernel")
        return buffer

    def _record_sum(self, first_term: Tensor, second_term: Tensor, total: Tensor) -> None:
        """Record a sum, fused if possible with the kernel call that writes its first term."""
        if _get_storage_address(total) != _get_storage_address(first_term):
            self._buffers[_get_storage_address(total)] = _Buffer(total.untyped_storage().nbytes())
        elif (
            self._calls
            and (fused_call := strided_conv.fuse_addition(self._calls[-1], first_term, second_term)) is not None
        ):
            self._calls[-1] = fused_call
            return
        sizes = (total.numel(), total.dtype == torch.bfloat16)
        self._calls.append(KernelCall(KERNELS, "stackseg_add", (first_term, second_term), total, sizes))

    def _is_variable(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor differ between forward passes."""
        return _get_storage_address(tensor) in self._buffers or _get_storage_address(tensor) == _get_storage_address(
            self._x
        )

    def _is_constant(self, operator: Any, inputs: Sequence[Tensor]) -> bool:
        """Return whether an operator gives the same result in each forward pass."""
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        return not is_random and not any(self._is_variable(tensor) for tensor in inputs)

    def _set_lifetimes(self) -> None:
        """Set the first and last call that use each buffer. Raises CaptureError for calls that cannot be replayed."""
        for index, call in enumerate(self._calls):
            for buffer in (self._find_buffer(tensor) for tensor in call.inputs):
                if buffer is not None and buffer.first_call < 0:
                    raise CaptureError(f"{call.kernel} reads a tensor before it is written")
                if buffer is not None:
                    buffer.last_call = index
            output_buffer = self._find_buffer(call.output)
            if output_buffer is None:
                raise CaptureError(f"{call.kernel} writes to a tensor that the forward pass has not allocated")
            output_buffer.first_call = index if output_buffer.first_call < 0 else output_buffer.first_call
            output_buffer.last_call = index

    def _find_buffer(self, tensor: Tensor | None) -> _Buffer | None:
        """Return the buffer that holds a tensor, or None."""
        return None if tensor is None else self._buffers.get(_get_storage_address(tensor))

    def _encode(self, call: KernelCall) -> Iterator[int]:
        """Yield the numbers that encode a call for `cpu_graph.cpp`."""
        yield from (call.library.get_address(call.kernel), len(call.tensors), len(call.sizes), len(call.reals))
        for tensor in call.tensors:
            yield from (FIXED_ADDRESS, 0) if tensor is None else self._locate(tensor)
        yield from map(int, call.sizes)
        yield from struct.unpack(f"{len(call.reals)}q", struct.pack(f"{len(call.reals)}d", *call.reals))

    def _locate(self, tensor: Tensor) -> tuple[int, int]:
        """Return the place of a tensor, and its offset within that place in bytes."""
        buffer = self._find_buffer(tensor)
        if buffer is not None:
            return buffer.place, buffer.offset + tensor.data_ptr() - _get_storage_address(tensor)
        if self._is_variable(tensor):
            return BATCH, tensor.data_ptr() - self._x.data_ptr()
        return FIXED_ADDRESS, tensor.data_ptr()


def _list_tensors(values: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _get_storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or 0 if torch does not expose it."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _are_views(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return whether all outputs of an operator are views of its inputs."""
    return bool(outputs) and {_get_storage_address(tensor) for tensor in outputs} <= {
        _get_storage_address(tensor) for tensor in inputs
    }


def _is_plain_sum(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether a sum adds two tensors of the same shape, dtype and dense layout, without a scaling factor."""
    first_term, second_term = args[:2]
    if kwargs or len(args) != 2 or not isinstance(second_term, Tensor) or first_term.dtype not in SUPPORTED_DTYPES:
        return False
    is_dense = first_term.is_contiguous() or (
        first_term.dim() == 5 and first_term.is_contiguous(memory_format=torch.channels_last_3d)
    )
    has_same_layout = (first_term.dtype, first_term.shape, first_term.stride()) == (
        second_term.dtype,
        second_term.shape,
        second_term.stride(),
    )
    return is_dense and has_same_layout and first_term.device.type == "cpu"


def _place_in_arena(buffers: Sequence[_Buffer]) -> int:
    """Assign offsets so that buffers in use at the same time do not overlap. Return the size of the arena in bytes."""
    placed_buffers = list[_Buffer]()
    for buffer in sorted(buffers, key=lambda placed: placed.nbytes, reverse=True):
        for neighbor in sorted(
            (placed for placed in placed_buffers if placed.overlaps(buffer)), key=lambda placed: placed.offset
        ):
            if buffer.offset + buffer.nbytes <= neighbor.offset:
                break
            buffer.offset = max(buffer.offset, neighbor.offset + neighbor.nbytes)
        placed_buffers.append(buffer)
    return max((buffer.offset + buffer.nbytes for buffer in placed_buffers), default=0)
