"""A device of this host, as torch and its driver know it: its memory, and whether it still works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from service.core.hardware import devices, host
from service.core.hardware.devices import Driver
from service.serving.devices.queue.job import FreeMemory

if TYPE_CHECKING:
    from service.inference.windows.batching.batcher import WindowBatcher
    from service.serving.devices.models.model import JobCounters


class TorchDevice:
    """A torch device with its driver. Raises ConfigError for one that does not exist.

    lost  called with the reason once the device has failed for good
    """

    def __init__(self, name: str, driver: Driver, lost: Callable[[str], None]) -> None:
        self.device = devices.choose_device(name)
        self.driver, self.on_host = driver, driver.is_on_host(self.device)
        self._lost = lost
        # Held while a thread asks the device whether it works.
        self._probing = threading.Lock()

    @property
    def total_bytes(self) -> int | None:
        """Bytes of the device's own memory; None if it shares that of the host."""
        return None if self.on_host else self.driver.total_bytes(self.device)

    def free_memory(self) -> FreeMemory:
        """Return the free memory; that of the device is unknown if it fails. Does not raise."""
        try:
            device = None if self.on_host else self.driver.free_bytes(self.device)
        except RuntimeError as error:
            # The queue starts its jobs, which fail by themselves. It holds its lock, and must not wait here for a
            # device that may not answer at all.
            if not self._probing.locked():
                with suppress(RuntimeError):  # of a thread for which there is no room
                    threading.Thread(target=self._find_loss, args=(error,), name="probe", daemon=True).start()
            device = None
        return FreeMemory(host.available_memory(), device)

    def release_memory(self) -> None:
        """Return memory that torch keeps for later. Raises DeviceLost."""
        with self.report_loss():
            self.driver.release_memory(self.device)

    @contextmanager
    def report_loss(self) -> Iterator[None]:
        """Let the process end after an error that the device does not survive, which becomes DeviceLost."""
        try:
            yield
        except Exception as error:
            lost = devices.find_loss(self.device, error, self.driver)
            if lost is None:
                raise
            self._lost(str(lost))
            raise lost from error

    def _find_loss(self, error: Exception) -> None:
        with suppress(Exception), self._probing, self.report_loss():
            raise error


class ModelPlace(NamedTuple):
    """The device that a model is loaded on; `batcher` computes the windows of all requests together."""

    device: TorchDevice
    batcher: WindowBatcher
    counters: JobCounters
