"""The devices of a cluster, whose number follows the work."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from service.core.config import Settings
from service.serving.devices.cluster.actor import MakeActor
from service.serving.devices.cluster.actor_pool import ActorPool
from service.serving.devices.cluster.exchange import Exchange, Status
from service.serving.devices.cluster.remote_actor import STATUS_SECONDS
from service.serving.devices.cluster.remote_device import RemoteDevice
from service.serving.devices.device import Backlog, DeviceState

if TYPE_CHECKING:
    from service.serving.metrics import Metrics

log = logging.getLogger(__name__)

JOIN_SECONDS = 4.0

ConnectCluster = Callable[[Settings], MakeActor]


class ClusterDevices:
    """The devices of a service for the actors of a cluster, and the folder between them.

    exchange    is deleted by `close`
    make_actor  asks the cluster for an actor
    """

    def __init__(self, settings: Settings, exchange: Exchange, make_actor: MakeActor, metrics: Metrics) -> None:
        self._cluster, self._exchange = settings.cluster, exchange
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool = ActorPool(exchange, make_actor, settings.cluster, settings.jobs.attempts)
        self.devices = tuple(RemoteDevice(actor, self._pool, settings, metrics) for actor in self._pool.actors)

    @property
    def is_sized(self) -> bool:
        """Whether the number of workers follows the work."""
        return self._cluster.least < len(self.devices)

    @property
    def waits_for_work(self) -> bool:
        """Whether no worker is needed without work, so that the first request waits for one."""
        return bool(self.devices) and not self._cluster.least

    @property
    def states(self) -> dict[str, float]:
        """The number of workers that are up, missing though the cluster was asked for them, and given back."""
        states = Counter(device.state for device in self.devices)
        return {
            "up": states[DeviceState.UP],
            "missing": states[DeviceState.STARTING] + states[DeviceState.LOST],
            "given_back": states[DeviceState.GIVEN_BACK],
        }

    @property
    def hosts(self) -> Mapping[str, Status]:
        """The hosts that have devices, each as one of these knew it last."""
        return {device.status.host: device.status for device in self.devices if device.status}

    def start(self, backlog: Callable[[], Backlog], here: int = 0) -> None:
        """Have the number of workers follow the work of all devices, `here` of which are of this host."""
        if self.is_sized:
            self._thread = threading.Thread(target=self._loop, args=(backlog, here), name="cluster-size", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Keep the number of workers as it is from now on."""
        self._stopped.set()
        if self._thread is not None:
            # A cluster whose head is gone may not answer.
            self._thread.join(JOIN_SECONDS)

    def problems(self) -> tuple[str, ...]:
        """Return why workers cannot be used, one sentence for each that cannot.

        Workers beyond the least number may be on their way.
        """
        enough = self.states["up"] >= self._cluster.least
        return tuple(
            device.problem
            for device in self.devices
            if device.problem and not (enough and device.state is DeviceState.STARTING)
        )

    def close(self) -> None:
        """Delete the folder, once the devices have stopped."""
        self._exchange.delete()

    def _loop(self, backlog: Callable[[], Backlog], here: int) -> None:
        while not self._stopped.wait(STATUS_SECONDS):
            try:
                self._pool.adjust(self._wanted(backlog(), here))
            except Exception:
                log.exception("the cluster cannot be asked for workers")

    def _wanted(self, backlog: Backlog, here: int) -> int:
        # A request has one device, however long it takes. A model that is loaded is none, and needs a worker.
        needed = min(backlog.jobs, math.ceil(backlog.seconds / self._cluster.backlog_seconds))
        return max(needed - here, min(self._pool.unfinished, 1))


def open_cluster(settings: Settings, connect: ConnectCluster, metrics: Metrics) -> ClusterDevices | None:
    """Return the devices of the configured cluster; None without one.

    Raises ConfigError for a shared folder that cannot be used, and what `connect` raises.
    """
    folder = settings.cluster.shared_folder
    if settings.cluster.address is None or folder is None:
        return None
    make_actor = connect(settings)
    return ClusterDevices(settings, Exchange(folder), make_actor, metrics)
