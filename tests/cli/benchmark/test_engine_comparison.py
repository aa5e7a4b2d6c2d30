import pytest
import torch
from fake_backends import copy_with

from service.cli.benchmark import engine_comparison, timing
from service.cli.benchmark.engine_comparison import (
    DevicePeak,
    TimedNetwork,
    TimedNetworkBuilder,
    compare_with_first,
    format_config,
    is_tf32_allowed,
)
from service.core.config import Settings
from service.core.hardware import devices
from service.core.sections.computing import Engine
from service.engine import backends
from service.engine.cuda import tf32
from service.engine.tuning.plans import EngineConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
IN_USE = TimedNetwork("in use", 1, "fp32", lambda: None)


@pytest.fixture(autouse=True)
def _small_matrices(monkeypatch):
    monkeypatch.setattr(timing, "MATRIX_EDGE", 256)


@pytest.fixture
def peak():
    return DevicePeak(CPU, 2.0, {"fp32": 1e6})


def test_rows_are_compared_with_the_first_row(peak):
    batch = torch.zeros(2, 1, 4, 4, 4)
    slow = TimedNetwork("slow", 2, "fp32", lambda: [batch + 1 for _ in range(2000)])
    fast = TimedNetwork("fast", 2, "fp32", lambda: None)
    first, second = engine_comparison.compare_networks("engines", [slow, fast], peak)
    assert (first.name, first.ratio.median) == ("slow", 1.0)
    assert second.ratio.least > 1
    for row in (first, second):
        assert row.windows_per_second == pytest.approx(1000 / row.ms_per_window.median)
        assert row.gflop_per_second == pytest.approx(2 * row.windows_per_second)
        assert row.peak_share == pytest.approx(row.gflop_per_second / 1e6)


def test_device_peak_keeps_the_highest_value(peak):
    assert peak.measure("fp32") == 1e6
    assert DevicePeak(CPU, 1.0, {}).measure("fp32") > 0.1


def test_engines_are_compared_with_the_one_in_use_at_every_batch_size(bands, peak):
    settings = Settings.model_validate({"engine": {"kind": "eager", "precision": "fp32"}})
    builders = engine_comparison.iter_builders(bands, settings, CPU, (1, 2))
    rows = list(compare_with_first(IN_USE, builders, peak))
    assert [row.name for row in rows[:1]] == ["in use"]
    assert {(row.name, row.windows) for row in rows[1:]} == {
        (f"eager fp32 {layout}", size) for layout in ("contiguous", "channels_last_3d") for size in (1, 2)
    }
    assert all(row.ms_per_window is not None for row in rows)


def test_row_of_a_missing_engine_contains_the_reason(bands, peak, monkeypatch):
    settings = Settings.model_validate({"engine": {"kind": "openvino", "precision": "fp32"}})
    missing_engine = copy_with(backends.BACKENDS["openvino"], explain_unavailability=lambda: "not installed")
    monkeypatch.setitem(backends.BACKENDS, "openvino", missing_engine)
    other, row = compare_with_first(IN_USE, engine_comparison.iter_builders(bands, settings, CPU, (3,)), peak)
    assert (row.name, row.windows, row.problem) == ("openvino fp32 contiguous", 3, "not installed")
    assert row.ms_per_window is None
    assert other.name == "in use"


def test_no_engine_is_built_after_the_time_limit(peak):
    builders = [TimedNetworkBuilder("slow", 2, lambda: pytest.fail("was built"))]
    _, row = compare_with_first(IN_USE, builders, peak, build_seconds=-1.0)
    assert (row.name, row.windows, row.ms_per_window) == ("slow", 2, None)
    assert "not built" in row.problem


def test_each_runner_is_timed_before_the_next_one_is_built(peak):
    calls = []

    def build(name):
        calls.append(f"build {name}")
        return TimedNetwork(name, 1, "fp32", lambda: calls.append(name))

    first = TimedNetwork("first", 1, "fp32", lambda: calls.append("first"))
    builders = [TimedNetworkBuilder(name, 1, lambda name=name: build(name)) for name in ("one", "two")]
    rows = compare_with_first(first, builders, peak)
    assert next(rows).name == "first"
    assert set(calls) == {"first"}
    calls.clear()
    row = next(rows)
    assert calls == ["build one", *["first", "one"] * engine_comparison.MAX_ROUNDS]
    assert row.ms_per_window.median > 0
    assert [row.name for row in rows] == ["two"]


@pytest.mark.parametrize("phase", ["build", "call"])
def test_failed_runner_has_a_row_and_the_next_one_runs(peak, phase):
    def fail():
        raise RuntimeError("too large")

    broken = fail if phase == "build" else lambda: TimedNetwork("broken", 4, "fp32", fail)
    builders = [TimedNetworkBuilder("broken", 4, broken), TimedNetworkBuilder("working", 1, lambda: IN_USE)]
    _, failed, working = compare_with_first(IN_USE, builders, peak)
    assert (failed.name, failed.windows, failed.problem, failed.ms_per_window) == ("broken", 4, "too large", None)
    assert working.ms_per_window is not None


def test_builders_report_whether_they_compile(bands):
    settings = Settings.model_validate({"engine": {"precision": "fp32"}})
    builders = list(engine_comparison.iter_builders(bands, settings, CPU, (1, 2)))
    plain, compiled = (
        {builder.name for builder in builders if builder.is_compiled is is_compiled} for is_compiled in (False, True)
    )
    assert plain >= {"eager fp32 contiguous", "eager fp32 channels_last_3d"}
    assert "compiled (default) fp32 channels_last_3d" in compiled
    assert {builder.batch_size for builder in builders} == {1, 2}


@pytest.fixture
def ampere(monkeypatch):
    """Simulate a GPU with TF32, which cannot run anything."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(devices, "list_native_precisions", lambda _device: devices.list_cuda_precisions((8, 0)))
    previous_settings = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    yield
    torch.set_float32_matmul_precision(previous_settings[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = previous_settings[1:]


@pytest.mark.usefixtures("ampere")
def test_names_on_a_gpu_show_whether_tf32_is_allowed(bands):
    def list_names(**engine):
        settings = Settings.model_validate({"engine": {"kind": "eager", "channels_last": False, **engine}})
        return [builder.name for builder in engine_comparison.iter_builders(bands, settings, CUDA, (8,))]

    assert list_names(precision="fp32") == ["eager fp32 (TF32) contiguous"]
    assert list_names(precision="fp32", matmul_precision="highest") == ["eager fp32 contiguous"]
    assert list_names(precision="bf16") == ["eager bf16 contiguous"]
    config = EngineConfig("cudagraph", "fp32", "contiguous", 8, "default")
    assert format_config(config, tf32_allowed=True) == "cudagraph (default) fp32 (TF32) contiguous"


def test_tf32_requires_a_gpu_that_supports_it(monkeypatch):
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, known=capability: known)
        assert is_tf32_allowed(Engine(), CUDA) is expected
    assert not is_tf32_allowed(Engine(matmul_precision="highest"), CUDA)
    assert not is_tf32_allowed(Engine(), CPU)


def test_exact_runner_is_compared_with_the_peak_without_tf32(peak, monkeypatch):
    matmul_precisions = {}

    def measure_matrix_peak(dtype, device, *, clock):
        allowed = torch.backends.cudnn.allow_tf32
        matmul_precisions[allowed] = torch.get_float32_matmul_precision()
        return (2e15 if allowed else 1e15) * 1.0

    monkeypatch.setattr(engine_comparison, "measure_matrix_peak", measure_matrix_peak)
    previous_settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tf32._set_matmul_precision("high")
    try:
        fast, exact = engine_comparison.compare_networks("", [IN_USE, IN_USE._replace(is_tf32_disabled=True)], peak)
    finally:
        torch.set_float32_matmul_precision(previous_settings[0])
        torch.backends.cudnn.allow_tf32 = previous_settings[1]
    assert matmul_precisions == {True: "high", False: "highest"}
    assert peak.peaks == {"fp32": 2e6, "fp32 exact": 1e6}
    assert fast.peak_share == pytest.approx(fast.gflop_per_second / 2e6)
    assert exact.peak_share == pytest.approx(exact.gflop_per_second / 1e6)
