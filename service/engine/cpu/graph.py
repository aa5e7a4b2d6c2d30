"""The forward of a network on a CPU, captured once and replayed as one call, like a CUDA graph.

Each kernel call from Python allocates memory, and waits for the interpreter's lock where other threads want it: for a
model of some forty layers capturing saves a fifth of the CPU time. A graph is captured while the module runs once. Our
kernels report their arguments; ATen's operators may be nothing but views, empty tensors, sums of two, and constants.
Intermediate tensors share an arena, where each has its place from its first write to its last read, so that memory is
written again while it still is in the caches.
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

from service.core.buffers import ALIGNMENT, BufferPool
from service.engine.cpu import strided_conv
from service.engine.cpu.kernel_call import DTYPES, NO_MEMORY, KernelCall, Kernels, observe_calls
from service.models.network import Network

# Most memory that is kept for later scores.
IDLE_BYTES = 2**24

# Places of tensors: at an address of their own for good, in the batch, in the scores, or in the arena.
FIXED, BATCH, SCORES, ARENA = range(4)

KERNELS = Kernels(["stackseg_add"], [("stackseg_replay", "pqpi", "i")])

_ATEN = torch.ops.aten
EMPTY = {
    *(_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}
SUMS = {_ATEN.add.Tensor, _ATEN.add_.Tensor}

# Values that leave torch by these functions can change the forward unseen by ATen.
LEAVES_TORCH: set[Any] = {Tensor.numpy, Tensor.tolist}

log = logging.getLogger(__name__)


class NotCapturable(Exception):
    """An operation of the network that cannot be replayed."""


class CpuGraph:
    """`module`, captured for batches like `example` [B, C, z, y, x] and for fewer windows; its scores stay the same.

    Other batches go through the module. Several threads may call it at the same time; each has an arena of its own.

    Raises NotCapturable where the module cannot be captured, OSError where the kernels are missing.
    """

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        KERNELS.require()
        self._module = module
        batch = _randomize_like(example, 0)
        beginnings = [batch[:length] for length in range(1, len(batch) + 1)]
        self._graphs = {each.shape: capture_graph(module, each) for each in beginnings}
        self._like = (batch.dtype, batch.stride())
        self.nbytes = max(graph.arena for graph in self._graphs.values())
        self.score_bytes = self._graphs[batch[:1].shape].nbytes
        most = max(graph.nbytes for graph in self._graphs.values())
        self._scores = BufferPool(most, IDLE_BYTES // most)
        self._local = threading.local()

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, K, z, y, x] in memory that later calls do not write."""
        graph = self._graphs.get(x.shape)
        if graph is None or (x.dtype, x.stride()) != self._like:
            scores: Tensor = self._module(x)
            return scores
        arena = getattr(self._local, "arena", None)
        if arena is None:
            arena = self._local.arena = Arena(self.nbytes)
        return graph.replay(x, arena, self._scores)


class Arena:
    """Memory of `nbytes` bytes for intermediate tensors, for one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        # Addresses by place, for the kernel: none for fixed tensors; each forward sets those of batch and scores.
        self.places = (ctypes.c_void_p * 4)(None, None, None, self.memory.data_ptr())


class CapturedGraph:
    """Kernel calls from a batch to its scores.

    numbers  the calls as `cpu_graph.cpp` reads them
    calls    number of calls
    arena    bytes of intermediate tensors
    like     scores, for their shape, strides and dtype
    fixed    tensors whose addresses are among the numbers, kept alive
    """

    def __init__(self, numbers: Sequence[int], calls: int, arena: int, like: Tensor, fixed: Sequence[Tensor]) -> None:
        self.calls, self.arena = calls, arena
        self._numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self._shape, self._strides, self._dtype = like.shape, like.stride(), like.dtype
        self.nbytes = like.nbytes
        self._fixed = tuple(fixed)

    def replay(self, x: Tensor, arena: Arena, pool: BufferPool) -> Tensor:
        """Return the scores of `x`, in memory of the pool. Raises MemoryError."""
        scores = torch.from_numpy(pool.take()).view(self._dtype).as_strided(self._shape, self._strides)
        places = arena.places
        places[BATCH], places[SCORES] = x.data_ptr(), scores.data_ptr()
        if KERNELS.call("stackseg_replay", self._numbers, self.calls, places, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
        return scores


def capture(module: nn.Module, example: Tensor) -> Network:
    """Return `module` captured for batches like `example`, or the module itself where it cannot be captured."""
    try:
        return CpuGraph(module, example)
    except (NotCapturable, RuntimeError) as reason:
        # TorchScript turns every error into a RuntimeError. A module that does not run at all will raise its own later.
        log.debug("The network runs layer by layer: %s", reason)
        return module


def capture_graph(module: nn.Module, x: Tensor) -> CapturedGraph:
    """Capture the forward of `module` for batches like `x`. Raises NotCapturable."""
    recorder = _Recorder(x)
    with _RejectLeavingTorch(), recorder, observe_calls(recorder.add_call):
        scores = module(x)
    graph = recorder.make_graph(scores)
    # Checked with another batch: the scores may depend on this one in a way that was not seen.
    other = _randomize_like(x, 1)
    if not torch.equal(graph.replay(other, Arena(graph.arena), BufferPool(graph.nbytes, 0)), module(other)):
        raise NotCapturable("other scores come of the steps that were seen")
    return graph


def _randomize_like(batch: Tensor, seed: int) -> Tensor:
    """Return a batch of the same shape and layout, of random numbers from 0 to 1."""
    return torch.empty_like(batch).uniform_(generator=torch.Generator().manual_seed(seed))


class _RejectLeavingTorch(TorchFunctionMode):
    """A mode that raises NotCapturable where values leave torch."""

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in LEAVES_TORCH:
            raise NotCapturable(f"{function.__name__}() is no step")
        return function(*args, **(kwargs or {}))


class _Buffer:
    """Memory that each forward writes, and the indices of the first and last call that need it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.first = self.last = -1
        self.place, self.offset = ARENA, 0

    @property
    def is_in_arena(self) -> bool:
        """Whether a recorded call needs it, and its memory is that of the arena."""
        return self.place == ARENA and self.first >= 0

    def overlaps(self, other: _Buffer) -> bool:
        """Return whether both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operator of ATen, and records every kernel call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default would import torch's compiler, which takes seconds.
        return False

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._x = x
        self._calls: list[KernelCall] = []
        # By address. All tensors are kept, so that no address is used twice.
        self._buffers: dict[int, _Buffer] = {}
        self._kept = [x]

    def add_call(self, call: KernelCall) -> None:
        """Record a kernel call."""
        self._calls.append(call)

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and record or check it. Raises NotCapturable."""
        given, result = _tensors((args, kwargs)), operator(*args, **(kwargs or {}))
        made = _tensors(result)
        self._kept += made
        if operator in EMPTY:
            self._buffers.update(
                (_storage_address(tensor), _Buffer(tensor.untyped_storage().nbytes())) for tensor in made
            )
        elif operator in SUMS and _is_plain_sum(args, kwargs):
            self._add(args[0], args[1], result)
        elif operator._schema.is_mutable or not (_is_view(given, made) or self._is_constant(operator, given)):
            raise NotCapturable(f"{operator} is no step")
        return result

    def make_graph(self, scores: Any) -> CapturedGraph:
        """Return the graph of the recorded calls, with the output `scores`. Raises NotCapturable."""
        self._find_lifetimes()
        self._find_scores_buffer(scores).place = SCORES
        arena = _place_in_arena([buffer for buffer in self._buffers.values() if buffer.is_in_arena])
        numbers = [number for call in self._calls for number in self._numbers(call)]
        tensors = (tensor for call in self._calls for tensor in call.tensors if tensor is not None)
        fixed = [tensor for tensor in tensors if not self._varies(tensor)]
        return CapturedGraph(numbers, len(self._calls), arena, scores, fixed)

    def _find_scores_buffer(self, scores: Any) -> _Buffer:
        """Return the buffer that `scores` fill and a kernel writes. Raises NotCapturable."""
        whole = isinstance(scores, Tensor) and scores.nbytes == scores.untyped_storage().nbytes()
        buffer = self._buffer(scores) if whole else None
        if buffer is None or buffer.first < 0:
            raise NotCapturable("scores are no tensor of their own")
        return buffer

    def _add(self, one: Tensor, other: Tensor, total: Tensor) -> None:
        """Record a sum, fused with the kernel that writes its first term where possible."""
        if _storage_address(total) != _storage_address(one):
            self._buffers[_storage_address(total)] = _Buffer(total.untyped_storage().nbytes())
        elif self._calls and (fused := strided_conv.fuse_addition(self._calls[-1], one, other)) is not None:
            self._calls[-1] = fused
            return
        sizes = (total.numel(), total.dtype == torch.bfloat16)
        self._calls.append(KernelCall(KERNELS, "stackseg_add", (one, other), total, sizes))

    def _varies(self, tensor: Tensor) -> bool:
        """Return whether a tensor differs from one forward to the next."""
        return _storage_address(tensor) in self._buffers or _storage_address(tensor) == _storage_address(self._x)

    def _is_constant(self, operator: Any, given: Sequence[Tensor]) -> bool:
        """Return whether an operator has the same result in each forward."""
        random = torch.Tag.nondeterministic_seeded in operator.tags
        return not random and not any(self._varies(tensor) for tensor in given)

    def _find_lifetimes(self) -> None:
        """Set the first and last call that need each buffer. Raises NotCapturable for calls that cannot be replayed."""
        for index, call in enumerate(self._calls):
            for buffer in (self._buffer(tensor) for tensor in call.inputs):
                if buffer is not None and buffer.first < 0:
                    raise NotCapturable(f"{call.kernel} reads what nothing has written")
                if buffer is not None:
                    buffer.last = index
            written = self._buffer(call.output)
            if written is None:
                raise NotCapturable(f"{call.kernel} writes what is not its own")
            written.first = index if written.first < 0 else written.first
            written.last = index

    def _buffer(self, tensor: Tensor | None) -> _Buffer | None:
        """Return the buffer that holds a tensor, None where none does."""
        return None if tensor is None else self._buffers.get(_storage_address(tensor))

    def _numbers(self, call: KernelCall) -> Iterator[int]:
        """Yield the numbers of a call as `cpu_graph.cpp` reads them."""
        yield from (call.library.get_address(call.kernel), len(call.tensors), len(call.sizes), len(call.reals))
        for tensor in call.tensors:
            yield from (FIXED, 0) if tensor is None else self._place(tensor)
        yield from map(int, call.sizes)
        yield from struct.unpack(f"{len(call.reals)}q", struct.pack(f"{len(call.reals)}d", *call.reals))

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        buffer = self._buffer(tensor)
        if buffer is not None:
            return buffer.place, buffer.offset + tensor.data_ptr() - _storage_address(tensor)
        if self._varies(tensor):
            return BATCH, tensor.data_ptr() - self._x.data_ptr()
        return FIXED, tensor.data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, 0 where torch does not tell."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _is_view(given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Return whether all results of an operator are views of its arguments."""
    return bool(made) and {_storage_address(tensor) for tensor in made} <= {
        _storage_address(tensor) for tensor in given
    }


def _is_plain_sum(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether a sum is one of two tensors with the same dense layout."""
    one, other = args[:2]
    if kwargs or len(args) != 2 or not isinstance(other, Tensor) or one.dtype not in DTYPES:
        return False
    dense = one.is_contiguous() or (one.dim() == 5 and one.is_contiguous(memory_format=torch.channels_last_3d))
    alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return dense and alike and one.device.type == "cpu"


def _place_in_arena(buffers: Sequence[_Buffer]) -> int:
    """Give each buffer an offset where no other is needed at the same time; return the bytes of the arena."""
    placed = list[_Buffer]()
    for buffer in sorted(buffers, key=lambda each: each.nbytes, reverse=True):
        for other in sorted((each for each in placed if each.overlaps(buffer)), key=lambda each: each.offset):
            if buffer.offset + buffer.nbytes <= other.offset:
                break
            buffer.offset = max(buffer.offset, other.offset + other.nbytes)
        placed.append(buffer)
    return max((buffer.offset + buffer.nbytes for buffer in placed), default=0)
