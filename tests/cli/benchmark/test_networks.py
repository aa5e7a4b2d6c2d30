import pytest
import torch
from fake_backends import change

from service.cli.benchmark import networks, timing
from service.cli.benchmark.networks import (
    DevicePeak,
    Runner,
    RunnerBuilder,
    build_and_compare,
)
from service.core.config import Settings
from service.engine import backends

CPU = torch.device("cpu")
IN_USE = Runner("in use", 1, "fp32", lambda: None)


@pytest.fixture(autouse=True)
def _small_matrices(monkeypatch):
    monkeypatch.setattr(timing, "MATRIX_EDGE", 256)


@pytest.fixture
def peak():
    return DevicePeak(CPU, 2.0, {"fp32": 1e6})


def test_rows_compare_with_the_first_round_by_round(peak):
    batch = torch.zeros(2, 1, 4, 4, 4)
    slow = Runner("slow", 2, "fp32", lambda: [batch + 1 for _ in range(2000)])
    quick = Runner("quick", 2, "fp32", lambda: None)
    first, second = networks.compare_runners("engines", [slow, quick], peak)
    assert (first.name, first.ratio.median) == ("slow", 1.0)
    assert second.ratio.least > 1
    for row in (first, second):
        assert row.windows_per_second == pytest.approx(1000 / row.ms_per_window.median)
        assert row.gflop_per_second == pytest.approx(2 * row.windows_per_second)
        assert row.peak_share == pytest.approx(row.gflop_per_second / 1e6)


def test_a_peak_keeps_the_best_it_saw(peak):
    assert peak.measure("fp32") == 1e6
    assert DevicePeak(CPU, 1.0, {}).measure("fp32") > 0.1


def test_engines_are_compared_at_every_batch_size_with_what_is_in_use(bands, peak):
    settings = Settings.model_validate({"engine": {"kind": "eager", "precision": "fp32"}})
    builders = networks.list_engines(bands, settings, CPU, (1, 2))
    rows = list(build_and_compare("engines", [IN_USE], builders, peak))
    assert [row.name for row in rows[:1]] == ["in use"]
    assert {(row.name, row.windows) for row in rows[1:]} == {
        (f"eager fp32 {layout}", size) for layout in ("contiguous", "channels_last_3d") for size in (1, 2)
    }
    assert all(row.ms_per_window is not None for row in rows)


def test_an_engine_that_fails_has_a_row_that_says_why(bands, peak, monkeypatch):
    settings = Settings.model_validate({"engine": {"kind": "openvino", "precision": "fp32"}})
    absent = change(backends.BACKENDS["openvino"], explain_missing=lambda: "not installed")
    monkeypatch.setitem(backends.BACKENDS, "openvino", absent)
    row, other = build_and_compare("engines", [IN_USE], networks.list_engines(bands, settings, CPU, (3,)), peak)
    assert (row.name, row.windows, row.problem) == ("openvino fp32 contiguous", 3, "not installed")
    assert row.ms_per_window is None
    assert other.name == "in use"


def test_nothing_is_built_once_time_is_up(peak):
    builders = [RunnerBuilder("slow", 2, lambda: pytest.fail("was built"))]
    row, other = build_and_compare("engines", [IN_USE], builders, peak, -1.0)
    assert (row.name, row.windows, row.ms_per_window) == ("slow", 2, None)
    assert "not built" in row.problem
    assert other.name == "in use"
