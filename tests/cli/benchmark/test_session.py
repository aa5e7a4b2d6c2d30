import json
from dataclasses import replace
from threading import get_ident

import pytest
import torch

from service.cli.benchmark import report as report_module
from service.cli.benchmark import requests, timing
from service.cli.benchmark.networks import Row
from service.cli.benchmark.session import BenchPlan, run
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.inference.batcher import open_batcher
from service.inference.segmenter import Segmenter

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


@pytest.fixture(scope="module")
def report(bands, trace):
    return run(bands, SETTINGS, BenchPlan(SHAPE, repeats=2, batch_sizes=(2,), profile=trace))


def test_requests_are_measured_stage_by_stage(report):
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
    # Whatever else runs on the machine takes none of the process's own seconds, but its caches now and then.
    assert answered.cpu_stitching.least < 3
    assert answered.stitching.least >= answered.bare.least / answered.stitched.most
    assert report.voxels_per_second == pytest.approx(20 * 40 * 70 / stages["total"].median)
    assert report.gflop_per_second == pytest.approx(report.gflop * answered.windows_per_second)
    assert report.peak_share == pytest.approx(report.gflop_per_second / report.peaks["fp32"])
    assert report.peak_bytes > 50 * 2**20
    assert list(report.starts) == ["fixed"]


@pytest.mark.parametrize("streams", [1, 2])
def test_a_bare_loop_makes_the_forwards_of_the_windows_in_as_many_streams(bands, tmp_path, streams):
    settings = override_settings(
        override_settings(SETTINGS, "engine", {"streams": streams}), "device", {"threads": streams}
    )
    shape = (16, 40, 70)
    with open_batcher(settings) as device:
        segmenter, calls = Segmenter(bands, settings), []

        def counted(network):
            return lambda batch: calls.append((len(batch), get_ident(), torch.get_num_threads())) or network(batch)

        device.call(segmenter.warm_up)
        segmenter.instrument(counted)
        requests.write_stack(bands, shape, tmp_path / "stack.tif")
        runner = requests.RequestRunner(segmenter, tmp_path / "stack.tif", tmp_path, device, streams)
        with pytest.raises(RuntimeError, match="no request"):
            runner.stitched()
        runner.once()
        batches = -(-runner.windows // 2)
        assert batches % 2
        for work in (runner.stitched, runner.bare_loop, runner.stitched):
            calls.clear()
            work()
            assert [size for size, _, _ in calls] == [2] * batches
            if work == runner.bare_loop:
                assert len({thread for _, thread, _ in calls[:-1]}) == streams
                assert {threads for _, _, threads in calls[:-1]} == {1}
                assert calls[-1][2] == streams


def test_a_bare_loop_ends_with_fewer_windows_where_the_network_takes_them(bands, tmp_path):
    settings = override_settings(override_settings(SETTINGS, "engine", {"streams": 1}), "windows", {"sw_batch_size": 4})
    with open_batcher(settings) as device:
        segmenter, calls = Segmenter(bands, settings), []
        device.call(segmenter.warm_up)
        window = segmenter._ready.window
        counted = window.with_network(
            lambda batch: calls.append(len(batch)) or window.network(batch), any_batch_size=True
        )
        segmenter._use(replace(segmenter._ready, window=counted))
        requests.write_stack(bands, (16, 40, 70), tmp_path / "stack.tif")
        runner = requests.RequestRunner(segmenter, tmp_path / "stack.tif", tmp_path, device, 1)
        runner.once()
        for work in (runner.stitched, runner.bare_loop):
            calls.clear()
            work()
            assert calls == [4, 2]


def test_a_trace_is_written(report, trace):
    assert "traceEvents" in json.loads(trace.read_text())


def test_a_table_a_picture_and_every_number(report, tmp_path):
    text = "\n".join(report_module.format_lines(report))
    for words in (
        "| windows |",
        "windows from pixels to scores: ",
        "in CPU seconds ",
        "first request",
        "windows/s",
        "GFLOP/s of a large fp32",
        "| eager fp32 contiguous | 2 |",
    ):
        assert words in text
    numbers = json.loads(report_module.to_json(report))
    assert numbers["answered"]["stages"]["total"]["median"] == report.answered.stages["total"].median
    assert numbers["peak_share"] == report.peak_share
    report_module.plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_without_numbers_says_why():
    (*_head, row) = report_module.format_table("engine", [Row("engines", "openvino", 2, "not installed")])
    assert "openvino" in row
    assert "not installed" in row


def test_a_cold_start_is_followed_by_one_that_knows(bands):
    settings = Settings.model_validate({"device": {"name": "cpu", "threads": 1}, "engine": {"precision": "fp32"}})
    starts = run(bands, settings, BenchPlan((16, 32, 32), repeats=1, cold=True)).starts
    assert list(starts) == ["known-order", "known-order, cached"]


def test_a_stack_of_any_shape_is_made_of_the_sample(bands):
    stack = requests.tile_sample(bands, (3, 100, 65))
    assert stack.shape == (3, 100, 65)
    assert stack.dtype == "uint16"
    assert stack.min() >= 300
    assert stack.std() > 100
    several = bands.model_copy(update={"input": bands.input.model_copy(update={"channels": 2})})
    with pytest.raises(BadParameter, match="2 channels"):
        requests.tile_sample(several, (3, 4, 5))


def test_the_plain_script_runs_where_there_is_one(bands, monkeypatch, tmp_path):
    script = tmp_path / "plain.py"
    monkeypatch.setattr(requests, "PLAIN", script)
    wanted = BenchPlan((16, 32, 32), repeats=1, baseline=True)
    with pytest.raises(BadParameter, match=r"plain\.py"):
        run(bands, SETTINGS, wanted)
    script.write_text('print(\'{"stages": {"windows": 2000.0, "write": 0.5}}\')')
    answered = run(bands, SETTINGS, wanted).answered
    assert answered.plain["total"].median == 2000.5
    assert answered.speedup.median == pytest.approx(2000.5 / answered.stages["total"].median)
    script.write_text("raise SystemExit('no')")
    with pytest.raises(BadParameter, match="no"):
        run(bands, SETTINGS, wanted)
    assert torch.get_num_threads() == 1
