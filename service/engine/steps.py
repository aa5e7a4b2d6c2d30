"""Kernels that compute tensors on a CPU, all called in the same way, so that one call can make many of them in turn."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from service.kernels import Kernel

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")


class Steps(Kernel):
    """Functions of one source: int (void *const *tensors, const int64_t *sizes, const double *reals, int threads).

    They read all tensors but the last, which they write, and return 0, or something else where memory ran out.

    steps    their names
    others   functions that tell how weights must lie, as `Kernel` takes them
    """

    def __init__(
        self, source: Path, steps: Sequence[str], without: str, others: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        super().__init__(source, FLAGS, [*((step, "pppi", "i") for step in steps), *others], without)

    def run(
        self, step: str, tensors: Sequence[Tensor | None], sizes: Sequence[int], reals: Sequence[float] = ()
    ) -> None:
        """Let `step` write the last of `tensors`, with as many threads as torch has. Raises MemoryError."""
        failed = getattr(self._functions, step)(
            (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors)),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_double * len(reals))(*reals),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for what a kernel works in")

    def number(self, name: str, *arguments: int) -> int:
        """What one of the other functions gives."""
        given: int = getattr(self._functions, name)(*arguments)
        return given
