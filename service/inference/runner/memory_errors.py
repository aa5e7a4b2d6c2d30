"""Memory checks before a request runs, and translation of memory and device errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service.core.errors import OutOfMemory, StackSegError
from service.core.hardware import devices
from service.core.hardware.devices import Driver, find_device_loss, is_out_of_memory
from service.inference.types import ResourceEstimate


def check_memory(estimate: ResourceEstimate, free_host_bytes: int | None, free_device_bytes: int | None = None) -> None:
    """Raise OutOfMemory if the host or the device has fewer free bytes than estimated. None means unknown."""
    _check_free_bytes(estimate.host_bytes, free_host_bytes, "memory")
    _check_free_bytes(estimate.device_bytes, free_device_bytes, "device memory")


def _check_free_bytes(needed_bytes: int, free_bytes: int | None, memory_kind: str) -> None:
    if free_bytes is not None and needed_bytes > free_bytes:
        raise OutOfMemory(
            f"This volume needs about {needed_bytes / 2**30:.1f} GiB of {memory_kind}, but only"
            f" {free_bytes / 2**30:.1f} GiB is free. Submit a smaller part of the volume, or try again when fewer"
            " requests are running.",
            needed_bytes,
        )


@contextmanager
def translate_errors(estimate: ResourceEstimate, device: torch.device, driver: Driver = devices) -> Iterator[None]:
    """Translate out-of-memory errors from libraries to OutOfMemory, and errors from a lost device to DeviceLost."""
    try:
        yield
    except StackSegError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            if (device_loss := find_device_loss(device, error, driver)) is not None:
                raise device_loss from error
            raise
        needed_bytes = max(estimate.host_bytes, estimate.device_bytes)
        raise OutOfMemory(
            "There was not enough memory, even for a batch of one window."
            f" About {needed_bytes / 2**30:.1f} GiB is needed."
            " Submit a smaller part of the volume, or try again when fewer requests are running.",
            needed_bytes,
        ) from error
