"""Alternating timing of calls, statistics of the timings, and the peak speed of a device.

Machines are shared and clock frequencies vary. Calls that are compared therefore run alternately, and a ratio is the
median of the per-round ratios.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

MATRIX_EDGE = 2048


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def from_ratios(cls, values: Sequence[float], references: Sequence[float]) -> Spread:
        """Return the spread of the ratios of `values` to `references`, round by round."""
        return cls.from_values([value / reference for value, reference in zip(values, references, strict=True)])


def time_alternately(
    calls: Sequence[Callable[[], object]],
    max_rounds: int,
    max_seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return the seconds that every call took in every round.

    After `max_seconds`, no further round starts, but at least two rounds run if `max_rounds` allows them.
    """
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.monotonic() + max_seconds
    for round_number in range(max_rounds):
        if round_number >= 2 and time.monotonic() > deadline:
            break
        for call, durations in zip(calls, times, strict=True):
            start = clock()
            call()
            durations.append(clock() - start)
    return times


def make_synchronized(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Return a function that runs `call` in inference mode and waits for the device to finish."""

    def run() -> None:
        with torch.inference_mode():
            call()
        synchronize(device)

    return run


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_matrix_peak(
    dtype: torch.dtype, device: torch.device, repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measure the FLOP/s of a large square matrix product, using the shortest of several timings."""
    edge = MATRIX_EDGE if device.type == "cpu" else 4 * MATRIX_EDGE
    a, b = (torch.rand(edge, edge, device=device).to(dtype) for _ in range(2))
    call = make_synchronized(lambda: torch.matmul(a, b), device)
    call()
    return float(2 * edge**3 / min(time_alternately([call], repeats, clock=clock)[0]))


@torch.inference_mode()
def count_window_flop(network: nn.Module, shape: tuple[int, ...]) -> float:
    """Count the multiplications and additions of a network for one window of `shape` (C, z, y, x)."""
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *shape))
    return float(counter.get_total_flops())


def get_peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
