"""Kernels that compute tensors on a CPU, all called in the same way, so that one call can make many of them in turn."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.core.cpp_extension import OPENMP_FLAGS, CppExtension

NO_MEMORY = "no memory for what a kernel works in"


class Steps(CppExtension):
    """Functions of one source: int (void *const *tensors, const int64_t *sizes, const double *reals, int threads).

    They read all tensors but the last, which they write, and return 0, or something else where memory ran out.

    steps    their names
    others   functions that are called in another way, as `CppExtension` takes them
    """

    def __init__(
        self, source: Path, steps: Sequence[str], without: str, others: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        super().__init__(source, OPENMP_FLAGS, [*((step, "pppi", "i") for step in steps), *others], without)

    def number(self, name: str, *arguments: Any) -> int:
        """What one of the functions gives."""
        given: int = getattr(self._functions, name)(*arguments)
        return given

    def address(self, step: str) -> int:
        """Where one of the functions lies."""
        return ctypes.cast(getattr(self._functions, step), ctypes.c_void_p).value or 0


class Call(NamedTuple):
    """A step with all that it takes."""

    kernel: Steps
    step: str
    read: tuple[Tensor | None, ...]
    written: Tensor
    sizes: tuple[int, ...]
    reals: tuple[float, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order in which the step takes them."""
        return (*self.read, self.written)

    def run(self) -> None:
        """With as many threads as torch has. Raises MemoryError."""
        tensors = self.tensors
        failed = self.kernel.number(
            self.step,
            (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors)),
            (ctypes.c_int64 * len(self.sizes))(*self.sizes),
            (ctypes.c_double * len(self.reals))(*self.reals),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(NO_MEMORY)
        hear = getattr(_thread, "hear", None)
        if hear is not None:
            hear(self)


_thread = threading.local()


@contextmanager
def overheard(hear: Callable[[Call], None]) -> Iterator[None]:
    """Tell `hear` of every call that this thread runs."""
    _thread.hear = hear
    try:
        yield
    finally:
        del _thread.hear
