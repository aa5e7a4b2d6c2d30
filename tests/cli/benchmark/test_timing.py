from pathlib import Path

import pytest
import torch
from torch import nn

from service.cli.benchmark import timing
from service.cli.benchmark.timing import Spread, time_in_turn

CPU = torch.device("cpu")
STATUS = Path("/proc/self/status")


def test_calls_alternate():
    order = []
    times = time_in_turn([lambda: order.append("a"), lambda: order.append("b")], 3)
    assert order == ["a", "b"] * 3
    assert [len(column) for column in times] == [3, 3]


def test_two_rounds_at_least_and_no_third_once_time_is_up():
    ticks = iter(range(100))
    times = time_in_turn([lambda: None], 50, seconds=0.0, clock=lambda: next(ticks))
    assert times == [[1, 1]]


def test_a_ratio_is_that_of_single_rounds():
    assert Spread.ratio([1, 4, 9], [2, 2, 3]) == Spread(2.0, 0.5, 3.0)
    assert Spread.of([3, 1, 2]) == Spread(2, 1, 3)


def test_arithmetic_is_that_of_the_network():
    network = nn.Conv3d(2, 4, 3, padding=1, bias=False)
    assert timing.flop_of_window(network, (2, 8, 8, 8)) == 2 * 8**3 * 2 * 4 * 27


def test_the_peak_is_that_of_a_matrix_product(monkeypatch):
    monkeypatch.setattr(timing, "MATRIX_EDGE", 256)
    assert timing.matrix_peak(torch.float32, CPU, calls=1) > 1e8


def test_what_is_timed_runs_without_gradients():
    seen = []
    timing.synchronised(lambda: seen.append(torch.is_inference_mode_enabled()), CPU)()
    assert seen == [True]


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux")
def test_the_peak_of_memory_is_what_the_system_says():
    most = next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    assert timing.peak_bytes() == pytest.approx(most * 1024, rel=0.05)
