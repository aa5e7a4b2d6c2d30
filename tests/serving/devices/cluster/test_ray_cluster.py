"""A server that uses a real Ray cluster with two nodes on this host. Nodes are killed and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import wait_until
from live import LiveServer, as_tiff, eager_settings, read_classes, serve
from ray_clusters import START_TIMEOUT_SECONDS, ray_cluster, ray_environment, wait_ready

from service.core.types import Options
from service.serving.devices.cluster.block_workers import ActorWorkers, BlockActor
from service.serving.devices.cluster.exchange import MARKER_NAME
from service.serving.devices.cluster.ray_cluster import make_actors
from service.serving.devices.cluster.remote_actor import RESPONSE_TIMEOUT_SECONDS
from service.serving.devices.queue.job import Progress
from tests.block_runs import create_run, segment_blocks, segment_whole
from tests.segmenters import make_settings
from tests.zarr_files import write_zarr

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs stackseg[ray]"),
]

CLIENTS = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of a head node without a device and two nodes with one device each."""
    with ray_environment(), ray_cluster() as ray:
        ray.workers = [ray.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
        yield ray


@pytest.fixture(scope="module")
def live(cluster: Any, bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    shared = tmp_path_factory.mktemp("shared")
    settings = eager_settings(
        bands_repository,
        cluster={"address": cluster.address, "workers": 2, "shared_folder": shared},
        limits={"waiting": 4 * CLIENTS, "at_once": 4},
    )
    with serve(settings, wait=False) as running:
        wait_ready(running)
        wait_until(lambda: all(worker.problem is None for worker in running.runtime.devices.all), START_TIMEOUT_SECONDS)
        yield running
    assert list(shared.iterdir()) == []


def test_every_request_is_answered_once_while_a_node_is_killed_and_replaced(
    live: LiveServer, cluster: Any, bands_repository: Path, phantom_maker: Any
) -> None:
    stacks = [as_tiff(phantom_maker((16, 48, 48), seed=seed).image) for seed in range(4)]
    with serve(eager_settings(bands_repository)) as local:
        expected = [read_classes(local.segment(stack).content) for stack in stacks]
    requests = list[Future[bool]]()

    def is_answered(number: int) -> bool:
        answer = live.segment(stacks[number % len(stacks)])
        return answer.status_code == 200 and np.array_equal(
            read_classes(answer.content), expected[number % len(stacks)]
        )

    def count_answers() -> int:
        return sum(request.done() for request in requests)

    def problems() -> int:
        return sum(worker.problem is not None for worker in live.runtime.devices.all)

    def post_until(condition: Callable[[], bool]) -> None:
        """Keep `CLIENTS` requests running until the condition is true.

        A fast machine could answer any fixed number of requests before the loss of a node is detected.
        """

        def is_reached() -> bool:
            while len(requests) < count_answers() + CLIENTS:
                requests.append(pool.submit(is_answered, len(requests)))
            return condition()

        wait_until(is_reached, START_TIMEOUT_SECONDS)

    with ThreadPoolExecutor(CLIENTS) as pool:
        post_until(lambda: count_answers() > 20)
        cluster.remove_node(cluster.workers[1], allow_graceful=False)
        try:
            post_until(lambda: problems() == 1)
            at_loss = count_answers()
            post_until(lambda: count_answers() > at_loss + 20)
        finally:
            cluster.workers[1] = cluster.add_node(num_cpus=1, num_gpus=1)
    assert all(request.result() for request in requests)
    wait_until(lambda: not problems(), START_TIMEOUT_SECONDS)
    assert live.segment(stacks[0]).status_code == 200
    assert live.leftovers() == []


def test_disconnected_client_stops_remote_computation_within_two_seconds(live: LiveServer, phantom_maker: Any) -> None:
    stack = as_tiff(phantom_maker((256, 256, 256), seed=1).image)
    workers: Any = live.runtime.devices.all

    def progress() -> list[Progress]:
        return [task for worker in workers for task in worker.status.progress.values()]

    # A restarted actor loads its model first.
    wait_until(lambda: not progress(), START_TIMEOUT_SECONDS)
    with closing(HTTPConnection(live.host, live.port)) as connection:
        connection.request("POST", "/segment", stack, {"Content-Type": "image/tiff"})
        wait_until(lambda: any(task.done for task in progress()), START_TIMEOUT_SECONDS)
    disconnected = time.monotonic()
    assert all(task.done < task.total / 2 for task in progress())
    wait_until(lambda: not progress(), 10)
    assert time.monotonic() - disconnected < 2


def test_requests_of_an_unresponsive_host_run_on_another_host(
    live: LiveServer, cluster: Any, bands_repository: Path, phantom_maker: Any
) -> None:
    stack = as_tiff(phantom_maker((128, 256, 256), seed=2).image)
    with serve(eager_settings(bands_repository)) as local:
        expected = read_classes(local.segment(stack).content)
    workers: Any = live.runtime.devices.all
    wait_until(lambda: all(worker.problem is None for worker in workers), START_TIMEOUT_SECONDS)
    before = count_segmentations(live)
    unresponsive_node = cluster.workers[1]
    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(live.segment, stack) for _ in workers]
        wait_until(
            lambda: all(any(task.done for task in worker.status.progress.values()) for worker in workers),
            START_TIMEOUT_SECONDS,
        )
        with suspend(unresponsive_node):
            wait_until(lambda: sum(worker.problem is not None for worker in workers) == 1, RESPONSE_TIMEOUT_SECONDS + 5)
            answers = [request.result() for request in requests]
            assert all(np.array_equal(read_classes(answer.content), expected) for answer in answers)
    # Ray may have removed the unresponsive node, so add a replacement.
    replacement = cluster.add_node(num_cpus=1, num_gpus=1)
    wait_until(lambda: all(worker.problem is None for worker in workers), START_TIMEOUT_SECONDS)
    wait_until(lambda: not any(worker.status.progress for worker in workers), START_TIMEOUT_SECONDS)
    assert live.segment(stack).status_code == 200
    # A request is counted after its response has been sent.
    wait_until(lambda: count_segmentations(live) >= before + len(workers) + 1)
    assert count_segmentations(live) == before + len(workers) + 1
    assert live.leftovers() == []
    assert [entry.name for entry in live.runtime.devices._cluster._exchange.path.iterdir()] == [MARKER_NAME]
    if is_alive(unresponsive_node):
        cluster.remove_node(replacement)
    else:
        cluster.workers[1] = replacement


def test_requests_in_the_cluster_finish_when_the_service_stops(
    cluster: Any, bands_repository: Path, tmp_path: Path, phantom_maker: Any
) -> None:
    """Use a separate node, because a service that stops releases its devices."""
    node = cluster.add_node(num_cpus=1, num_gpus=1)
    stack = as_tiff(phantom_maker((64, 128, 128), seed=1).image)
    settings = eager_settings(
        bands_repository,
        cluster={"address": cluster.address, "workers": 1, "shared_folder": tmp_path},
        server={"drain_seconds": 60},
    )
    with ThreadPoolExecutor(1) as pool:
        with serve(settings, wait=False) as live:
            wait_ready(live)
            requests = pool.submit(live.segment, stack)
            wait_until(lambda: live.runtime.devices.running_jobs, START_TIMEOUT_SECONDS)
            live.server.should_exit = True
            assert requests.result().status_code == 200
        assert list(tmp_path.iterdir()) == []
    wait_until(lambda: count_free_gpus() >= 1, 30)
    cluster.remove_node(node)


def test_blocks_of_a_lost_node_are_restarted_on_another_node(
    cluster: Any, bands: Any, tmp_path: Path, phantom_maker: Any
) -> None:
    source = write_zarr(tmp_path / "in.zarr", phantom_maker((48, 96, 96), seed=1).image, chunks=(16, 32, 32))
    settings = make_settings()
    expected_labels = segment_whole(source, bands, Options(), settings).segmentation.pixels
    folder = create_run(tmp_path / "run", source, bands, Options(), settings, (1, 1, 1))
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    actors = make_actors(cluster.address, settings.cluster, 2, BlockActor)
    with closing(ActorWorkers(actors)) as workers, ThreadPoolExecutor(1) as pool:
        labels = pool.submit(segment_blocks, folder, tmp_path / "out.zarr", workers)
        wait_until(lambda: len(folder.find_finished_blocks("scores")) > 4, START_TIMEOUT_SECONDS)
        cluster.remove_node(nodes[1], allow_graceful=False)
        assert not labels.done()
        assert np.array_equal(labels.result(), expected_labels)
    cluster.remove_node(nodes[0])


def count_free_gpus() -> float:
    import ray  # noqa: PLC0415

    return float(ray.available_resources().get("GPU", 0))


def count_segmentations(live: LiveServer) -> int:
    """Return the number of successful segmentation requests."""
    metric = 'stackseg_requests_total{route="/segment",status="200"}'
    lines = live.client.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(metric))


def is_alive(node: Any) -> bool:
    import ray  # noqa: PLC0415

    return any(known["NodeID"] == node.node_id and known["Alive"] for known in ray.nodes())


@contextmanager
def suspend(node: Any) -> Iterator[None]:
    """Suspend all processes of a node, including actors, and resume them after the block."""
    pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
    for pid in pids:
        pids += [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
