"""The number of workers is scaled with the workload. Actors run in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeSegmenterFactory, wait_until
from live import LiveServer, as_tiff, serve
from thread_actors import ThreadActor, UnresponsiveActor, make_cluster_settings, make_device_actor

from service.core.config import Settings
from service.serving.devices.cluster.actor import Actor
from service.serving.devices.cluster.cluster_devices import open_cluster
from service.serving.devices.device import Backlog
from service.serving.metrics import Metrics


class FakeCluster:
    """A cluster that creates actors in threads. Segmentations wait until `gate` is set.

    is_full  whether new actors never start
    """

    def __init__(self) -> None:
        self.actors: list[ThreadActor] = []
        self.is_full = False
        self.gate = threading.Event()
        self.gate.set()

    def connect(self, settings: Settings) -> Any:
        def share_gate(fake: Any) -> None:
            fake.warm_up, fake.gate = lambda **_: None, self.gate

        def make_actor() -> Actor:
            if self.is_full:
                return UnresponsiveActor()
            self.actors.append(make_device_actor(settings, FakeSegmenterFactory(share_gate)))
            return self.actors[-1]

        return make_actor

    @property
    def live_actors(self) -> list[ThreadActor]:
        return [actor for actor in self.actors if not actor.killed.is_set()]

    @property
    def busy_actors(self) -> list[ThreadActor]:
        return [
            actor for actor in self.live_actors if any(job.progress.total for _, job in [*actor.device._jobs.values()])
        ]


@contextmanager
def run_service(
    repository: Path, shared: Path, workers: int, min_workers: int, **limits: Any
) -> Iterator[tuple[LiveServer, FakeCluster]]:
    fake_cluster = FakeCluster()
    settings = make_cluster_settings(
        repository,
        shared,
        cluster={"workers": workers, "least_workers": min_workers, "backlog_seconds": 0.001, "idle_seconds": 0.2},
        limits=limits,
    )
    with serve(settings, connect=fake_cluster.connect) as live:
        yield live, fake_cluster
    assert not fake_cluster.live_actors


def count_workers(live: LiveServer) -> dict[str, int]:
    lines = live.client.get("/metrics").text.splitlines()
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines if line.startswith("stackseg_workers{")}


@pytest.fixture
def stack(phantom_maker: Any) -> bytes:
    return as_tiff(phantom_maker((16, 40, 40), seed=1).image)


def test_workers_are_requested_for_work_and_released_afterwards(
    bands_repository: Path, tmp_path: Path, stack: bytes
) -> None:
    with (
        run_service(bands_repository, tmp_path, 3, 1, at_once=1) as (live, fake_cluster),
        ThreadPoolExecutor(4) as pool,
    ):
        wait_until(lambda: count_workers(live) == {"up": 1, "missing": 0, "given_back": 2})
        live.wait_loaded()
        fake_cluster.gate.clear()
        requests = [pool.submit(live.segment, stack) for _ in range(4)]
        jobs = [live.client.post("/jobs", content=stack).headers["location"] for _ in range(4)]
        # Tasks that wait for the first worker move to the new workers.
        wait_until(lambda: len(fake_cluster.busy_actors) == 3)
        assert count_workers(live) == {"up": 3, "missing": 0, "given_back": 0}
        fake_cluster.gate.set()
        assert {request.result().status_code for request in requests} == {200}
        wait_until(lambda: all(live.client.get(job).json()["state"] == "done" for job in jobs))
        wait_until(lambda: count_workers(live) == {"up": 1, "missing": 0, "given_back": 2})
        assert len(fake_cluster.actors) == 3
        assert live.client.get("/health/ready").json() == {"status": "ready"}


def test_service_without_work_needs_no_worker(bands_repository: Path, tmp_path: Path, stack: bytes) -> None:
    short_timeout = run_service(bands_repository, tmp_path, 2, 0, request_seconds=4)
    with short_timeout as (live, fake_cluster), ThreadPoolExecutor(1) as pool:
        wait_until(lambda: count_workers(live) == {"up": 0, "missing": 0, "given_back": 2})
        assert live.client.get("/health/ready").json() == {"status": "ready"}
        devices = live.client.get("/gpu").json()["devices"]
        assert [(device["given_back"], device["problem"], device["models"]) for device in devices] == [
            (True, None, []),
            (True, None, []),
        ]
        assert live.segment(stack).status_code == 200
        wait_until(lambda: not fake_cluster.live_actors)
        fake_cluster.is_full = True
        request = pool.submit(live.segment, stack)
        wait_until(
            lambda: [device["starting"] for device in live.client.get("/gpu").json()["devices"]] == [True, False]
        )
        answer = request.result()
        assert answer.status_code == 504
        assert "No worker of the cluster is available." in answer.json()["detail"]
        assert live.client.get("/health/ready").json() == {"status": "ready"}


def test_lost_worker_counts_as_missing(bands_repository: Path, tmp_path: Path) -> None:
    with run_service(bands_repository, tmp_path, 2, 1) as (live, fake_cluster):
        wait_until(lambda: count_workers(live) == {"up": 1, "missing": 0, "given_back": 1})
        fake_cluster.live_actors[0].lose()
        wait_until(lambda: count_workers(live) == {"up": 0, "missing": 1, "given_back": 1})
        assert live.client.get("/health/ready").status_code == 503
        fake_cluster.live_actors[0].restart()
        wait_until(lambda: live.client.get("/health/ready").json() == {"status": "ready"})


@pytest.mark.parametrize(
    ("backlog", "local_device_count", "expected"),
    [
        (Backlog(0, 0.0), 0, 0),
        (Backlog(9, 50.0), 0, 1),
        (Backlog(9, 170.0), 0, 3),
        (Backlog(2, 5000.0), 0, 2),
        (Backlog(3, 5000.0), 1, 2),
        (Backlog(1, 5000.0), 2, 0),
    ],
)
def test_number_of_workers_depends_on_backlog_and_number_of_jobs(
    bands_repository: Path, tmp_path: Path, backlog: Backlog, local_device_count: int, expected: int
) -> None:
    settings = make_cluster_settings(
        bands_repository, tmp_path, cluster={"workers": 8, "least_workers": 0, "backlog_seconds": 60}
    )
    cluster = open_cluster(settings, FakeCluster().connect, Metrics())
    assert cluster is not None
    assert max(cluster._count_needed_workers(backlog, local_device_count), 0) == expected
    cluster.close()


def test_minimum_above_the_maximum_number_of_workers_is_rejected(bands_repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="least_workers must not exceed workers"):
        make_cluster_settings(bands_repository, tmp_path, cluster={"workers": 1, "least_workers": 2})
