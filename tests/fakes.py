"""A segmenter that needs no network, for tests of what surrounds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
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
from service.inference.types import EngineReport, Estimate, PlannedRequest, Result

Functions = TypeVar("Functions", bound=CppFunctions)

# As many as a large stack has: of such, one after the other is worked on.
WINDOWS = 100


class Clock:
    """Seconds that pass when a test says so, in place of `time.monotonic`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class SeparateDevice:
    """Driver of a device that computes on the CPU, and counts as one with memory of its own."""

    def __init__(self, free: int = 2**30, total: int = 2**30) -> None:
        self.free, self.total, self.working = free, total, True

    def is_on_host(self, _device: torch.device) -> bool:
        return False

    def is_working(self, _device: torch.device) -> bool:
        return self.working

    def free_bytes(self, _device: torch.device) -> int:
        return self.free

    def total_bytes(self, _device: torch.device) -> int:
        return self.total

    def release_memory(self, _device: torch.device) -> None:
        pass


class FakeEstimator(Estimator):
    """Says the same of every volume."""

    def plan_request(self, volume: Any, options: Any) -> PlannedRequest:
        plan = self.plan(options)
        return PlannedRequest(plan, Estimate(WINDOWS, plan.sw_batch_size, plan.overlap, volume.shape[1:], 1000, 0))


class FakeSegmenter:
    """Calls every voxel brighter than 100 an object, once `gate` is open; `error` is raised instead."""

    def __init__(self, spec: Any, settings: Any, _driver: Any = None) -> None:
        self.spec, self.settings = spec, settings
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.notes: tuple[str, ...] = ()
        self.nbytes = 1000
        self.precision = "fp32"
        self.tuned = False

    def warm_up(self, *, tune: bool = False) -> None:
        self.tuned = tune
        with step("warming up"):
            self.gate.wait(30)
        if self.error is not None:
            raise self.error

    def segment(self, volume: Any, options: Any, _request: Any, callbacks: Callbacks) -> Result:
        callbacks.progress(0, WINDOWS)
        while not self.gate.wait(0.01):
            if callbacks.cancelled():
                raise Cancelled("given up")
        if self.error is not None:
            raise self.error
        pixels = (volume.array()[0] > 100).astype(np.uint8)
        kind = self.estimator.output_kind(options)
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


class Fakes(list[FakeSegmenter]):
    """Loads fake segmenters, changes each as `change` does, and remembers them in their order."""

    def __init__(self, change: Callable[[FakeSegmenter], object] = lambda _fake: None) -> None:
        super().__init__()
        self._change = change

    def __call__(self, *arguments: Any) -> FakeSegmenter:
        fake = FakeSegmenter(*arguments)
        self._change(fake)
        self.append(fake)
        return fake


def closed(fake: FakeSegmenter) -> None:
    fake.gate.clear()


def until(condition: Any, seconds: float = 20) -> None:
    """Wait for something to become true; fails the test if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.01)


def with_library(functions: Functions, *variants: Variant) -> Functions:
    """Load `functions` anew from the library of the first of `variants` that exists; without variants none is ready."""
    other = object.__new__(type(functions))
    CppFunctions.__init__(other, functions.signatures, partial(load_library, variants))
    return other
