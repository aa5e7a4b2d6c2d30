"""A server whose devices are actors in threads of the test. Actors are lost and recover."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeSegmenterFactory, close_gate, wait_until
from live import LiveServer, as_tiff, eager_settings, read_classes, serve
from thread_actors import ThreadActor, UnresponsiveActor, make_cluster_settings, make_device_actor

from service.core.config import Settings
from service.core.errors import ConfigError
from service.core.sections.computing import Cluster
from service.core.sections.serving import Access, References
from service.core.types import Volume
from service.models.repository import read_spec
from service.serving.build import build_runtime
from service.serving.devices.cluster.actor import Actor, ActorFactory
from service.serving.devices.cluster.actor_pool import ActorPool
from service.serving.devices.cluster.device_actor import make_actor_settings
from service.serving.devices.cluster.exchange import ABANDONED_SECONDS, MARKER_NAME, Exchange, Task
from service.serving.devices.cluster.remote_actor import POLL_INTERVAL_SECONDS, STATUS_INTERVAL_SECONDS
from service.serving.devices.local.model import Segmenter

Service = tuple[LiveServer, list[ThreadActor]]


@contextmanager
def run_two_workers(settings: Settings, load: Any = Segmenter) -> Iterator[Service]:
    actors: list[ThreadActor] = []

    def connect(actor_config: Settings) -> ActorFactory:
        def make_actor() -> Actor:
            actors.append(make_device_actor(actor_config, load))
            return actors[-1]

        return make_actor

    with serve(settings, connect=connect) as live:
        wait_until(lambda: all(worker.problem is None for worker in live.runtime.devices.all))
        live.wait_loaded()
        yield live, actors
    assert all(actor.killed.is_set() for actor in actors)


@pytest.fixture(scope="module")
def service(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    shared = tmp_path_factory.mktemp("shared")
    with run_two_workers(make_cluster_settings(bands_repository, shared)) as running:
        yield running
    assert list(shared.iterdir()) == []


@pytest.fixture
def stack(phantom_maker: Any) -> bytes:
    return as_tiff(phantom_maker((16, 40, 40), seed=1).image)


def test_labels_equal_those_of_a_local_device(service: Service, bands_repository: Path, phantom_maker: Any) -> None:
    live, _ = service
    stacks = [as_tiff(phantom_maker((16, 40, 40), seed=seed).image) for seed in range(6)]
    with serve(eager_settings(bands_repository)) as local:
        expected = [read_classes(local.segment(stack).content) for stack in stacks]
    with ThreadPoolExecutor(12) as pool:
        for labels, answer in zip(expected * 2, pool.map(live.segment, stacks * 2), strict=True):
            assert np.array_equal(read_classes(answer.content), labels)
            # The etag shows that the execution settings are known, so the response can be cached.
            assert "etag" in answer.headers
    metrics = live.client.get("/metrics").text
    lines = [line for line in metrics.splitlines() if line.startswith("stackseg_device_windows_total")]
    assert {line.split('"')[1] for line in lines} == {"ray-1", "ray-2"}
    devices = live.client.get("/gpu").json()["devices"]
    assert [(device["name"], device["models"]) for device in devices] == [("ray-1", ["bands"]), ("ray-2", ["bands"])]
    assert all(device["host"] for device in devices)
    assert len(live.client.get("/gpu").json()["hosts"]) == 1


def test_requests_of_a_lost_worker_run_on_another_worker_until_it_recovers(
    service: Service, phantom_maker: Any
) -> None:
    live, actors = service
    stack = as_tiff(phantom_maker((32, 64, 64), seed=3).image)
    expected = read_classes(live.segment(stack).content)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(live.segment, stack) for _ in range(24)]
        wait_until(lambda: any(actor._pending for actor in actors))
        actors[0].lose()
        assert all(np.array_equal(read_classes(answer.result().content), expected) for answer in answers)
    assert "does not respond" in live.client.get("/gpu").json()["devices"][0]["problem"]
    assert live.client.get("/health/ready").json() == {"status": "degraded"}
    actors[1].lose()
    wait_until(lambda: live.client.get("/health/ready").status_code == 503)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.segment, stack)
        actors[0].restart()
        assert np.array_equal(read_classes(answer.result().content), expected)
    actors[1].restart()
    wait_until(lambda: live.client.get("/health/ready").json() == {"status": "ready"})


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        pytest.param((1, 0), 200, id="one-device-lost"),
        pytest.param((1, 1), 200, id="both-devices-lost-once"),
        pytest.param((3, 3), 503, id="too-many-losses"),
    ],
)
def test_request_is_retried_if_its_device_is_lost(
    service: Service, stack: bytes, losses: tuple[int, int], status: int
) -> None:
    live, actors = service
    # A worker that is still recovering from an earlier loss would not receive the request.
    wait_until(lambda: all(worker.problem is None for worker in live.runtime.devices.all))
    for actor, times in zip(actors, losses, strict=True):
        actor.remaining_device_failures = times
    answer = live.segment(stack)
    assert answer.status_code == status
    if status == 200:
        assert actors[0].remaining_device_failures == 0
    else:
        assert answer.json()["type"] == "urn:stackseg:problem:interrupted"
    for actor in actors:
        actor.remaining_device_failures = 0


def test_cancelled_request_stops_the_computation_in_its_actor(
    bands_repository: Path, tmp_path: Path, stack: bytes
) -> None:
    fakes = FakeSegmenterFactory()
    with run_two_workers(make_cluster_settings(bands_repository, tmp_path), fakes) as (live, actors):
        wait_until(lambda: len(fakes) == 2)
        for fake in fakes:
            fake.gate.clear()
        job = live.client.post("/jobs", content=stack).headers["location"]
        wait_until(lambda: any(actor.device._jobs for actor in actors))
        wait_until(lambda: live.client.get(job).json()["progress"]["total"] > 0)
        assert live.client.delete(job).status_code == 204
        wait_until(lambda: not any(actor.device._jobs for actor in actors), 2)
        for fake in fakes:
            fake.gate.set()


def test_worker_recovers_after_its_calls_fail(service: Service, monkeypatch: pytest.MonkeyPatch, stack: bytes) -> None:
    live, actors = service
    worker = live.runtime.devices.all[0]
    wait_until(lambda: worker.problem is None)

    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot schedule new calls")

    with monkeypatch.context() as patch:
        patch.setattr(actors[0], "call", fail)
        wait_until(lambda: worker.problem is not None)
    wait_until(lambda: worker.problem is None)
    assert live.segment(stack).status_code == 200


def test_status_call_does_not_unload_models_of_tasks(bands_repository: Path, tmp_path: Path) -> None:
    fakes = FakeSegmenterFactory(close_gate)
    actor = make_device_actor(make_cluster_settings(bands_repository, tmp_path), fakes)
    spec = read_spec(bands_repository / "bands")
    blocking, loaded = (actor.call("load", Task(name, name, spec)) for name in ("first", "second"))
    wait_until(lambda: fakes)
    wait_until(lambda: len(actor.device._jobs) == 2)
    actor.device.report_status(())
    fakes[0].gate.set()
    wait_until(lambda: len(fakes) == 2)
    fakes[1].gate.set()
    assert [call.result(20).error for call in (blocking, loaded)] == [None, None]


def test_exchange_folder_is_renewed_while_actors_do_not_respond(tmp_path: Path) -> None:
    exchange, silent_actor = Exchange(tmp_path), UnresponsiveActor()
    [device] = ActorPool(exchange, lambda: silent_actor, Cluster(), 1).actors
    device.start()
    time.sleep(STATUS_INTERVAL_SECONDS + 2 * POLL_INTERVAL_SECONDS)
    os.utime(exchange.path / MARKER_NAME, (0, 0))
    exchange._last_touch_time = -ABANDONED_SECONDS
    wait_until(lambda: (exchange.path / MARKER_NAME).stat().st_mtime > 0, 5)
    device.close()
    assert device.join(5)


def test_exchange_requires_a_folder_and_deletes_abandoned_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a writable folder"):
        Exchange(tmp_path / "missing")
    killed, running = Exchange(tmp_path), Exchange(tmp_path)
    for exchange in (killed, running):
        os.utime(exchange.path / MARKER_NAME, (0, 0))
    started = Exchange(tmp_path)
    started.touch_marker()
    # The marker of a running service looks old if the clock of a host was set.
    running._last_touch_time = -ABANDONED_SECONDS
    running.touch_marker()
    started._start_time -= ABANDONED_SECONDS
    started.touch_marker()
    assert (killed.path.exists(), running.path.exists()) == (False, True)


def test_exchange_folders_are_private_and_actors_get_no_keys(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        exchange = Exchange(tmp_path)
        with exchange.share_volume(Volume.from_array(np.zeros((1, 2, 3, 4), np.uint8))) as stored:
            folders = [exchange.path, stored.path.parent]
            assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    finally:
        os.umask(umask)
    settings = Settings.model_validate(
        {"access": {"keys": {"ada": "sha256:" + 64 * "0"}}, "references": {"inputs": {"a": tmp_path}}}
    )
    remote_settings = make_actor_settings(settings)
    assert (remote_settings.access, remote_settings.references) == (Access(), References())


def test_missing_ray_is_reported_with_the_install_command(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install .stackseg\[ray\]"):
        build_runtime(make_cluster_settings(bands_repository, tmp_path))
