"""Memory of a request: checked before it runs, and errors of exhausted memory told apart from others."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service.core import hardware
from service.core.errors import DeviceLost, OutOfMemory, StackSegError
from service.inference.estimate import Estimate

# Of torch's CPU allocator, oneDNN (whose primitives were made before, in the warm-up), and Python's threads.
_EXHAUSTED = ("DefaultCPUAllocator", "could not create a primitive", "can't start new thread")


def check_memory(estimate: Estimate, available: int | None) -> None:
    """Raise OutOfMemory where fewer host bytes are available than estimated; None: not known."""
    if available is not None and estimate.host_bytes > available:
        raise OutOfMemory(
            f"This volume needs about {estimate.host_bytes / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are "
            "free; send a smaller part of it, or try again when less is running.",
            estimate.host_bytes,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, or the room for threads; some libraries raise a plain RuntimeError for that."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _EXHAUSTED)


def translate_error(error: BaseException) -> BaseException:
    """Return OutOfMemory for a foreign error of exhausted memory, any other error as it is."""
    if isinstance(error, StackSegError) or not is_out_of_memory(error):
        return error
    return OutOfMemory("The service is short of memory; try again later, or send a smaller part of the volume.")


@contextmanager
def translate_errors(estimate: Estimate, device: torch.device) -> Iterator[None]:
    """Translate foreign errors of exhausted memory to OutOfMemory, and of a device that is gone to DeviceLost."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            if device.type != "cpu" and not hardware.is_working(device):
                raise DeviceLost(f"{device} has failed and must be started anew with the service.") from error
            raise
        most = max(estimate.host_bytes, estimate.device_bytes)
        raise OutOfMemory(
            f"There was not enough memory, even for one window at a time; about {most / 2**30:.1f} GiB are needed. "
            "Send a smaller part of the volume, or try again when less is running.",
            most,
        ) from error
