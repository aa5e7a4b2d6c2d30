import json

import pytest
import torch

from service.bench import requests, show, timing
from service.bench.networks import Row
from service.bench.session import Wanted, run
from service.config import Settings
from service.errors import BadParameter
from service.segmenter import Segmenter

SETTINGS = Settings.model_validate(
    {"device": {"name": "cpu", "threads": 1}, "engine": {"kind": "eager", "precision": "fp32"}}
)
SHAPE = (20, 40, 70)


@pytest.fixture(scope="module", autouse=True)
def _small_matrices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "MATRIX", 256)
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("bench") / "trace.json"


@pytest.fixture(scope="module")
def report(bands, trace):
    return run(bands, SETTINGS, Wanted(SHAPE, repeats=2, batch_sizes=(2,), profile=trace))


def test_requests_are_measured_stage_by_stage(report):
    answered = report.answered
    stages = answered.stages
    assert list(stages) == ["read", "normalise", "copy", "forward", "blend", "postprocess", "write", "total"]
    for spread in stages.values():
        assert 0 < spread.least <= spread.median <= spread.most
    assert sum(stages[name].least for name in list(stages)[:-1]) <= stages["total"].most
    assert answered.windows == 2 * 2 * 3
    inside = stages["copy"].median + stages["forward"].median + stages["blend"].median
    assert answered.windows_per_second == pytest.approx(12 / inside)
    assert report.voxels_per_second == pytest.approx(20 * 40 * 70 / stages["total"].median)
    assert report.gflop_per_second == pytest.approx(report.gflop * answered.windows_per_second)
    assert report.peak_share == pytest.approx(report.gflop_per_second / report.peaks["fp32"])
    assert report.peak_bytes > 50 * 2**20
    assert list(report.starts) == ["fixed"]


def test_a_bare_loop_makes_as_many_forwards_as_the_request(bands, tmp_path):
    segmenter, batches = Segmenter(bands, SETTINGS), []

    def counted(network):
        return lambda batch: batches.append(len(batch)) or network(batch)

    segmenter.warm_up()
    segmenter.instrument(counted)
    requests.write_stack(bands, SHAPE, tmp_path / "stack.tif")
    line = requests.Requests(segmenter, tmp_path / "stack.tif", tmp_path, torch.device("cpu"))
    line.once()
    assert batches == [2] * 6
    assert line.bare_loop() > 0
    assert batches == [2] * 12


def test_a_trace_is_written(report, trace):
    assert "traceEvents" in json.loads(trace.read_text())


def test_a_table_a_picture_and_every_number(report, tmp_path):
    text = "\n".join(show.lines(report))
    for words in (
        "| forward |",
        "first request",
        "windows/s",
        "GFLOP/s of a large fp32",
        "| eager fp32 contiguous | 2 |",
    ):
        assert words in text
    numbers = json.loads(show.as_json(report))
    assert numbers["answered"]["stages"]["total"]["median"] == report.answered.stages["total"].median
    assert numbers["peak_share"] == report.peak_share
    assert show.plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_without_numbers_says_why():
    (*_head, row) = show.table("engine", [Row("engines", "openvino", 2, "not installed")])
    assert "openvino" in row
    assert "not installed" in row


def test_a_cold_start_is_followed_by_one_that_knows(bands):
    settings = Settings.model_validate(
        {"device": {"name": "cpu", "threads": 1}, "engine": {"precision": "fp32", "tune_seconds": 0.001}}
    )
    assert list(run(bands, settings, Wanted((16, 32, 32), repeats=1, cold=True)).starts) == ["tuned", "cached"]


def test_a_stack_of_any_shape_is_made_of_the_sample(bands):
    stack = requests.tiled(bands, (3, 100, 65))
    assert stack.shape == (3, 100, 65)
    assert stack.dtype == "uint16"
    assert stack.min() >= 300
    assert stack.std() > 100
    several = bands.model_copy(update={"input": bands.input.model_copy(update={"channels": 2})})
    with pytest.raises(BadParameter, match="2 channels"):
        requests.tiled(several, (3, 4, 5))


def test_the_plain_script_runs_where_there_is_one(bands, monkeypatch, tmp_path):
    script = tmp_path / "plain.py"
    monkeypatch.setattr(requests, "PLAIN", script)
    wanted = Wanted((16, 32, 32), repeats=1, baseline=True)
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
