"""A device of another host behind the interface of one of this host."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, cast

from service.core.config import Settings
from service.engine.compile import torch_compile
from service.inference.batching.batcher import WindowBatcher
from service.serving.devices.cluster.exchange import Exchange, Status
from service.serving.devices.cluster.remote_device import (
    STATUS_SECONDS,
    MakeActor,
    RemoteDevice,
    RemoteDevices,
    RemoteSegmenter,
)
from service.serving.devices.job import FreeMemory
from service.serving.devices.model_cache import LoadedModel
from service.serving.devices.worker import DeviceWorker, LoadSegmenter
from service.serving.metrics import Metrics

log = logging.getLogger(__name__)

JOIN_SECONDS = 4.0

ConnectCluster = Callable[[Settings], MakeActor]


class Backlog(NamedTuple):
    """The requests and jobs that wait and run, and the seconds that they should still take of one device."""

    jobs: int
    seconds: float


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
        self._remote, self._all = device, devices

    @property
    def serves(self) -> bool:
        """Whether requests of this queue are computed, in this actor or another one."""
        return any(device.up for device in self._all.devices)

    @property
    def given_back(self) -> bool:
        """Whether the actor was given back to the cluster, or was never needed."""
        return self._remote.given_back

    @property
    def starting(self) -> bool:
        """Whether the cluster was asked for the actor, and it has not answered yet."""
        return not self.given_back and self.status is None

    @property
    def loaded_models(self) -> Mapping[str, LoadedModel]:
        """The models that are loaded in the actor by name."""
        return {} if self.given_back else super().loaded_models

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

    Raises ConfigError for a shared folder that cannot be used, and what `connect` raises.
    """

    def __init__(self, settings: Settings, connect: ConnectCluster, metrics: Metrics) -> None:
        self.workers: tuple[RemoteWorker, ...] = ()
        self._cluster = settings.cluster
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if settings.cluster.address is None or settings.cluster.shared_folder is None:
            return
        make_actor = connect(settings)
        self._exchange = Exchange(settings.cluster.shared_folder)
        self._devices = RemoteDevices(self._exchange, make_actor, settings.cluster, settings.jobs.attempts)
        self.workers = tuple(RemoteWorker(device, self._devices, settings, metrics) for device in self._devices.devices)

    @property
    def is_sized(self) -> bool:
        """Whether the number of workers follows the work."""
        return bool(self.workers) and self._cluster.least < len(self.workers)

    @property
    def waits_for_work(self) -> bool:
        """Whether no worker is needed without work, so that the first request waits for one."""
        return bool(self.workers) and not self._cluster.least

    @property
    def states(self) -> dict[str, float]:
        """The number of workers that are up, missing though the cluster was asked for them, and given back.

        Empty without a cluster.
        """
        if not self.workers:
            return {}
        given_back = sum(worker.given_back for worker in self.workers)
        missing = sum(worker.problem is not None for worker in self.workers)
        return {"up": len(self.workers) - missing - given_back, "missing": missing, "given_back": given_back}

    def start(self, backlog: Callable[[], Backlog], here: int = 0) -> None:
        """Have the number of workers follow the work of all devices, of which so many are of this host."""
        if self.is_sized:
            self._thread = threading.Thread(target=self._loop, args=(backlog, here), name="cluster-size", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Let the number of workers be."""
        self._stopped.set()
        if self._thread is not None:
            # A cluster whose head is gone may not answer.
            self._thread.join(JOIN_SECONDS)

    def _loop(self, backlog: Callable[[], Backlog], here: int) -> None:
        while not self._stopped.wait(STATUS_SECONDS):
            try:
                self._devices.adjust(self._wanted(backlog(), here))
            except Exception:
                log.exception("the cluster cannot be asked for workers")

    def _wanted(self, backlog: Backlog, here: int) -> int:
        # A request has one device, however long it takes. A model that is loaded is none, and needs a worker.
        needed = min(backlog.jobs, math.ceil(backlog.seconds / self._cluster.backlog_seconds))
        return max(needed - here, min(self._devices.unfinished, 1))

    def problems(self) -> tuple[str, ...]:
        """Return why workers cannot be used, one sentence for each that cannot.

        Workers beyond the least number may be on their way.
        """
        missing = [worker for worker in self.workers if worker.problem]
        given_back = sum(worker.given_back for worker in self.workers)
        enough = len(self.workers) - len(missing) - given_back >= self._cluster.least
        return tuple(worker.problem for worker in missing if worker.problem and not (enough and worker.status is None))

    def close(self) -> None:
        """Delete the folder, once the workers have stopped."""
        if self.workers:
            self._exchange.delete()
