"""Calls to C++ kernels with tensors. All kernels have the same signature, so that a captured graph can replay them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.core.native.library import CppFunctions

# Image dtypes that the kernels support.
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
OUT_OF_MEMORY_MESSAGE = "not enough memory for the working buffers of a CPU kernel"


class Kernels(CppFunctions):
    """Kernels with the signature int (void *const *tensors, const int64_t *sizes, const double *reals, int threads).

    The kernels write to the last tensor and read all other tensors. They return 0, or a nonzero status if memory runs
    out.

    kernels          names of the kernels
    other_functions  functions with other signatures
    """

    def __init__(self, kernels: Sequence[str], other_functions: Sequence[tuple[str, str, str]] = ()) -> None:
        super().__init__([*((kernel, "pppi", "i") for kernel in kernels), *other_functions])

    def call(self, name: str, *arguments: Any) -> int:
        """Call one of the functions, and return its result."""
        result: int = getattr(self._functions, name)(*arguments)
        return result

    def split_columns(self, width_function: str, column_count: int) -> list[int]:
        """Split columns into blocks that a kernel processes together, and return the widths of the blocks.

        `width_function` is the name of the function that returns the width of the next block for the number of
        remaining columns.
        """
        widths = list[int]()
        while (remaining_columns := column_count - sum(widths)) > 0:
            widths.append(self.call(width_function, remaining_columns))
        return widths

    def get_address(self, kernel: str) -> int:
        """Return the address of a kernel."""
        return ctypes.cast(getattr(self._functions, kernel), ctypes.c_void_p).value or 0


class KernelCall(NamedTuple):
    """A call to a kernel of a library, with its arguments. The kernel reads `inputs` and writes to `output`."""

    library: Kernels
    kernel: str
    inputs: tuple[Tensor | None, ...]
    output: Tensor
    sizes: tuple[int, ...]
    reals: tuple[float, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The inputs and the output, in the order of the kernel's arguments."""
        return (*self.inputs, self.output)

    def run(self) -> None:
        """Run the kernel with the number of threads that torch uses. Raises MemoryError."""
        tensors = self.tensors
        status = self.library.call(
            self.kernel,
            (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors)),
            (ctypes.c_int64 * len(self.sizes))(*self.sizes),
            (ctypes.c_double * len(self.reals))(*self.reals),
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError(OUT_OF_MEMORY_MESSAGE)
        listener = getattr(_thread_local, "listener", None)
        if listener is not None:
            listener(self)


_thread_local = threading.local()


@contextmanager
def observe_calls(listener: Callable[[KernelCall], None]) -> Iterator[None]:
    """Pass every kernel call that this thread runs to `listener`."""
    _thread_local.listener = listener
    try:
        yield
    finally:
        del _thread_local.listener
