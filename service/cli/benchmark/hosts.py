"""`stackseg bench --hosts`: windows per second by the number of workers of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from service.cli.benchmark.requests import AS_SAMPLED, tile_sample
from service.core.config import Settings
from service.core.errors import ConfigError
from service.core.quantities import Size
from service.core.types import Volume
from service.models.spec import ModelSpec
from service.serving.build import DEFAULT_PARTS
from service.serving.devices.cluster.cluster_devices import ConnectCluster, open_cluster
from service.serving.devices.device import Device, Scheduler
from service.serving.devices.queue.job import Job
from service.serving.devices.reservation import Reservation
from service.serving.metrics import Metrics

HEAD = "| workers | windows/s | per worker, relative to one worker |\n|---|---|---|"

# For threads that end with the measurement.
JOIN_SECONDS = 4.0


class HostsRow(NamedTuple):
    """Windows that so many workers have computed, and the seconds from the first request to the last answer."""

    workers: int
    windows: int
    seconds: float

    @property
    def windows_per_second(self) -> float:
        return self.windows / self.seconds


def measure(
    spec: ModelSpec, settings: Settings, shape: Size, repeats: int, connect: ConnectCluster = DEFAULT_PARTS.connect
) -> Iterator[HostsRow]:
    """Have 1, 2, ... workers of the cluster segment a stack `repeats` times each, all at the same time.

    Pixels and labels go through the shared folder, as in the service. Waits until all workers are there. Each row is
    yielded as soon as it is measured. Raises ConfigError without a cluster, and what segmenting raises.
    """
    volume = Volume.from_array(tile_sample(spec, shape)[None])
    with _start(spec, settings, connect) as devices:
        _time_requests(devices, spec, volume, 1)
        for count in range(1, len(devices) + 1):
            yield _time_requests(devices[:count], spec, volume, repeats)


def format_row(row: HostsRow, first: HostsRow) -> str:
    """Return the row of a Markdown table; `first` is the row of one worker."""
    share = row.windows_per_second / first.windows_per_second / row.workers
    return f"| {row.workers} | {row.windows_per_second:.1f} | {share:.0%} |"


@contextmanager
def _start(spec: ModelSpec, settings: Settings, connect: ConnectCluster) -> Iterator[Sequence[Device]]:
    """Start the workers, each of which loads the model."""
    every = settings.cluster.model_copy(update={"least_workers": None})
    cluster = open_cluster(settings.model_copy(update={"cluster": every}), connect, Metrics())
    if cluster is None:
        raise ConfigError("--hosts measures the workers of a cluster, and cluster.address names none.")
    try:
        for device in cluster.devices:
            device.start({spec.name: spec}, [spec.name])
        while cluster.problems() or any(device.scheduler.models.cache.starting for device in cluster.devices):
            time.sleep(0.1)
        yield cluster.devices
    finally:
        for device in cluster.devices:
            device.scheduler.cancel_requests()
            device.stop(JOIN_SECONDS)
        cluster.close()


def _time_requests(devices: Sequence[Device], spec: ModelSpec, volume: Volume, repeats: int) -> HostsRow:
    began = time.monotonic()
    jobs = [_submit(device.scheduler, spec, volume) for _ in range(repeats) for device in devices]
    for job in jobs:
        job.future.result()
    return HostsRow(len(devices), sum(job.progress.total for job in jobs), time.monotonic() - began)


def _submit(scheduler: Scheduler, spec: ModelSpec, volume: Volume) -> Job[Any]:
    reservation = Reservation(scheduler, spec.name)
    windows = scheduler.models.estimator(spec).estimate(volume, AS_SAMPLED).windows

    def segment(job: Job[Any]) -> None:
        reservation.segment(job, volume, AS_SAMPLED)

    job: Job[Any] = Job(spec.name, segment, windows=windows, ready=False)
    scheduler.queue.put(job)
    reservation.take(job)
    return job
