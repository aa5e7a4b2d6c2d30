"""TF32 on CUDA devices, controlled by process-wide switches of torch that are set when a network is built.

TF32 rounds the factors of float32 matrix products to a 10-bit mantissa, like that of float16, and accumulates in
float32. On Ampere and later GPUs, this is several times faster. Like every other optimization, TF32 is accepted only
if the labels agree with those of a reference computed without TF32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from service.core.sections.computing import Engine
from service.models.network import Network

# The switches are process-wide. Without the lock, a second caller could save and restore values set by the first.
_lock = threading.RLock()


def configure(settings: Engine, device: torch.device) -> None:
    """Set the precision of matrix products and cuDNN's benchmark mode. Do nothing on a CPU."""
    if device.type != "cuda":
        return
    _set_matmul_precision(settings.matmul_precision)
    # Every network runs with one shape, so cuDNN chooses its algorithms only once.
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark


@contextmanager
def disable_tf32() -> Iterator[None]:
    """Disable TF32 within this context, on all devices. Only one thread at a time can enter it."""
    with _lock:
        matmul_precision, cudnn_allow_tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        _set_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matmul_precision)
            torch.backends.cudnn.allow_tf32 = cudnn_allow_tf32


def wrap_without_tf32(network: Network) -> Network:
    """Return `network` with TF32 disabled during each call."""

    def call(x: Tensor) -> Tensor:
        with disable_tf32():
            return network(x)

    return call


def _set_matmul_precision(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    # TF32 in cuDNN's convolutions can only be on or off. torch's default is on.
    torch.backends.cudnn.allow_tf32 = precision != "highest"
