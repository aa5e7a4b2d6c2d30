"""The devices of a cluster. Their number is scaled with the workload."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from service.core.config import Settings
from service.serving.devices.cluster.actor import ActorFactory
from service.serving.devices.cluster.actor_pool import ActorPool
from service.serving.devices.cluster.exchange import ActorStatus, Exchange
from service.serving.devices.cluster.remote_actor import STATUS_INTERVAL_SECONDS
from service.serving.devices.cluster.remote_device import RemoteDevice
from service.serving.devices.device import Backlog, DeviceState

if TYPE_CHECKING:
    from service.serving.metrics import Metrics

log = logging.getLogger(__name__)

# Maximum time to wait for the thread at shutdown.
JOIN_TIMEOUT_SECONDS = 4.0

ClusterConnector = Callable[[Settings], ActorFactory]


class ClusterDevices:
    """The devices that run in actors of a cluster, and the folder for exchanging files with these actors.

    exchange    folder for pixels and labels, which `close` deletes
    make_actor  requests an actor from the cluster
    """

    def __init__(self, settings: Settings, exchange: Exchange, make_actor: ActorFactory, metrics: Metrics) -> None:
        self._cluster, self._exchange = settings.cluster, exchange
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool = ActorPool(exchange, make_actor, settings.cluster, settings.jobs.attempts)
        self.devices = tuple(RemoteDevice(actor, self._pool, settings, metrics) for actor in self._pool.actors)

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of workers is scaled with the workload."""
        return self._cluster.min_workers < len(self.devices)

    @property
    def starts_on_demand(self) -> bool:
        """Whether the minimum number of workers is 0, so that the first request has to wait for a worker."""
        return bool(self.devices) and not self._cluster.min_workers

    @property
    def worker_counts(self) -> dict[str, float]:
        """Number of workers by state: up, missing (requested but unavailable) and given back."""
        device_counts = Counter(device.state for device in self.devices)
        return {
            "up": device_counts[DeviceState.UP],
            "missing": device_counts[DeviceState.STARTING] + device_counts[DeviceState.LOST],
            "given_back": device_counts[DeviceState.GIVEN_BACK],
        }

    @property
    def host_statuses(self) -> Mapping[str, ActorStatus]:
        """Latest status of the hosts with devices, by host name."""
        return {device.status.host: device.status for device in self.devices if device.status}

    def start(self, measure_backlog: Callable[[], Backlog], local_device_count: int = 0) -> None:
        """Start scaling the number of workers with the workload of all devices.

        measure_backlog     returns the backlog of all devices
        local_device_count  number of devices on this host
        """
        if self.is_autoscaled:
            self._thread = threading.Thread(
                target=self._loop, args=(measure_backlog, local_device_count), name="cluster-size", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop scaling the number of workers."""
        self._stopped.set()
        if self._thread is not None:
            # Use a timeout, because a cluster without its head node may not respond.
            self._thread.join(JOIN_TIMEOUT_SECONDS)

    def list_problems(self) -> tuple[str, ...]:
        """Return a sentence for each unavailable worker.

        Workers that are starting are omitted if the minimum number of workers is up.
        """
        has_min_workers = self.worker_counts["up"] >= self._cluster.min_workers
        return tuple(
            device.problem
            for device in self.devices
            if device.problem and not (has_min_workers and device.state is DeviceState.STARTING)
        )

    def close(self) -> None:
        """Delete the exchange folder. Call this after the devices have stopped."""
        self._exchange.delete()

    def _loop(self, measure_backlog: Callable[[], Backlog], local_device_count: int) -> None:
        while not self._stopped.wait(STATUS_INTERVAL_SECONDS):
            try:
                self._pool.scale(self._count_needed_workers(measure_backlog(), local_device_count))
            except Exception:
                log.exception("the number of workers could not be adjusted")

    def _count_needed_workers(self, backlog: Backlog, local_device_count: int) -> int:
        # A request runs on a single device, so more workers than jobs are useless. Loading a model is not a job, but
        # needs a worker as well.
        worker_count = min(backlog.job_count, math.ceil(backlog.expected_seconds / self._cluster.backlog_seconds))
        return max(worker_count - local_device_count, min(self._pool.unfinished_task_count, 1))


def open_cluster(settings: Settings, connect: ClusterConnector, metrics: Metrics) -> ClusterDevices | None:
    """Return the devices of the configured cluster; None if no cluster is configured.

    Raises ConfigError if the shared folder cannot be used, and the errors that `connect` raises.
    """
    folder = settings.cluster.shared_folder
    if settings.cluster.address is None or folder is None:
        return None
    make_actor = connect(settings)
    return ClusterDevices(settings, Exchange(folder), make_actor, metrics)
