"""A device that computes requests, on this host or another one: its protocol, and what all devices have in common."""

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
    from service.serving.devices.models.eviction import LoadedModel
    from service.serving.devices.models.served import ServedModels
    from service.serving.devices.queue.memory import JobMemory


class Backlog(NamedTuple):
    """The requests and jobs that wait and run, and the seconds that they should still take of one device."""

    jobs: int
    seconds: float


class Scheduler:
    """Runs the jobs of a queue in threads, and loads the models that they use. Every device has one."""

    def __init__(self, queue: JobQueue, models: ServedModels) -> None:
        self.queue, self.models = queue, models
        # One thread of torch each: those of many requests would spin while they wait, on cores that the network needs.
        self._threads = JobThreads("request", queue.take, queue.at_once, partial(devices.use_threads, 1))

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models. The `first` ones are loaded now, and no request runs until they are."""
        self.models.start(specs, first)
        self._threads.start()

    def cancel_requests(self) -> None:
        """Accept no more requests, and cancel those that wait or run."""
        self.queue.close()
        self.queue.cancel_all()

    def close(self, seconds: float) -> None:
        """Load no more models, and wait up to `seconds` for jobs that `cancel_requests` has cancelled."""
        self.models.cache.close()
        self._threads.join(seconds)

    def join(self, seconds: float) -> bool:
        """Wait until all threads have ended; return False if one still runs after up to twice `seconds`."""
        return self._threads.join(seconds) and self.models.cache.join(seconds)

    @property
    def ended(self) -> bool:
        """Whether nothing is computed or loaded, and nothing ever will be."""
        return not self._threads.alive and self.models.cache.join(0)

    def routing_cost(self, model: str, caller: str | None) -> tuple[bool, bool, float]:
        """Return a sort key, which is smaller for a device that answers a caller's request for this model sooner.

        It has whether the model has failed, whether the queue is full or models still load at start, and the seconds
        that earlier requests and loading the model should take.
        """
        cache = self.models.cache
        is_busy = self.queue.full(caller) or bool(cache.starting)
        return model in cache.problems, is_busy, self.queue.expected_seconds + self.models.load_seconds(model)


def make_queue(settings: Settings, memory: JobMemory | None = None, always: int = 1) -> JobQueue:
    """Return the queue of one device, in which `always` jobs may run however busy the device is."""
    limits = settings.limits
    at_once = min(limits.at_once, limits.waiting + 1)
    return JobQueue(limits.waiting, at_once, memory, shared=len(settings.access.keys) > 1, always=always)


class DeviceState(StrEnum):
    """Whether a device can be used.

    UP          it computes requests
    STARTING    it was asked for and has not answered yet
    LOST        it does not work, or does not answer any more
    GIVEN_BACK  there is no such device until there is work for it
    """

    UP = "up"
    STARTING = "starting"
    LOST = "lost"
    GIVEN_BACK = "given_back"


class Device(Protocol):
    """The owner of one device: `LocalDevice` or `RemoteDevice`. Models become ready after `start` has returned."""

    @property
    def name(self) -> str: ...

    @property
    def scheduler(self) -> Scheduler:
        """The requests of the device, and its models."""

    @property
    def is_required(self) -> bool:
        """Whether the service is unready while this device cannot be used, even if others can."""

    @property
    def state(self) -> DeviceState: ...

    @property
    def problem(self) -> str | None:
        """The reason why the device is starting or lost, one sentence; None in other states."""

    @property
    def serves(self) -> bool:
        """Whether requests in the queue are computed, by this device or one that stands in for it."""

    @property
    def host(self) -> str | None:
        """The other host that the device was last seen on; None for a device of this host."""

    @property
    def loaded_models(self) -> Mapping[str, LoadedModel]:
        """The loaded models by name."""

    @property
    def ended(self) -> bool:
        """Whether nothing is computed or loaded, and nothing ever will be."""

    def start(self, specs: Mapping[str, ModelSpec], first: Iterable[str]) -> None:
        """Serve these models. The `first` ones are loaded now, and no request runs until they are."""

    def stop(self, seconds: float) -> bool:
        """End the threads after `Scheduler.cancel_requests`; return False if one runs after up to four times that."""


def loaded_bytes(device: Device) -> int:
    """Return the bytes of memory that the loaded models of a device take."""
    return sum(model.nbytes for model in device.loaded_models.values())
