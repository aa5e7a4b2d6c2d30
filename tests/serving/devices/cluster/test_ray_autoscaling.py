"""Ray's autoscaler adds simulated hosts for the workload of a server, and removes them afterwards."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fakes import wait_until
from live import as_tiff, eager_settings, read_classes, serve
from ray_clusters import START_TIMEOUT_SECONDS, autoscaled_cluster, wait_ready

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs stackseg[ray]"),
]


def test_hosts_are_added_for_work_and_removed_afterwards(
    bands_repository: Path, tmp_path: Path, phantom_maker: Any
) -> None:
    stack = as_tiff(phantom_maker((64, 128, 128), seed=1).image)
    with serve(eager_settings(bands_repository)) as local:
        expected = read_classes(local.segment(stack).content)
    shared = tmp_path / "shared"
    shared.mkdir()
    with autoscaled_cluster(tmp_path, 2, idle_seconds=3) as cluster, ThreadPoolExecutor(10) as pool:
        settings = eager_settings(
            bands_repository,
            cluster={
                "address": cluster.address,
                "workers": 2,
                "least_workers": 0,
                "backlog_seconds": 0.1,
                "idle_seconds": 3,
                "shared_folder": shared,
            },
            limits={"waiting": 40, "at_once": 2},
        )
        with serve(settings, wait=False) as live:
            # Workers of Ray have a low CPU priority, so they may start late on a busy machine.
            live.client.timeout = 3 * START_TIMEOUT_SECONDS
            wait_ready(live)
            wait_until(lambda: count_alive_nodes() == 1, START_TIMEOUT_SECONDS)
            jobs = [live.client.post("/jobs", content=stack).headers["location"] for _ in range(10)]
            requests = list[Future[httpx.Response]]()

            def two_hosts_were_added() -> bool:
                # While a host starts, a fast machine could complete any fixed number of requests.
                while sum(not request.done() for request in requests) < 4:
                    requests.append(pool.submit(live.segment, stack))
                return count_alive_nodes() == 3

            wait_until(two_hosts_were_added, START_TIMEOUT_SECONDS)
            for request in requests:
                assert np.array_equal(read_classes(request.result().content), expected)
            wait_until(
                lambda: all(live.client.get(job).json()["state"] == "done" for job in jobs), START_TIMEOUT_SECONDS
            )
            for job in jobs:
                assert np.array_equal(read_classes(live.client.get(f"{job}/result").content), expected)
            wait_until(lambda: count_alive_nodes() == 1, START_TIMEOUT_SECONDS)
            devices = live.client.get("/gpu").json()["devices"]
            assert [(device["given_back"], device["problem"]) for device in devices] == 2 * [(True, None)]
            # The next request waits until a host has been added.
            assert np.array_equal(read_classes(live.segment(stack).content), expected)
            # Wait until the host is removed. Otherwise a Ray process would remain after the cluster has stopped.
            wait_until(lambda: count_alive_nodes() == 1, START_TIMEOUT_SECONDS)


def count_alive_nodes() -> int:
    import ray  # noqa: PLC0415

    return sum(node["Alive"] for node in ray.nodes())
