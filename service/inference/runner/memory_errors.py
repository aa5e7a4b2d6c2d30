"""Memory and health of a device: checked before a request runs, and told apart where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service.core.errors import OutOfMemory, StackSegError
from service.core.hardware import devices
from service.core.hardware.devices import Driver, find_loss, is_out_of_memory
from service.inference.types import Estimate


def check_memory(needed: Estimate, on_host: int | None, on_device: int | None = None) -> None:
    """Raise OutOfMemory where fewer bytes of the host or the device are free than needed; None: not known."""
    _check(needed.host_bytes, on_host, "memory")
    _check(needed.device_bytes, on_device, "memory of the device")


def _check(needed: int, free: int | None, where: str) -> None:
    if free is not None and needed > free:
        raise OutOfMemory(
            f"This volume needs about {needed / 2**30:.1f} GiB of {where}, {free / 2**30:.1f} GiB are free; send a "
            "smaller part of it, or try again when less is running.",
            needed,
        )


@contextmanager
def translate_errors(estimate: Estimate, device: torch.device, driver: Driver = devices) -> Iterator[None]:
    """Translate foreign errors of exhausted memory to OutOfMemory, and of a device that is gone to DeviceLost."""
    try:
        yield
    except StackSegError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            if (lost := find_loss(device, error, driver)) is not None:
                raise lost from error
            raise
        most = max(estimate.host_bytes, estimate.device_bytes)
        raise OutOfMemory(
            f"There was not enough memory, even for one window at a time; about {most / 2**30:.1f} GiB are needed. "
            "Send a smaller part of the volume, or try again when less is running.",
            most,
        ) from error
