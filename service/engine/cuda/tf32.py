"""Float32 on CUDA devices: process-wide switches of torch, set where a network is made.

TF32 rounds the factors of float32 products to 10 bits of mantissa, as many as float16 has, and sums in float32; that is
several times as fast on Ampere and later. Its effect is judged by the labels, like that of every other optimisation:
beside a reference that is computed without TF32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from service.core.sections.computing import Engine
from service.models.network import Network

# Switches are process-wide: a second caller would take the first one's temporary values for the operator's.
_lock = threading.RLock()


def use(settings: Engine, device: torch.device) -> None:
    """Set matrix precision, and whether cuDNN times its algorithms; do nothing on a CPU, which has neither."""
    if device.type != "cuda":
        return
    _set(settings.matmul_precision)
    # Every network runs with one shape, so cuDNN's choice of algorithm holds for good.
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark


@contextmanager
def exact() -> Iterator[None]:
    """Compute float32 products in float32, whatever is set; one caller at a time, on all devices."""
    with _lock:
        matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        _set("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matrices)
            torch.backends.cudnn.allow_tf32 = convolutions


def without_tf32(network: Network) -> Network:
    """Return `network` with TF32 off during each call."""

    def call(x: Tensor) -> Tensor:
        with exact():
            return network(x)

    return call


def _set(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    # cuDNN's convolutions have no more than on and off; torch's default is on.
    torch.backends.cudnn.allow_tf32 = precision != "highest"
