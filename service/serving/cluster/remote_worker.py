"""A device of another host behind the interface of one of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from service.core.config import Settings
from service.engine import torch_compile
from service.inference.batcher import WindowBatcher
from service.serving.cluster.exchange import Exchange, Status
from service.serving.cluster.remote_device import Actor, RemoteDevice, RemoteDevices, RemoteSegmenter
from service.serving.device_worker import DeviceWorker, LoadSegmenter
from service.serving.job import FreeMemory
from service.serving.metrics import Metrics

MakeActors = Callable[[Settings], Sequence[Actor]]


class RemoteWorker(DeviceWorker):
    """The queue of an actor, and the models that are loaded there. The actor's own queue minds the memory there.

    Its requests run in other actors while its own is not up.
    """

    is_remote = True

    def __init__(self, device: RemoteDevice, devices: RemoteDevices, settings: Settings, metrics: Metrics) -> None:
        here = settings.device.model_copy(update={"name": "cpu"})
        super().__init__(
            device.name,
            settings.model_copy(update={"device": here}),
            # It has the methods that a worker calls, and hands its own work to the device.
            cast("LoadSegmenter", partial(RemoteSegmenter, device, devices)),
            metrics,
            torch_compile.LoadingLock(),
            device=cast("WindowBatcher", device),
        )
        self._remote = device

    @property
    def host(self) -> str | None:
        """The host that the actor was seen on last; None before it is up."""
        return self._remote.status and self._remote.status.host

    @property
    def problem(self) -> str | None:
        """Why the actor cannot be used, one sentence; None while it can."""
        return self._remote.problem

    @property
    def status(self) -> Status | None:
        """The latest state of the actor; None before it is up."""
        return self._remote.status

    def _free_memory(self) -> FreeMemory:
        return FreeMemory()


class RemoteWorkers:
    """The workers of a service for the actors of a cluster, none without one, and the folder between them.

    Raises ConfigError for a shared folder that cannot be used, and what `make_actors` raises.
    """

    def __init__(self, settings: Settings, make_actors: MakeActors, metrics: Metrics) -> None:
        self.workers: tuple[RemoteWorker, ...] = ()
        if settings.cluster.address is None or settings.cluster.shared_folder is None:
            return
        actors = make_actors(settings)
        self._exchange = Exchange(settings.cluster.shared_folder)
        devices = RemoteDevices(self._exchange, actors, settings.jobs.attempts)
        self.workers = tuple(RemoteWorker(device, devices, settings, metrics) for device in devices.devices)

    def problems(self) -> tuple[str, ...]:
        """Return why workers cannot be used, one sentence for each that cannot."""
        return tuple(worker.problem for worker in self.workers if worker.problem)

    def close(self) -> None:
        """Delete the folder, once the workers have stopped."""
        if self.workers:
            self._exchange.delete()
