"""Memory checks before a request runs, and translation of memory and device errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service.core.errors import OutOfMemory, StackSegError
from service.core.hardware import devices
from service.core.hardware.devices import Driver, find_device_loss, is_out_of_memory
from service.inference.types import Estimate


def check_memory(needed: Estimate, on_host: int | None, on_device: int | None = None) -> None:
    """Raise OutOfMemory if the host or the device has fewer free bytes than needed. None means unknown."""
    _check(needed.host_bytes, on_host, "memory")
    _check(needed.device_bytes, on_device, "device memory")


def _check(needed: int, free: int | None, memory: str) -> None:
    if free is not None and needed > free:
        raise OutOfMemory(
            f"This volume needs about {needed / 2**30:.1f} GiB of {memory}, but only {free / 2**30:.1f} GiB are free. "
            "Submit a smaller part of it, or try again when fewer requests are running.",
            needed,
        )


@contextmanager
def translate_errors(estimate: Estimate, device: torch.device, driver: Driver = devices) -> Iterator[None]:
    """Translate out-of-memory errors of libraries to OutOfMemory, and errors of a lost device to DeviceLost."""
    try:
        yield
    except StackSegError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            if (lost := find_device_loss(device, error, driver)) is not None:
                raise lost from error
            raise
        most = max(estimate.host_bytes, estimate.device_bytes)
        raise OutOfMemory(
            f"There was not enough memory, even for a batch of one window. About {most / 2**30:.1f} GiB are needed. "
            "Submit a smaller part of the volume, or try again when fewer requests are running.",
            most,
        ) from error
