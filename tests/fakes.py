"""A fake segmenter without a network, and other fakes for tests of the code around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from service.core.errors import Cancelled
from service.core.native.library import CppFunctions, load_library
from service.core.native.variants import Variant
from service.core.telemetry import step
from service.core.types import Segmentation
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.estimator import Estimator
from service.inference.types import EngineReport, PlannedRequest, ResourceEstimate, Result

Functions = TypeVar("Functions", bound=CppFunctions)

# Number of windows of every request, as many as a large stack has. The queue runs such requests one at a time.
NUM_WINDOWS = 100


class Clock:
    """A clock that a test advances by hand, in place of `time.monotonic`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class SeparateMemoryDriver:
    """A driver of the CPU that reports it as a device with its own memory."""

    def __init__(self, free: int = 2**30, total: int = 2**30) -> None:
        self.free, self.total, self.is_healthy = free, total, True

    def uses_host_memory(self, _device: torch.device) -> bool:
        return False

    def is_working(self, _device: torch.device) -> bool:
        return self.is_healthy

    def query_free_bytes(self, _device: torch.device) -> int:
        return self.free

    def query_total_bytes(self, _device: torch.device) -> int:
        return self.total

    def release_memory(self, _device: torch.device) -> None:
        pass


class FakeEstimator(Estimator):
    """Returns the same estimate for every volume, apart from its shape."""

    def plan_request(self, volume: Any, options: Any) -> PlannedRequest:
        plan = self.plan(options)
        return PlannedRequest(
            plan, ResourceEstimate(NUM_WINDOWS, plan.sw_batch_size, plan.overlap, volume.shape[1:], 1000, 0)
        )


class FakeSegmenter:
    """Labels every voxel brighter than 100 as an object, or raises `error`. Waits until `gate` is open."""

    def __init__(self, spec: Any, settings: Any, _driver: Any = None) -> None:
        self.spec, self.settings = spec, settings
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.notes: tuple[str, ...] = ()
        self.nbytes = 1000
        self.precision = "fp32"
        self.was_tuned = False

    def warm_up(self, *, tune: bool = False) -> None:
        self.was_tuned = tune
        with step("warming up"):
            self.gate.wait(30)
        if self.error is not None:
            raise self.error

    def segment(self, volume: Any, options: Any, _request: Any, callbacks: Callbacks) -> Result:
        callbacks.progress(0, NUM_WINDOWS)
        while not self.gate.wait(0.01):
            if callbacks.cancelled():
                raise Cancelled("cancelled by the test")
        if self.error is not None:
            raise self.error
        pixels = (volume.read_all()[0] > 100).astype(np.uint8)
        kind = self.estimator.get_output_kind(options)
        segmentation = Segmentation(pixels, kind, volume.voxel_size, names=("background", "object"))
        return Result(segmentation, {"windows": 0.5}, self.notes, spec=self.spec)

    @property
    def estimator(self) -> Estimator:
        return FakeEstimator(self.spec, self.settings)

    def report(self) -> EngineReport:
        return EngineReport(
            "cpu",
            "fake",
            "eager",
            self.precision,
            "contiguous",
            None,
            self.spec.input.roi_size,
            2,
            0.25,
            "gaussian",
            0.0,
            ("slow",),
        )


class FakeSegmenterFactory(list[FakeSegmenter]):
    """Creates fake segmenters, applies `change` to each, and lists them in the order of their creation."""

    def __init__(self, change: Callable[[FakeSegmenter], object] = lambda _fake: None) -> None:
        super().__init__()
        self._change = change

    def __call__(self, *arguments: Any) -> FakeSegmenter:
        fake = FakeSegmenter(*arguments)
        self._change(fake)
        self.append(fake)
        return fake


def close_gate(fake: FakeSegmenter) -> None:
    """Close the gate of a fake segmenter, so that its work waits."""
    fake.gate.clear()


def find_forked_process(pid: int) -> int:
    """Return the ID of the only child of a process of the sandbox, which reads files."""
    (forked_pid,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(forked_pid)


def wait_until(condition: Any, seconds: float = 20) -> None:
    """Wait until `condition()` is true. Fail the test if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.01)


def bind_to_variants(functions: Functions, *variants: Variant) -> Functions:
    """Return a copy of `functions` from the first of `variants` that exists. Without variants it has no library."""
    copied = object.__new__(type(functions))
    CppFunctions.__init__(copied, functions.signatures, partial(load_library, variants))
    return copied
