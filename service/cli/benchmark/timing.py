"""Clocks and yardsticks: calls timed in turn, their spread, and what the device does at best.

Machines are shared and their clocks vary, so nothing is compared with what was measured a minute ago: what is compared
runs in turn, and a ratio is the median of the ratios of single rounds.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

MATRIX = 2048


@dataclass(frozen=True)
class Spread:
    """Repeated measurements, in their unit."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def ratio(cls, values: Sequence[float], others: Sequence[float]) -> Spread:
        """Of `values` over `others`, round by round."""
        return cls.of([value / other for value, other in zip(values, others, strict=True)])


def in_turn(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of every call in every round; after `seconds` no further round but the second is begun."""
    times: list[list[float]] = [[] for _ in calls]
    deadline = time.monotonic() + seconds
    for done in range(rounds):
        if done >= 2 and time.monotonic() > deadline:
            break
        for call, taken in zip(calls, times, strict=True):
            began = clock()
            call()
            taken.append(clock() - began)
    return times


def synchronised(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """`call`, in inference mode, until the device has done what it asks for."""

    def wait() -> None:
        with torch.inference_mode():
            call()
        synchronise(device)

    return wait


def synchronise(device: torch.device) -> None:
    """Wait for the device to finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_peak(
    dtype: torch.dtype, device: torch.device, calls: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """FLOP per second of a large square matrix product: the least time of several."""
    edge = MATRIX if device.type == "cpu" else 4 * MATRIX
    a, b = (torch.rand(edge, edge, device=device).to(dtype) for _ in range(2))
    call = synchronised(lambda: torch.matmul(a, b), device)
    call()
    return float(2 * edge**3 / min(in_turn([call], calls, clock=clock)[0]))


@torch.inference_mode()
def flop_of_window(network: nn.Module, shape: tuple[int, ...]) -> float:
    """Multiplications and additions of the model as it is written, for one window of `shape` (C, z, y, x)."""
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *shape))
    return float(counter.get_total_flops())


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
