"""Clients of a real server who share its device: what each gets, and what it does for those who have gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import Live, as_tiff, classes, eager, serve, until
from runtimes import loaded_segmenter
from torch import Tensor

from service.models.network import Network
from service.serving.devices.local.segmenter import Segmenter

ROOM = 4
SECONDS = 0.1


class Watched(Segmenter):
    """Notes when its network is called, takes its time, or until `gate` is open, and fails for what is too bright."""

    def warm_up(self, **options: Any) -> None:
        super().warm_up(**options)
        self.calls: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.instrument(self._watch)

    def _watch(self, network: Network) -> Network:
        def watched(batch: Tensor) -> Tensor:
            self.calls.append(time.monotonic())
            time.sleep(SECONDS)
            self.gate.wait(30)
            if batch.max() > 20:
                raise RuntimeError("too bright")
            return network(batch)

        return watched


@pytest.fixture(scope="module")
def live(bands_repository: Path) -> Iterator[Live]:
    settings = eager(bands_repository, windows={"sw_batch_size": ROOM}, limits={"waiting": 30})
    with serve(settings, load=Watched) as running:
        yield running


@pytest.fixture
def calls(live: Live) -> list[float]:
    """When the network was called, as the list grows."""
    until(lambda: not live.runtime.devices.running, 20)
    segmenter: Any = loaded_segmenter(live.runtime.models, None)
    segmenter.calls.clear()
    return segmenter.calls


@pytest.fixture
def large(phantom_maker: Any) -> bytes:
    return as_tiff(phantom_maker((64, 400, 400), seed=1).image)


def counted(live: Live) -> tuple[float, float]:
    """Windows computed, and the room that there was for them."""
    lines = live.client.get("/metrics").text.splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    windows, slots = (told.get(f'stackseg_{name}_total{{model="bands"}}', 0) for name in ("windows", "batch_slots"))
    return float(windows), float(slots)


def test_labels_are_those_of_a_stack_alone_though_one_is_cancelled_and_one_fails(
    live: Live, calls: list[float], phantom_maker: Any
) -> None:
    shapes = [(16, 32, 32), (9, 20, 32), (16, 32, 32), (40, 60, 50), (3, 32, 70), (16, 32, 32)]
    stacks = [as_tiff(phantom_maker(shape, seed=seed).image) for seed, shape in enumerate(shapes)]
    alone = [classes(live.segment(stack).content) for stack in stacks]
    evil = as_tiff(np.full((40, 60, 50), 65535, np.uint16))
    unwanted = as_tiff(phantom_maker((32, 100, 100), seed=7).image)
    calls.clear()
    with ThreadPoolExecutor(len(stacks) + 1) as pool:
        failing = pool.submit(live.segment, evil)
        job = live.submit(unwanted)
        together = [pool.submit(live.segment, stack) for stack in stacks * 2]
        until(lambda: len(calls) > 2, 20)
        assert live.client.delete(f"/jobs/{job['id']}").status_code == 204
        assert failing.result().json()["type"] == "urn:stackseg:problem:internal-error"
        assert failing.result().headers["connection"] == "close", "so that nobody sends another request into it"
    for expected, answer in zip(alone * 2, together, strict=True):
        assert np.array_equal(classes(answer.result().content), expected)
    assert live.show(job)["state"] == "cancelled"
    until(lambda: live.leftovers() == [], 20)


def test_batches_are_filled_with_windows_of_several_clients(live: Live, calls: list[float], phantom_maker: Any) -> None:
    small = [as_tiff(phantom_maker((16, 32, 32), seed=seed).image) for seed in range(8)]
    before = counted(live)
    live.segment(small[0])
    between = counted(live)
    assert (between[0] - before[0], between[1] - before[1]) == (1, ROOM), "alone, one window is a batch"
    calls.clear()
    segmenter: Any = loaded_segmenter(live.runtime.models, None)
    with ThreadPoolExecutor(len(small)) as pool:
        for _ in range(2):
            segmenter.gate.clear()
            answers = [pool.submit(live.segment, stack) for stack in small]
            # However long each takes to arrive, while the first batch is computed.
            until(lambda: sum(job.progress.total > 0 for job in live.runtime.devices.running) == len(small), 20)
            segmenter.gate.set()
            assert all(answer.result().status_code == 200 for answer in answers)
    windows, slots = (now - then for now, then in zip(counted(live), between, strict=True))
    assert windows == 2 * len(small)
    assert slots == pytest.approx(ROOM * len(calls))
    assert windows / slots > 0.5


def test_small_stack_is_answered_while_a_large_one_is_computed(
    live: Live, calls: list[float], large: bytes, phantom_maker: Any
) -> None:
    job = live.submit(large)
    until(lambda: len(calls) > 1, 20)
    before = len(calls)
    assert live.segment(as_tiff(phantom_maker((16, 32, 32), seed=3).image)).status_code == 200
    progress = live.show(job)["progress"]
    assert before * ROOM <= progress["done"] < progress["total"] / 2
    assert live.client.delete(f"/jobs/{job['id']}").status_code == 204


def cancel(live: Live, calls: list[float], stack: bytes) -> None:
    job = live.submit(stack)
    until(lambda: len(calls) > 1, 20)
    assert live.client.delete(f"/jobs/{job['id']}").status_code == 204


def hang_up(live: Live, calls: list[float], stack: bytes) -> None:
    with live.sending("/segment", stack):
        until(lambda: len(calls) > 1, 20)
        (job,) = live.runtime.devices.running
    until(job.cancelled, 20)


@pytest.mark.parametrize("give_up", [cancel, hang_up])
def test_giving_up_frees_the_device_within_two_batches(
    live: Live, calls: list[float], large: bytes, give_up: Callable[[Live, list[float], bytes], None]
) -> None:
    give_up(live, calls, large)
    told = len(calls)
    time.sleep(6 * SECONDS)
    assert len(calls) <= told + 2
    until(lambda: live.leftovers() == [], 20)
