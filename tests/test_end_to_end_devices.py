"""End-to-end tests of a server with two devices: load balancing, cancellation, and a stuck device."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from live import LiveServer, as_tiff, make_live_fixture, read_classes, wait_until
from runtimes import list_model_caches
from torch import Tensor

from service.models.network import Network
from service.serving.devices.local.model import Segmenter

BATCH_SECONDS = 0.05


class SlowSegmenter(Segmenter):
    """A segmenter with slow batches, so that requests are shared between devices. Batches wait until `gate` is open."""

    def warm_up(self, *, tune: bool = False) -> None:
        super().warm_up(tune=tune)
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self.instrument(self._slow)

    def _slow(self, network: Network) -> Network:
        def slow(batch: Tensor) -> Tensor:
            self.calls += 1
            time.sleep(BATCH_SECONDS)
            self.gate.wait(30)
            return network(batch)

        return slow


live = make_live_fixture(
    load=SlowSegmenter,
    device={"serve": ["cpu", "cpu"], "threads": 1},
    watchdog={"batch_seconds": 2.5, "grace_seconds": 600},
    limits={"waiting": 40},
)


def list_segmenters(live: LiveServer) -> list[Any]:
    """Return the segmenter of each device."""
    return [model.segmenter for cache in list_model_caches(live.runtime) if (model := cache.get("bands"))]


def test_requests_use_all_devices_with_the_same_labels(live: LiveServer, phantom_maker: Any) -> None:
    stacks = [as_tiff(phantom_maker((16, 40, 40), seed=seed).image) for seed in range(6)]
    alone = [read_classes(live.segment(stack).content) for stack in stacks]
    before = [segmenter.calls for segmenter in list_segmenters(live)]
    with ThreadPoolExecutor(12) as pool:
        for expected, answer in zip(alone * 2, pool.map(live.segment, stacks * 2), strict=True):
            assert np.array_equal(read_classes(answer.content), expected)
    assert all(segmenter.calls > calls for segmenter, calls in zip(list_segmenters(live), before, strict=True))
    metrics = live.client.get("/metrics").text
    windows_by_device = dict(
        line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("stackseg_device_windows_total")
    )
    assert {name.split('"')[1] for name in windows_by_device} == {"cpu", "cpu-2"}
    assert all(float(windows) > 0 for windows in windows_by_device.values())
    assert 'stackseg_loaded_models{device="cpu-2"} 1.0' in metrics
    (model,) = live.client.get("/models").json()["models"]
    assert [one["device"] for one in model["devices"]] == ["cpu", "cpu-2"]
    assert live.leftovers() == []


def test_jobs_can_be_cancelled_on_every_device(live: LiveServer, phantom_maker: Any) -> None:
    stack = as_tiff(phantom_maker((48, 120, 120), seed=1).image)
    for segmenter in list_segmenters(live):
        segmenter.gate.clear()
    jobs = [live.submit(stack) for _ in range(2)]
    wait_until(lambda: [live.show(job)["state"] for job in jobs] == ["running", "running"], 30)
    report = live.client.get("/gpu").json()["devices"]
    assert [(device["name"], device["running"], device["models"]) for device in report] == [
        ("cpu", 1, ["bands"]),
        ("cpu-2", 1, ["bands"]),
    ]
    for job in jobs:
        assert live.client.delete(f"/jobs/{job['id']}").status_code == 204
    for segmenter in list_segmenters(live):
        segmenter.gate.set()
    wait_until(lambda: [live.show(job)["state"] for job in jobs] == ["cancelled", "cancelled"], 20)
    wait_until(lambda: not live.runtime.devices.running_jobs, 20)


def test_stuck_device_is_reported_and_requests_use_the_other_device(live: LiveServer, phantom_maker: Any) -> None:
    stack = as_tiff(phantom_maker((16, 32, 32), seed=1).image)
    first, second = list_segmenters(live)
    first.gate.clear()
    job = live.submit(stack)
    ready = "/health/ready"
    wait_until(lambda: live.client.get(ready).status_code == 503, 20)
    assert "The device cpu is stuck" in live.client.get(ready).json()["detail"]
    assert "stuck" in (live.client.get("/gpu").json()["devices"][0]["problem"] or "")
    calls = second.calls
    assert live.segment(stack).status_code == 200
    assert second.calls > calls
    first.gate.set()
    wait_until(lambda: live.client.get(ready).status_code == 200, 20)
    live.wait(job, "done")
