"""`stackseg bench --hosts`: throughput of a cluster by number of workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from service.cli.benchmark.requests import ORIGINAL_RESOLUTION, tile_sample
from service.core.config import Settings
from service.core.errors import ConfigError
from service.core.quantities import Size
from service.core.types import Volume
from service.models.spec import ModelSpec
from service.serving.build import DEFAULT_FACTORIES
from service.serving.devices.cluster.cluster_devices import ClusterConnector, open_cluster
from service.serving.devices.device import Device, Scheduler
from service.serving.devices.queue.job import Job
from service.serving.devices.reservation import Reservation
from service.serving.metrics import Metrics

TABLE_HEADER = "| workers | windows/s | efficiency relative to one worker |\n|---|---|---|"

# Time limit for threads to stop after the measurement.
MAX_JOIN_SECONDS = 4.0


class HostsRow(NamedTuple):
    """Throughput of a given number of workers.

    workers  number of workers
    windows  number of windows that all workers together processed
    seconds  time from the first request to the last result
    """

    workers: int
    windows: int
    seconds: float

    @property
    def windows_per_second(self) -> float:
        return self.windows / self.seconds


def measure_throughput(
    spec: ModelSpec,
    settings: Settings,
    shape: Size,
    repeats: int,
    connect: ClusterConnector = DEFAULT_FACTORIES.connect,
) -> Iterator[HostsRow]:
    """Measure the throughput of 1, 2, ... workers of a cluster.

    All workers run concurrently, and each of them segments a stack `repeats` times. Pixels and labels are passed
    through the shared folder, as in the service. The measurement starts when all workers are ready. Each row is yielded
    as soon as it is measured. Raises ConfigError if there is no cluster, and any error of a segmentation.
    """
    volume = Volume.from_array(tile_sample(spec, shape)[None])
    with _start_workers(spec, settings, connect) as devices:
        _time_requests(devices, spec, volume, 1)
        for worker_count in range(1, len(devices) + 1):
            yield _time_requests(devices[:worker_count], spec, volume, repeats)


def format_row(row: HostsRow, first_row: HostsRow) -> str:
    """Return a row of a Markdown table. `first_row` is the row of a single worker."""
    efficiency = row.windows_per_second / first_row.windows_per_second / row.workers
    return f"| {row.workers} | {row.windows_per_second:.1f} | {efficiency:.0%} |"


@contextmanager
def _start_workers(spec: ModelSpec, settings: Settings, connect: ClusterConnector) -> Iterator[Sequence[Device]]:
    """Start the workers and load the model on each of them."""
    cluster_settings = settings.cluster.model_copy(update={"least_workers": None})
    cluster = open_cluster(settings.model_copy(update={"cluster": cluster_settings}), connect, Metrics())
    if cluster is None:
        raise ConfigError("--hosts requires a cluster. Set cluster.address to its address.")
    try:
        for device in cluster.devices:
            device.start({spec.name: spec}, [spec.name])
        while cluster.list_problems() or any(
            device.scheduler.models.cache.pending_startup_models for device in cluster.devices
        ):
            time.sleep(0.1)
        yield cluster.devices
    finally:
        for device in cluster.devices:
            device.scheduler.cancel_requests()
            device.stop(MAX_JOIN_SECONDS)
        cluster.close()


def _time_requests(devices: Sequence[Device], spec: ModelSpec, volume: Volume, repeats: int) -> HostsRow:
    start = time.monotonic()
    jobs = [_submit(device.scheduler, spec, volume) for _ in range(repeats) for device in devices]
    for job in jobs:
        job.future.result()
    return HostsRow(len(devices), sum(job.progress.total for job in jobs), time.monotonic() - start)


def _submit(scheduler: Scheduler, spec: ModelSpec, volume: Volume) -> Job[Any]:
    reservation = Reservation(scheduler, spec.name)
    window_count = scheduler.models.get_estimator(spec).estimate(volume, ORIGINAL_RESOLUTION).windows

    def segment(job: Job[Any]) -> None:
        reservation.model.segment(job, volume, ORIGINAL_RESOLUTION, reservation.request, job.advance)

    job: Job[Any] = Job(spec.name, segment, window_count=window_count, is_ready=False)
    scheduler.queue.put(job)
    reservation.request_model(job)
    return job
