"""All devices of the service: routing of requests, startup, shutdown and availability."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from service.models.spec import ModelSpec
from service.serving.devices.device import Backlog, Device
from service.serving.devices.local.watchdog import Watchdog
from service.serving.devices.queue.job import Job

if TYPE_CHECKING:
    from service.serving.devices.cluster.cluster_devices import ClusterDevices
    from service.serving.devices.cluster.exchange import ActorStatus

log = logging.getLogger(__name__)


class DevicePool:
    """The devices on this host and in the cluster.

    all        all devices, beginning with the devices on this host
    watchdogs  watchdogs of the devices on this host
    """

    def __init__(
        self, local_devices: Sequence[Device], watchdogs: Sequence[Watchdog], cluster: ClusterDevices | None = None
    ) -> None:
        self.all: tuple[Device, ...] = (*local_devices, *(cluster.devices if cluster else ()))
        self._local_devices, self._watchdogs, self._cluster = local_devices, watchdogs, cluster

    @property
    def host_statuses(self) -> tuple[ActorStatus, ...]:
        """The latest status of each remote host with devices."""
        return tuple(self._cluster.host_statuses.values()) if self._cluster else ()

    @property
    def worker_counts(self) -> dict[str, float]:
        """Number of workers of the cluster by state; empty without a cluster."""
        return self._cluster.worker_counts if self._cluster else {}

    @property
    def waiting_count(self) -> int:
        """Number of waiting jobs of all devices."""
        return sum(device.scheduler.queue.waiting_count for device in self.all)

    @property
    def running_jobs(self) -> tuple[Job[Any], ...]:
        """The running jobs of all devices."""
        return tuple(job for device in self.all for job in device.scheduler.queue.running_jobs)

    @property
    def has_ended(self) -> bool:
        """Whether all threads of all devices have ended."""
        return all(device.has_ended for device in self.all)

    def start(self, specs: Mapping[str, ModelSpec], startup_models: Iterable[str]) -> None:
        """Start all devices. No request runs until the models in `startup_models` have been loaded."""
        names = tuple(startup_models)
        for device in self.all:
            device.start(specs, names)
        if self._cluster:
            self._cluster.start(self._measure_backlog, len(self._local_devices))

    def stop_watchdogs(self) -> None:
        """Stop the watchdogs, because the threads of the devices are about to be stopped."""
        for watchdog in self._watchdogs:
            watchdog.stop()

    def cancel_requests(self) -> None:
        """Stop accepting requests, and cancel all waiting and running requests."""
        for device in self.all:
            device.scheduler.cancel_requests()

    def stop(self, timeout_seconds: float) -> None:
        """Cancel all requests and stop all threads. Do not wait for threads that take longer than `timeout_seconds`."""
        self.stop_watchdogs()
        self.cancel_requests()
        if self._cluster:
            self._cluster.stop()
        for device in self.all:
            if not device.stop(timeout_seconds):
                log.warning("%s is still busy after %s s; not waiting any longer", device.name, timeout_seconds)
        if self._cluster:
            self._cluster.close()

    def check_admission(self, caller: str | None) -> None:
        """Raise QueueFull or NotReady if no queue accepts a request from this caller."""
        queues = [device.scheduler.queue for device in self.all]
        next((queue for queue in queues if not queue.is_full(caller)), queues[0]).check_admission(caller)

    def choose_device(self, model: str, caller: str | None) -> Device:
        """Return the device that is expected to complete a request for this model first."""

        def compute_cost(device: Device) -> tuple[bool, bool, float]:
            has_failed, is_busy, seconds = device.scheduler.compute_routing_cost(model, caller)
            return has_failed or not device.is_serving, is_busy, seconds

        return min(self.all, key=compute_cost)

    def describe_engines(self, model: str) -> list[str]:
        """Return sorted descriptions of the engines of a model on all devices that have loaded it so far."""
        engines = (device.scheduler.models.engines for device in self.all)
        return sorted({engine_by_model[model] for engine_by_model in engines if model in engine_by_model})

    def list_unready_reasons(self) -> Iterator[str]:
        """Yield a sentence for each device that makes the service unready."""
        yield from (device.problem for device in self.all if device.is_required and device.problem)
        if self._cluster and not self._can_serve:
            yield from self._cluster.list_problems()

    def list_degradations(self) -> tuple[str, ...]:
        """Return a sentence for each device that is unavailable although the service is ready."""
        return self._cluster.list_problems() if self._cluster and self._can_serve else ()

    def explain_missing_workers(self) -> str | None:
        """Return a sentence if requests are waiting because no worker of the cluster is available, else None."""
        if self._cluster is None or any(device.is_serving for device in self.all):
            return None
        return "No worker of the cluster is available."

    @property
    def _can_serve(self) -> bool:
        """Whether a device processes requests, or will be started for the next request."""
        starts_on_demand = self._cluster is not None and self._cluster.starts_on_demand
        return starts_on_demand or any(device.is_serving for device in self.all)

    def _measure_backlog(self) -> Backlog:
        queues = [device.scheduler.queue for device in self.all]
        return Backlog(sum(len(queue.jobs) for queue in queues), sum(queue.expected_seconds for queue in queues))
