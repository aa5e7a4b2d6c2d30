"""The number of workers follows the work: actors in threads of the test come and go, or do not come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import Fakes, until
from live import Live, as_tiff, serve
from thread_actors import SilentActor, ThreadActor, make_device_actor, remote

from service.core.config import Settings
from service.serving.devices.cluster.actor import Actor
from service.serving.devices.cluster.cluster_devices import open_cluster
from service.serving.devices.device import Backlog
from service.serving.metrics import Metrics


class Hosts:
    """Makes actors; while there are `none`, silent ones. Segmentations wait for the gate."""

    def __init__(self) -> None:
        self.actors: list[ThreadActor] = []
        self.none = False
        self.gate = threading.Event()
        self.gate.set()

    def connect(self, settings: Settings) -> Any:
        def share_gate(fake: Any) -> None:
            fake.warm_up, fake.gate = lambda **_: None, self.gate

        def make_actor() -> Actor:
            if self.none:
                return SilentActor()
            self.actors.append(make_device_actor(settings, Fakes(share_gate)))
            return self.actors[-1]

        return make_actor

    @property
    def there(self) -> list[ThreadActor]:
        return [actor for actor in self.actors if not actor.killed.is_set()]

    @property
    def at_work(self) -> list[ThreadActor]:
        return [actor for actor in self.there if any(job.progress.total for _, job in [*actor.device._jobs.values()])]


@contextmanager
def service(repository: Path, shared: Path, workers: int, least: int, **limits: Any) -> Iterator[tuple[Live, Hosts]]:
    hosts = Hosts()
    settings = remote(
        repository,
        shared,
        cluster={"workers": workers, "least_workers": least, "backlog_seconds": 0.001, "idle_seconds": 0.2},
        limits=limits,
    )
    with serve(settings, connect=hosts.connect) as live:
        yield live, hosts
    assert not hosts.there


def workers_of(live: Live) -> dict[str, int]:
    lines = live.client.get("/metrics").text.splitlines()
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines if line.startswith("stackseg_workers{")}


@pytest.fixture
def stack(phantom_maker: Any) -> bytes:
    return as_tiff(phantom_maker((16, 40, 40), seed=1).image)


def test_workers_are_asked_for_while_there_is_work_and_given_back_afterwards(
    bands_repository: Path, tmp_path: Path, stack: bytes
) -> None:
    with service(bands_repository, tmp_path, 3, 1, at_once=1) as (live, hosts), ThreadPoolExecutor(4) as pool:
        until(lambda: workers_of(live) == {"up": 1, "missing": 0, "given_back": 2})
        live.wait_loaded()
        hosts.gate.clear()
        requests = [pool.submit(live.segment, stack) for _ in range(4)]
        jobs = [live.client.post("/jobs", content=stack).headers["location"] for _ in range(4)]
        # What waits for the first worker and has not begun goes to those that come.
        until(lambda: len(hosts.at_work) == 3)
        assert workers_of(live) == {"up": 3, "missing": 0, "given_back": 0}
        hosts.gate.set()
        assert {request.result().status_code for request in requests} == {200}
        until(lambda: all(live.client.get(job).json()["state"] == "done" for job in jobs))
        until(lambda: workers_of(live) == {"up": 1, "missing": 0, "given_back": 2})
        assert len(hosts.actors) == 3
        assert live.client.get("/health/ready").json() == {"status": "ready"}


def test_without_work_there_need_be_no_worker(bands_repository: Path, tmp_path: Path, stack: bytes) -> None:
    slow = service(bands_repository, tmp_path, 2, 0, request_seconds=4)
    with slow as (live, hosts), ThreadPoolExecutor(1) as pool:
        until(lambda: workers_of(live) == {"up": 0, "missing": 0, "given_back": 2})
        assert live.client.get("/health/ready").json() == {"status": "ready"}
        devices = live.client.get("/gpu").json()["devices"]
        assert [(device["given_back"], device["problem"], device["models"]) for device in devices] == [
            (True, None, []),
            (True, None, []),
        ]
        assert live.segment(stack).status_code == 200
        until(lambda: not hosts.there)
        hosts.none = True
        request = pool.submit(live.segment, stack)
        until(lambda: [device["starting"] for device in live.client.get("/gpu").json()["devices"]] == [True, False])
        answer = request.result()
        assert answer.status_code == 504
        assert "No worker of the cluster is available." in answer.json()["detail"]
        assert live.client.get("/health/ready").json() == {"status": "ready"}


def test_a_worker_that_is_lost_is_missing_and_not_given_back(bands_repository: Path, tmp_path: Path) -> None:
    with service(bands_repository, tmp_path, 2, 1) as (live, hosts):
        until(lambda: workers_of(live) == {"up": 1, "missing": 0, "given_back": 1})
        hosts.there[0].lose()
        until(lambda: workers_of(live) == {"up": 0, "missing": 1, "given_back": 1})
        assert live.client.get("/health/ready").status_code == 503
        hosts.there[0].come_back()
        until(lambda: live.client.get("/health/ready").json() == {"status": "ready"})


@pytest.mark.parametrize(
    ("backlog", "here", "wanted"),
    [
        (Backlog(0, 0.0), 0, 0),
        (Backlog(9, 50.0), 0, 1),
        (Backlog(9, 170.0), 0, 3),
        (Backlog(2, 5000.0), 0, 2),
        (Backlog(3, 5000.0), 1, 2),
        (Backlog(1, 5000.0), 2, 0),
    ],
)
def test_as_many_are_wanted_as_do_the_work_in_time_and_no_more_than_there_are_requests(
    bands_repository: Path, tmp_path: Path, backlog: Backlog, here: int, wanted: int
) -> None:
    settings = remote(bands_repository, tmp_path, cluster={"workers": 8, "least_workers": 0, "backlog_seconds": 60})
    cluster = open_cluster(settings, Hosts().connect, Metrics())
    assert cluster is not None
    assert max(cluster._wanted(backlog, here), 0) == wanted
    cluster.close()


def test_more_workers_at_least_than_at_most_are_refused(bands_repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="least_workers must not exceed workers"):
        remote(bands_repository, tmp_path, cluster={"workers": 1, "least_workers": 2})
