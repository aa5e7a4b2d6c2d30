"""The forward of a network on a CPU as one call, which does not come back to Python between its layers.

Each call of a kernel from Python takes the interpreter's lock twice, for which it waits where other threads want it,
and asks for memory. A tape is recorded while the module runs once: kernels of ours tell what they are called with, and
ATen is asked what it computes, which may be nothing but views, empty memory, sums of two, and constants. What lies
between layers shares an arena, each buffer from when it is written until it was read for the last time.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.core.buffers import ALIGNMENT, BufferPool
from service.engine.cpu import strided_conv
from service.engine.cpu.kernel_call import NO_MEMORY, Call, Steps, overheard
from service.models.loader import Network

# Of memory for scores that waits to be used again.
IDLE_BYTES = 2**24

# Where tensors of a step lie: for good where they are, in the batch, in the scores, or in the arena.
FIXED, BATCH, SCORES, ARENA = range(4)

KERNEL = Steps(
    Path(__file__).with_suffix(".cpp"),
    ["stackseg_add"],
    "Networks are run layer by layer",
    [("stackseg_replay", "pqpi", "i")],
)

_ATEN = torch.ops.aten
EMPTY = {
    *(_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}
SUMS = {_ATEN.add.Tensor, _ATEN.add_.Tensor}

# By which values leave torch: of what they decide or become, no operator of ATen tells.
LEAVE: set[Any] = {Tensor.numpy, Tensor.tolist}

log = logging.getLogger(__name__)


class NotCapturable(Exception):
    """What the network does that is no step of a tape."""


class CpuGraph:
    """`module` for batches like `example` [B, C, z, y, x] or of fewer windows, whose scores are its own to the bit.

    Others go through the module. Several threads may call it at the same time; each has an arena of its own.

    Raises NotCapturable where that cannot be, OSError where the kernel cannot be compiled.
    """

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        KERNEL.load()
        self._module = module
        batch = _some_like(example, 0)
        beginnings = [batch[:length] for length in range(1, len(batch) + 1)]
        self._tapes = {each.shape: record(module, each) for each in beginnings}
        self._like = (batch.dtype, batch.stride())
        self.nbytes = max(tape.arena for tape in self._tapes.values())
        self.score_bytes = self._tapes[batch[:1].shape].nbytes
        most = max(tape.nbytes for tape in self._tapes.values())
        self._scores = BufferPool(most, IDLE_BYTES // most)
        self._own = threading.local()

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, K, z, y, x], which later calls leave alone."""
        tape = self._tapes.get(x.shape)
        if tape is None or (x.dtype, x.stride()) != self._like:
            scores: Tensor = self._module(x)
            return scores
        arena = getattr(self._own, "arena", None)
        if arena is None:
            arena = self._own.arena = Arena(self.nbytes)
        return tape.play(x, arena, self._scores)


class Arena:
    """So many bytes for what lies between the layers, for one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        # As the kernel takes them: fixed tensors begin nowhere, the batch and the scores elsewhere in each forward.
        self.places = (ctypes.c_void_p * 4)(None, None, None, self.memory.data_ptr())


class CapturedGraph:
    """Steps from a batch to its scores.

    numbers  the steps as `tape.cpp` reads them
    arena    bytes that they need for what lies between
    nbytes   of the scores
    like     scores, for their shape and strides
    fixed    tensors whose memory they name
    """

    def __init__(self, numbers: Sequence[int], steps: int, arena: int, like: Tensor, fixed: Sequence[Tensor]) -> None:
        self.steps, self.arena = steps, arena
        self._tape = (ctypes.c_int64 * len(numbers))(*numbers)
        self._shape, self._strides, self._dtype = like.shape, like.stride(), like.dtype
        self.nbytes = like.nbytes
        self._fixed = tuple(fixed)

    def play(self, x: Tensor, arena: Arena, pool: BufferPool) -> Tensor:
        """The scores of `x`, in memory of the pool. Raises MemoryError."""
        scores = torch.from_numpy(pool.take()).view(self._dtype).as_strided(self._shape, self._strides)
        places = arena.places
        places[BATCH], places[SCORES] = x.data_ptr(), scores.data_ptr()
        if KERNEL.number("stackseg_replay", self._tape, self.steps, places, torch.get_num_threads()):
            raise MemoryError(NO_MEMORY)
        return scores


def arena_bytes(network: Network) -> int:
    """Bytes that each thread keeps which has called it."""
    return network.nbytes if isinstance(network, CpuGraph) else 0


def score_bytes(network: Network) -> int | None:
    """Bytes of one window's scores, where a forward takes nothing else beside what is kept; None: it takes more."""
    return network.score_bytes if isinstance(network, CpuGraph) else None


def capture(module: nn.Module, example: Tensor) -> Network:
    """`module` as one call for batches like `example` and shorter ones, or as it is where that cannot be."""
    try:
        return CpuGraph(module, example)
    except (NotCapturable, RuntimeError) as reason:
        # Such as TorchScript makes of any error. A module that does not run either will say so itself.
        log.info("The network runs layer by layer: %s", reason)
        return module


def record(module: nn.Module, x: Tensor) -> CapturedGraph:
    """A tape of what `module` does with `x`. Raises NotCapturable."""
    recorder = _Recorder(x)
    with _Leaving(), recorder, overheard(recorder.hear):
        scores = module(x)
    tape = recorder.tape(scores)
    # Of another batch, as something may be made of this one unseen.
    other = _some_like(x, 1)
    if not torch.equal(tape.play(other, Arena(tape.arena), BufferPool(tape.nbytes, 0)), module(other)):
        raise NotCapturable("other scores come of the steps that were seen")
    return tape


def _some_like(batch: Tensor, seed: int) -> Tensor:
    """Random numbers from 0 to 1 instead of those of a batch."""
    return torch.empty_like(batch).uniform_(generator=torch.Generator().manual_seed(seed))


class _Leaving(TorchFunctionMode):
    """Raises NotCapturable where values leave torch."""

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in LEAVE:
            raise NotCapturable(f"{function.__name__}() is no step")
        return function(*args, **(kwargs or {}))


class _Buffer:
    """Memory that is written anew in each forward, and the steps between which it is needed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.first = self.last = -1
        self.place, self.offset = ARENA, 0

    def meets(self, other: _Buffer) -> bool:
        """Whether both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of ATen, and hears every step."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To keep out torch's compiler, torch would import it, which takes seconds.
        return False

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._x = x
        self._calls: list[Call] = []
        # By where they begin. All that is made is kept, so that nothing else begins there later.
        self._buffers: dict[int, _Buffer] = {}
        self._kept = [x]

    def hear(self, call: Call) -> None:
        """A step has been run."""
        self._calls.append(call)

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute, and look what that was. Raises NotCapturable."""
        given, result = _tensors((args, kwargs)), operator(*args, **(kwargs or {}))
        made = _tensors(result)
        self._kept += made
        if operator in EMPTY:
            self._buffers.update((_begin(tensor), _Buffer(tensor.untyped_storage().nbytes())) for tensor in made)
        elif operator in SUMS and _adds(args, kwargs):
            self._add(args[0], args[1], result)
        elif operator._schema.is_mutable or not (_is_view(given, made) or self._is_constant(operator, given)):
            raise NotCapturable(f"{operator} is no step")
        return result

    def tape(self, scores: Any) -> CapturedGraph:
        """What was seen, of which `scores` came. Raises NotCapturable."""
        self._follow()
        self._whole_buffer(scores).place = SCORES
        arena = _lay_out([buffer for buffer in self._buffers.values() if buffer.place == ARENA and buffer.first >= 0])
        numbers = [number for call in self._calls for number in self._numbers(call)]
        tensors = (tensor for call in self._calls for tensor in call.tensors if tensor is not None)
        fixed = [tensor for tensor in tensors if not self._varies(tensor)]
        return CapturedGraph(numbers, len(self._calls), arena, scores, fixed)

    def _whole_buffer(self, scores: Any) -> _Buffer:
        """That which scores fill and a step writes. Raises NotCapturable."""
        whole = isinstance(scores, Tensor) and scores.nbytes == scores.untyped_storage().nbytes()
        buffer = self._buffer(scores) if whole else None
        if buffer is None or buffer.first < 0:
            raise NotCapturable("scores are no tensor of their own")
        return buffer

    def _add(self, one: Tensor, other: Tensor, total: Tensor) -> None:
        """A sum, by the kernel that writes its first term if that can."""
        if _begin(total) != _begin(one):
            self._buffers[_begin(total)] = _Buffer(total.untyped_storage().nbytes())
        elif self._calls and (both := strided_conv.plus(self._calls[-1], one, other)) is not None:
            self._calls[-1] = both
            return
        sizes = (total.numel(), total.dtype == torch.bfloat16)
        self._calls.append(Call(KERNEL, "stackseg_add", (one, other), total, sizes))

    def _varies(self, tensor: Tensor) -> bool:
        """Whether it differs from one forward to the next."""
        return _begin(tensor) in self._buffers or _begin(tensor) == _begin(self._x)

    def _is_constant(self, operator: Any, given: Sequence[Tensor]) -> bool:
        """Whether an operator gives the same in each forward."""
        random = torch.Tag.nondeterministic_seeded in operator.tags
        return not random and not any(self._varies(tensor) for tensor in given)

    def _follow(self) -> None:
        """Find out from when until when each buffer is needed. Raises NotCapturable where a step does what none may."""
        for index, call in enumerate(self._calls):
            for buffer in (self._buffer(tensor) for tensor in call.read):
                if buffer is not None and buffer.first < 0:
                    raise NotCapturable(f"{call.step} reads what nothing has written")
                if buffer is not None:
                    buffer.last = index
            written = self._buffer(call.written)
            if written is None:
                raise NotCapturable(f"{call.step} writes what is not its own")
            written.first = index if written.first < 0 else written.first
            written.last = index

    def _buffer(self, tensor: Tensor | None) -> _Buffer | None:
        """That in which it lies, None where it lies in none."""
        return None if tensor is None else self._buffers.get(_begin(tensor))

    def _numbers(self, call: Call) -> Iterator[int]:
        """A step as `tape.cpp` reads it."""
        yield from (call.kernel.address(call.step), len(call.tensors), len(call.sizes), len(call.reals))
        for tensor in call.tensors:
            yield from (FIXED, 0) if tensor is None else self._place(tensor)
        yield from map(int, call.sizes)
        yield from struct.unpack(f"{len(call.reals)}q", struct.pack(f"{len(call.reals)}d", *call.reals))

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        buffer = self._buffer(tensor)
        if buffer is not None:
            return buffer.place, buffer.offset + tensor.data_ptr() - _begin(tensor)
        if self._varies(tensor):
            return BATCH, tensor.data_ptr() - self._x.data_ptr()
        return FIXED, tensor.data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    """Those among what an operator is given, or gives."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _begin(tensor: Tensor) -> int:
    """Where the memory begins that it lies in, 0 where torch does not tell."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _is_view(given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether an operator has only looked at the memory of what it was given."""
    return bool(made) and {_begin(tensor) for tensor in made} <= {_begin(tensor) for tensor in given}


def _adds(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a sum is one of two tensors whose elements lie in the same order, without gaps."""
    one, other = args[:2]
    if kwargs or len(args) != 2 or not isinstance(other, Tensor) or one.dtype not in strided_conv.DTYPES:
        return False
    dense = one.is_contiguous() or (one.dim() == 5 and one.is_contiguous(memory_format=torch.channels_last_3d))
    alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return dense and alike and one.device.type == "cpu"


def _lay_out(buffers: Sequence[_Buffer]) -> int:
    """Give each a place where nothing lies that is needed at the same time; gives the bytes of all together."""
    placed = list[_Buffer]()
    for buffer in sorted(buffers, key=lambda each: each.nbytes, reverse=True):
        for other in sorted((each for each in placed if each.meets(buffer)), key=lambda each: each.offset):
            if buffer.offset + buffer.nbytes <= other.offset:
                break
            buffer.offset = max(buffer.offset, other.offset + other.nbytes)
        placed.append(buffer)
    return max((buffer.offset + buffer.nbytes for buffer in placed), default=0)
