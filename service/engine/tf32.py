"""How CUDA devices compute in float32: process-wide switches of torch, set where a network is made.

TF32 rounds what float32 products take to 10 bits of mantissa and sums them in float32, several times as fast on Ampere
and later; float16 has as many bits. What it changes is judged like everything else that is tried: by the labels, beside
a reference that is computed without it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from service.core import config
from service.models.loader import Network

# The switches are those of the process: whoever came second would take the first one's for the operator's.
_exact = threading.RLock()


def use(settings: config.Engine, device: torch.device) -> None:
    """Set matrix precision, and whether cuDNN tries its algorithms; nothing on a CPU, which has neither."""
    if device.type != "cuda":
        return
    _set(settings.matmul_precision)
    # Every network runs with one shape, so what cuDNN tried once holds for good.
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark


@contextmanager
def exact() -> Iterator[None]:
    """Products of float32 in float32, whatever is set; for one at a time, of all devices."""
    with _exact:
        matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        _set("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matrices)
            torch.backends.cudnn.allow_tf32 = convolutions


def exactly(network: Network) -> Network:
    """`network`, each call of which is exact."""

    def call(x: Tensor) -> Tensor:
        with exact():
            return network(x)

    return call


def _set(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    # Convolutions know no more than on and off, and torch has them on.
    torch.backends.cudnn.allow_tf32 = precision != "highest"
