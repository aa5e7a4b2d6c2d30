from pathlib import Path

import pytest
import torch
from torch import nn

from service.cli.benchmark import timing
from service.cli.benchmark.timing import Spread, time_alternately

CPU = torch.device("cpu")
STATUS = Path("/proc/self/status")


def test_calls_are_timed_alternately():
    order = []
    times = time_alternately([lambda: order.append("a"), lambda: order.append("b")], 3)
    assert order == ["a", "b"] * 3
    assert [len(column) for column in times] == [3, 3]


def test_only_two_rounds_run_after_the_time_limit():
    ticks = iter(range(100))
    times = time_alternately([lambda: None], 50, max_seconds=0.0, clock=lambda: next(ticks))
    assert times == [[1, 1]]


def test_ratio_is_computed_round_by_round():
    assert Spread.from_ratios([1, 4, 9], [2, 2, 3]) == Spread(2.0, 0.5, 3.0)
    assert Spread.from_values([3, 1, 2]) == Spread(2, 1, 3)


def test_flop_count_of_a_network():
    network = nn.Conv3d(2, 4, 3, padding=1, bias=False)
    assert timing.count_window_flop(network, (2, 8, 8, 8)) == 2 * 8**3 * 2 * 4 * 27


def test_matrix_peak_is_plausible(monkeypatch):
    monkeypatch.setattr(timing, "MATRIX_EDGE", 256)
    assert timing.measure_matrix_peak(torch.float32, CPU, repeats=1) > 1e8


def test_timed_calls_run_in_inference_mode():
    modes = []
    timing.make_synchronized(lambda: modes.append(torch.is_inference_mode_enabled()), CPU)()
    assert modes == [True]


@pytest.mark.skipif(not STATUS.exists(), reason="requires Linux")
def test_peak_memory_equals_the_value_of_the_system():
    peak_kib = next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    assert timing.get_peak_memory_bytes() == pytest.approx(peak_kib * 1024, rel=0.05)
