"""End-to-end tests of clients that share one device: shared batches, fairness, and cancellation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from live import LiveServer, as_tiff, make_live_fixture, read_classes, wait_until
from runtimes import get_loaded_segmenter
from torch import Tensor

from service.models.network import Network
from service.serving.devices.local.model import Segmenter

BATCH_SIZE = 4
BATCH_SECONDS = 0.1


class RecordingSegmenter(Segmenter):
    """A segmenter with slow batches that wait until `gate` is open, and fail for bright images.

    calls  start times of the batches
    """

    def warm_up(self, **options: Any) -> None:
        super().warm_up(**options)
        self.calls: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.instrument(self._record)

    def _record(self, network: Network) -> Network:
        def recorded(batch: Tensor) -> Tensor:
            self.calls.append(time.monotonic())
            time.sleep(BATCH_SECONDS)
            self.gate.wait(30)
            if batch.max() > 20:
                raise RuntimeError("too bright")
            return network(batch)

        return recorded


live = make_live_fixture(load=RecordingSegmenter, windows={"sw_batch_size": BATCH_SIZE}, limits={"waiting": 30})


@pytest.fixture
def calls(live: LiveServer) -> list[float]:
    """The start times of the batches computed from now on. The list grows during the test."""
    wait_until(lambda: not live.runtime.devices.running_jobs, 20)
    segmenter: Any = get_loaded_segmenter(live.runtime.models, None)
    segmenter.calls.clear()
    return segmenter.calls


@pytest.fixture
def large(phantom_maker: Any) -> bytes:
    return as_tiff(phantom_maker((64, 400, 400), seed=1).image)


def read_window_counts(live: LiveServer) -> tuple[float, float]:
    """Return the number of computed windows, and the number of batch slots."""
    lines = live.client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    windows, slots = (values.get(f'stackseg_{name}_total{{model="bands"}}', 0) for name in ("windows", "batch_slots"))
    return float(windows), float(slots)


def test_concurrent_requests_do_not_change_labels_even_if_others_fail_or_are_cancelled(
    live: LiveServer, calls: list[float], phantom_maker: Any
) -> None:
    shapes = [(16, 32, 32), (9, 20, 32), (16, 32, 32), (40, 60, 50), (3, 32, 70), (16, 32, 32)]
    stacks = [as_tiff(phantom_maker(shape, seed=seed).image) for seed, shape in enumerate(shapes)]
    expected_labels = [read_classes(live.segment(stack).content) for stack in stacks]
    too_bright = as_tiff(np.full((40, 60, 50), 65535, np.uint16))
    cancelled = as_tiff(phantom_maker((32, 100, 100), seed=7).image)
    calls.clear()
    with ThreadPoolExecutor(len(stacks) + 1) as pool:
        failing = pool.submit(live.segment, too_bright)
        job = live.submit(cancelled)
        together = [pool.submit(live.segment, stack) for stack in stacks * 2]
        wait_until(lambda: len(calls) > 2, 20)
        assert live.client.delete(f"/jobs/{job['id']}").status_code == 204
        assert failing.result().json()["type"] == "urn:stackseg:problem:internal-error"
        assert failing.result().headers["connection"] == "close", "the client must not reuse the connection"
    for expected, answer in zip(expected_labels * 2, together, strict=True):
        assert np.array_equal(read_classes(answer.result().content), expected)
    assert live.show(job)["state"] == "cancelled"
    wait_until(lambda: live.leftovers() == [], 20)


def test_batches_contain_windows_of_several_clients(live: LiveServer, calls: list[float], phantom_maker: Any) -> None:
    small = [as_tiff(phantom_maker((16, 32, 32), seed=seed).image) for seed in range(8)]
    before = read_window_counts(live)
    live.segment(small[0])
    between = read_window_counts(live)
    assert (between[0] - before[0], between[1] - before[1]) == (1, BATCH_SIZE), "a single window is a batch of its own"
    calls.clear()
    segmenter: Any = get_loaded_segmenter(live.runtime.models, None)
    with ThreadPoolExecutor(len(small)) as pool:
        for _ in range(2):
            segmenter.gate.clear()
            answers = [pool.submit(live.segment, stack) for stack in small]
            # Wait until all requests have arrived, while the gate holds the first batch.
            wait_until(
                lambda: sum(job.progress.total > 0 for job in live.runtime.devices.running_jobs) == len(small), 20
            )
            segmenter.gate.set()
            assert all(answer.result().status_code == 200 for answer in answers)
    windows, slots = (now - then for now, then in zip(read_window_counts(live), between, strict=True))
    assert windows == 2 * len(small)
    assert slots == pytest.approx(BATCH_SIZE * len(calls))
    assert windows / slots > 0.5


def test_small_stack_is_segmented_while_a_large_one_is_running(
    live: LiveServer, calls: list[float], large: bytes, phantom_maker: Any
) -> None:
    job = live.submit(large)
    wait_until(lambda: len(calls) > 1, 20)
    before = len(calls)
    assert live.segment(as_tiff(phantom_maker((16, 32, 32), seed=3).image)).status_code == 200
    progress = live.show(job)["progress"]
    assert before * BATCH_SIZE <= progress["done"] < progress["total"] / 2
    assert live.client.delete(f"/jobs/{job['id']}").status_code == 204


def cancel_job(live: LiveServer, calls: list[float], stack: bytes) -> None:
    """Start a job and cancel it."""
    job = live.submit(stack)
    wait_until(lambda: len(calls) > 1, 20)
    assert live.client.delete(f"/jobs/{job['id']}").status_code == 204


def disconnect(live: LiveServer, calls: list[float], stack: bytes) -> None:
    """Start a request and close its connection."""
    with live.open_request("/segment", stack):
        wait_until(lambda: len(calls) > 1, 20)
        (job,) = live.runtime.devices.running_jobs
    wait_until(job.cancelled, 20)


@pytest.mark.parametrize("abandon", [cancel_job, disconnect])
def test_cancellation_frees_the_device_within_two_batches(
    live: LiveServer, calls: list[float], large: bytes, abandon: Callable[[LiveServer, list[float], bytes], None]
) -> None:
    abandon(live, calls, large)
    before = len(calls)
    time.sleep(6 * BATCH_SECONDS)
    assert len(calls) <= before + 2
    wait_until(lambda: live.leftovers() == [], 20)
