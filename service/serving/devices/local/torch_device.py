"""A torch device on this host: its memory, and the detection of its loss."""

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
    """A torch device with its driver. Raises ConfigError if the device does not exist.

    on_loss  called with the reason if the device has failed permanently
    """

    def __init__(self, name: str, driver: Driver, on_loss: Callable[[str], None]) -> None:
        self.device = devices.choose_device(name)
        self.driver, self.uses_host_memory = driver, driver.uses_host_memory(self.device)
        self._on_loss = on_loss
        # Held while a thread checks whether the device still works.
        self._probe_lock = threading.Lock()

    @property
    def total_bytes(self) -> int | None:
        """Total memory of the device in bytes; None if it shares the memory of the host."""
        return None if self.uses_host_memory else self.driver.query_total_bytes(self.device)

    def query_free_memory(self) -> FreeMemory:
        """Return the free memory of the host and the device. Never raises: if the device fails, its memory is None."""
        try:
            device_bytes = None if self.uses_host_memory else self.driver.query_free_bytes(self.device)
        except RuntimeError as error:
            # The queue calls this method with its lock held, so do not wait here for a device that may never respond.
            # Jobs on a lost device fail on their own.
            if not self._probe_lock.locked():
                with suppress(RuntimeError):  # raised if no thread can be started
                    threading.Thread(target=self._report_if_lost, args=(error,), name="probe", daemon=True).start()
            device_bytes = None
        return FreeMemory(host.query_available_memory(), device_bytes)

    def release_memory(self) -> None:
        """Return memory cached by PyTorch to the operating system. Raises DeviceLost."""
        with self.report_loss():
            self.driver.release_memory(self.device)

    @contextmanager
    def report_loss(self) -> Iterator[None]:
        """Convert an error in the block to DeviceLost if the device has failed, and report the loss.

        After the loss is reported, the watchdog ends the process.
        """
        try:
            yield
        except Exception as error:
            loss = devices.find_device_loss(self.device, error, self.driver)
            if loss is None:
                raise
            self._on_loss(str(loss))
            raise loss from error

    def _report_if_lost(self, error: Exception) -> None:
        with suppress(Exception), self._probe_lock, self.report_loss():
            raise error


class DeviceContext(NamedTuple):
    """The device on which a model is loaded, and the batcher that runs the network on the windows of all requests."""

    device: TorchDevice
    batcher: WindowBatcher
    counters: JobCounters
