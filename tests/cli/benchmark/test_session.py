import json
from dataclasses import replace
from threading import get_ident
from typing import NamedTuple

import pytest
import torch

from service.cli.benchmark import report as report_module
from service.cli.benchmark import requests, timing
from service.cli.benchmark.engine_comparison import EngineRow
from service.cli.benchmark.results import Repeat, Report, WindowSeconds
from service.cli.benchmark.session import BenchPlan, run
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.batching.batcher import open_batcher

SETTINGS = Settings.model_validate(
    {"device": {"name": "cpu", "threads": 1}, "engine": {"kind": "eager", "precision": "fp32"}}
)
SHAPE = (20, 40, 70)


@pytest.fixture(scope="module", autouse=True)
def _small_matrices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "MATRIX_EDGE", 256)
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("bench") / "trace.json"


class Run(NamedTuple):
    report: Report
    lines: list[str]


@pytest.fixture(scope="module")
def finished(bands, trace):
    lines = []
    return Run(
        run(bands, SETTINGS, BenchPlan(SHAPE, repeats=2, batch_sizes=(2,), profile_path=trace), lines.append), lines
    )


@pytest.fixture(scope="module")
def report(finished):
    return finished.report


def ignore(_line):
    pass


def test_requests_are_timed_by_stage(report):
    answered = report.answered
    stages = answered.stages
    assert list(stages) == ["read", "normalise", "windows", "postprocess", "write", "total"]
    for spread in stages.values():
        assert 0 < spread.least <= spread.median <= spread.most
    assert sum(stages[name].least for name in list(stages)[:-1]) <= stages["total"].most
    assert answered.windows == 2 * 2 * 3
    assert answered.windows_per_second == pytest.approx(12 / answered.stitched.median)
    for ratio in (answered.stitching, answered.cpu_stitching):
        assert 0.1 < ratio.least <= ratio.median <= ratio.most
    # Other processes do not count toward CPU seconds, but they can slow this process down through shared caches.
    assert answered.cpu_stitching.least < 3
    assert answered.stitching.least >= answered.bare.least / answered.stitched.most
    assert report.voxels_per_second == pytest.approx(20 * 40 * 70 / stages["total"].median)
    assert report.gflop_per_second == pytest.approx(report.gflop * answered.windows_per_second)
    assert report.peak_share == pytest.approx(report.gflop_per_second / report.peaks["fp32"])
    assert report.peak_bytes > 50 * 2**20
    assert list(report.starts) == ["fixed"]


@pytest.mark.parametrize("streams", [1, 2])
def test_bare_loop_runs_the_same_forward_passes_in_the_same_streams(bands, tmp_path, streams):
    settings = override_settings(
        override_settings(SETTINGS, "engine", {"streams": streams}), "device", {"threads": streams}
    )
    shape = (16, 40, 70)
    with open_batcher(settings) as device:
        model_runner, calls = ModelRunner(bands, settings), []

        def count_calls(network):
            return lambda batch: calls.append((len(batch), get_ident(), torch.get_num_threads())) or network(batch)

        device.call(model_runner.warm_up)
        model_runner.instrument(count_calls)
        requests.write_stack(bands, shape, tmp_path / "stack.tif")
        runner = requests.RequestRunner(model_runner, tmp_path / "stack.tif", tmp_path, device, streams)
        with pytest.raises(RuntimeError, match="no request"):
            runner.run_windows()
        runner.run_request()
        batches = -(-runner.window_count // 2)
        assert batches % 2
        for run_work in (runner.run_windows, runner.run_bare_loop, runner.run_windows):
            calls.clear()
            run_work()
            assert [size for size, _, _ in calls] == [2] * batches
            if run_work == runner.run_bare_loop:
                assert len({thread for _, thread, _ in calls[:-1]}) == streams
                assert {threads for _, _, threads in calls[:-1]} == {1}
                assert calls[-1][2] == streams


def test_bare_loop_ends_with_a_smaller_batch_if_the_network_allows_it(bands, tmp_path):
    settings = override_settings(override_settings(SETTINGS, "engine", {"streams": 1}), "windows", {"sw_batch_size": 4})
    with open_batcher(settings) as device:
        model_runner, calls = ModelRunner(bands, settings), []
        device.call(model_runner.warm_up)
        window = model_runner._engine.window
        count_calls = window.with_network(
            lambda batch: calls.append(len(batch)) or window.network(batch), accepts_partial_batches=True
        )
        model_runner._switch_engine(replace(model_runner._engine, window=count_calls))
        requests.write_stack(bands, (16, 40, 70), tmp_path / "stack.tif")
        runner = requests.RequestRunner(model_runner, tmp_path / "stack.tif", tmp_path, device, 1)
        runner.run_request()
        for run_work in (runner.run_windows, runner.run_bare_loop):
            calls.clear()
            run_work()
            assert calls == [4, 2]


def test_trace_is_written(report, trace):
    assert "traceEvents" in json.loads(trace.read_text())


def test_report_has_header_rows_and_summary_and_json_has_all_values(finished, tmp_path):
    report, text = finished.report, "\n".join(finished.lines)
    assert finished.lines[0].endswith(f", 1 threads, torch {torch.__version__}")
    assert finished.lines[1].startswith("ready after ")
    assert finished.lines[2] == "bands/1: eager fp32 channels_last_3d, compile_mode none, batch size 2, streams 1"
    rows = [line for line in finished.lines if line.startswith(("| repeat |", "| 1 |", "| 2 |"))]
    assert [row.count("|") for row in rows] == [9] * 3
    for text_part in (
        "| windows |",
        "windows from pixels to scores: ",
        "in CPU seconds ",
        "first request",
        "windows/s",
        "GFLOP/s of a large fp32 matrix product",
        "| in use: eager fp32 channels_last_3d | 2 |",
        "| eager fp32 contiguous | 2 |",
    ):
        assert text_part in text
    content = json.loads(report_module.to_json(report))
    assert content["answered"]["stages"]["total"]["median"] == report.answered.stages["total"].median
    assert content["peak_share"] == report.peak_share
    assert [row["name"] for row in content["rows"]] == [row.name for row in report.rows]
    report_module.plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_row_of_a_repeat_contains_its_ratios():
    windows = WindowSeconds(bare=1.5, stitched=2.0)
    repeat = Repeat({"windows": 2.25, "total": 2.5}, windows, windows, {"windows": 9.0, "total": 10.0})
    _, head, rule = report_module.format_repeat_header(repeat)
    names = ["repeat", "windows s", "total s", "windows per second relative to a bare loop"]
    assert head == f"| {' | '.join([*names, 'baseline script, total s', 'speedup over the baseline script'])} |"
    assert rule == "|---|---|---|---|---|---|"
    assert report_module.format_repeat(3, repeat) == "| 3 | 2.250 | 2.500 | 0.75 | 10.000 | 4.00 |"
    _, head, _ = report_module.format_repeat_header(replace(repeat, plain={}))
    assert head == f"| {' | '.join(names)} |"
    assert report_module.format_repeat(3, replace(repeat, plain={})) == "| 3 | 2.250 | 2.500 | 0.75 |"


def test_report_shows_where_tf32_is_allowed(report):
    engine_lines = report_module.format_engine("bands/1", replace(report.engine, device="cuda:0"), tf32_allowed=True)
    assert next(engine_lines).startswith("bands/1: eager fp32 (TF32) channels_last_3d, ")
    bf16_lines = report_module.format_engine("bands/1", replace(report.engine, precision="bf16"), tf32_allowed=True)
    assert next(bf16_lines).startswith("bands/1: eager bf16 channels_last_3d, ")
    answered = replace(report.answered, plain=report.answered.stages, plain_tf32=True)
    text = "\n".join(report_module.format_summary(replace(report, tf32=True, answered=answered)))
    assert "GFLOP/s of a large fp32 (TF32) matrix product" in text
    assert "| baseline script (eager FP32; torch's defaults allow TF32) |" in text
    assert "TF32" not in "\n".join(report_module.format_summary(report))


def test_compile_mode_and_each_warning_are_printed(report):
    engine = replace(report.engine, compile_mode="reduce-overhead", warnings=("It is slow.", "It is old."))
    head, *warnings = report_module.format_engine("bands/1", engine, tf32_allowed=False)
    assert ", compile_mode reduce-overhead, " in head
    assert warnings == ["warning: It is slow.", "warning: It is old."]


def test_smaller_batch_is_reported_as_a_warning(bands, monkeypatch):
    segment, lines = requests.segment, []

    def segment_with_fallback(*arguments, **options):
        return segment(*arguments, **options)._replace(num_fallbacks=1, notes=("Memory did not hold 2 windows.",))

    monkeypatch.setattr(requests, "segment", segment_with_fallback)
    report = run(bands, SETTINGS, BenchPlan((16, 32, 32), repeats=2), lines.append)
    assert report.engine.warnings == ("Memory did not hold 2 windows.",)
    assert lines.count("warning: Memory did not hold 2 windows.") == 1


def test_row_without_measurements_contains_the_reason():
    (*_head, row) = report_module.format_table("engine", [EngineRow("engines", "openvino", 2, "not installed")])
    assert "openvino" in row
    assert "not installed" in row


def test_cold_start_is_followed_by_a_cached_start(bands):
    settings = Settings.model_validate({"device": {"name": "cpu", "threads": 1}, "engine": {"precision": "fp32"}})
    starts = run(bands, settings, BenchPlan((16, 32, 32), repeats=1, measure_cold_start=True), ignore).starts
    assert list(starts) == ["known-order", "known-order, cached"]


def test_stack_of_any_shape_is_tiled_from_the_sample(bands):
    stack = requests.tile_sample(bands, (3, 100, 65))
    assert stack.shape == (3, 100, 65)
    assert stack.dtype == "uint16"
    assert stack.min() >= 300
    assert stack.std() > 100
    multichannel_spec = bands.model_copy(update={"input": bands.input.model_copy(update={"channels": 2})})
    with pytest.raises(BadParameter, match="2 channels"):
        requests.tile_sample(multichannel_spec, (3, 4, 5))


def test_baseline_script_runs_if_it_exists(bands, monkeypatch, tmp_path):
    script, lines = tmp_path / "plain.py", []
    monkeypatch.setattr(requests, "BASELINE_SCRIPT", script)
    plan = BenchPlan((16, 32, 32), repeats=1, run_baseline=True)
    with pytest.raises(BadParameter, match=r"plain\.py"):
        run(bands, SETTINGS, plan, ignore)
    script.write_text('print(\'{"stages": {"windows": 2000.0, "write": 0.5}, "tf32": true}\')')
    answered = run(bands, SETTINGS, plan, lines.append).answered
    assert answered.plain["total"].median == 2000.5
    assert answered.plain_tf32
    assert answered.speedup.median == pytest.approx(2000.5 / answered.stages["total"].median)
    (row,) = (line for line in lines if line.startswith("| 1 |"))
    assert "| 2000.500 |" in row
    script.write_text("raise SystemExit('no')")
    with pytest.raises(BadParameter, match="no"):
        run(bands, SETTINGS, plan, ignore)
    assert torch.get_num_threads() == 1
