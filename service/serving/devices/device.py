"""The interface of a device that processes requests on this or another host, and its scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from service.core.config import Settings
from service.core.hardware import devices
from service.serving.devices.queue.job_queue import JobQueue
from service.serving.devices.queue.threads import JobThreads

if TYPE_CHECKING:
    from service.models.spec import ModelSpec
    from service.serving.devices.models.eviction import ModelUsage
    from service.serving.devices.models.served import ServedModels
    from service.serving.devices.queue.memory import JobMemory


class Backlog(NamedTuple):
    """Number of waiting and running jobs, and the estimated seconds that one device needs for them."""

    job_count: int
    expected_seconds: float


class Scheduler:
    """The queue, threads and loaded models of one device."""

    def __init__(self, queue: JobQueue, models: ServedModels) -> None:
        self.queue, self.models = queue, models
        # Each thread uses one torch thread. Additional torch threads would busy-wait on cores that the network needs.
        self._threads = JobThreads("request", queue.take, queue.max_running, partial(devices.set_torch_threads, 1))

    def start(self, specs: Mapping[str, ModelSpec], startup_models: Iterable[str]) -> None:
        """Start serving models. No request runs until the models in `startup_models` have been loaded."""
        self.models.start(specs, startup_models)
        self._threads.start()

    def cancel_requests(self) -> None:
        """Stop accepting requests, and cancel all waiting and running requests."""
        self.queue.close()
        self.queue.cancel_all()

    def close(self, timeout_seconds: float) -> None:
        """Stop loading models, and wait up to `timeout_seconds` for the jobs that `cancel_requests` has canceled."""
        self.models.cache.close()
        self._threads.join(timeout_seconds)

    def join(self, timeout_seconds: float) -> bool:
        """Wait up to twice `timeout_seconds` until all threads have ended; return whether they have."""
        return self._threads.join(timeout_seconds) and self.models.cache.join(timeout_seconds)

    @property
    def has_ended(self) -> bool:
        """Whether all threads have ended."""
        return not self._threads.is_alive and self.models.cache.join(0)

    def compute_routing_cost(self, model: str, caller: str | None) -> tuple[bool, bool, float]:
        """Return a sort key that is smaller if this device is expected to complete a request for the model sooner.

        Its items are whether the model has failed, whether the queue is full or models are still being loaded at
        startup, and the estimated seconds for earlier requests and for loading the model.
        """
        cache = self.models.cache
        is_busy = self.queue.is_full(caller) or bool(cache.pending_startup_models)
        return model in cache.problems, is_busy, self.queue.expected_seconds + self.models.estimate_load_seconds(model)


def make_queue(settings: Settings, memory: JobMemory | None = None, guaranteed_job_count: int = 1) -> JobQueue:
    """Create the queue of a device, on which `guaranteed_job_count` jobs may always run concurrently."""
    limits = settings.limits
    max_running = min(limits.at_once, limits.waiting + 1)
    return JobQueue(
        limits.waiting,
        max_running,
        memory,
        is_shared=len(settings.access.keys) > 1,
        guaranteed_job_count=guaranteed_job_count,
    )


class DeviceState(StrEnum):
    """State of a device.

    UP          the device processes requests
    STARTING    the worker of the device has been requested and has not responded yet
    LOST        the device has failed or does not respond
    GIVEN_BACK  the worker of the device was released, and is requested again when there is work
    """

    UP = "up"
    STARTING = "starting"
    LOST = "lost"
    GIVEN_BACK = "given_back"


class Device(Protocol):
    """A device, implemented by `LocalDevice` and `RemoteDevice`. Models become ready after `start` has returned."""

    @property
    def name(self) -> str: ...

    @property
    def scheduler(self) -> Scheduler:
        """The queue and the models of the device."""

    @property
    def is_required(self) -> bool:
        """Whether the service is unready while this device is unavailable, even if other devices are available."""

    @property
    def state(self) -> DeviceState: ...

    @property
    def problem(self) -> str | None:
        """Reason why the device is not up, in one sentence; None if it is up or was released."""

    @property
    def is_serving(self) -> bool:
        """Whether requests in the queue are processed, by this device or by a substitute."""

    @property
    def host(self) -> str | None:
        """Name of the remote host on which the device was last seen; None for a device on this host."""

    @property
    def loaded_models(self) -> Mapping[str, ModelUsage]:
        """Usage of each loaded model, by name."""

    @property
    def has_ended(self) -> bool:
        """Whether all threads have ended."""

    def start(self, specs: Mapping[str, ModelSpec], startup_models: Iterable[str]) -> None:
        """Start serving models. No request runs until the models in `startup_models` have been loaded."""

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the threads, after a call to `Scheduler.cancel_requests`; return whether they have ended.

        Wait at most four times `timeout_seconds`.
        """


def count_loaded_bytes(device: Device) -> int:
    """Return the memory that the loaded models of a device use, in bytes."""
    return sum(usage.nbytes for usage in device.loaded_models.values())
