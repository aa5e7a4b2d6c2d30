"""The command `stackseg bench`: output, order of the lines, and exit status."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.__main__ import main
from service.cli.benchmark import hosts, session
from service.cli.benchmark.hosts import HostsRow
from service.inference.runner.model_runner import ModelRunner


@pytest.fixture
def bench(bands_repository: Path, write_config: Any) -> list[str]:
    engine = {"kind": "eager", "precision": "fp32", "channels_last": False, "compile_mode": "default"}
    path = write_config(bands_repository, engine=engine)
    return ["bench", "--shape", "4", "20", "20", "--repeats", "1", "--config", str(path)]


def test_exit_status_is_zero_if_the_network_runs_as_configured(bench: list[str], run_stackseg: Any) -> None:
    lines = run_stackseg(*bench).splitlines()
    assert "bands/1: eager fp32 contiguous, compile_mode none, batch size 2, streams 1" in lines
    assert lines[-1].startswith("peak memory: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repeats", "0"], "--repeats"),
        (["--build-seconds", "-1"], "--build-seconds"),
        (["--hosts", "--plot", "bench.png"], "Remove --plot or --hosts"),
        (["--shape", "100000000", "1000000", "1000000"], "Choose a smaller shape."),
        (["--json", "no-such-folder/bench.json"], "no-such-folder/bench.json cannot be written"),
        (["--profile", "/"], "/ cannot be written"),
    ],
)
def test_invalid_options_are_rejected(bench: list[str], run_stackseg: Any, options: list[str], message: str) -> None:
    assert message in run_stackseg(*bench, *options, status=1)


def test_deviation_is_printed_after_the_report_with_exit_status_one(
    bench: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = ModelRunner.report
    compiled = {"compile_mode": "default", "engine": "compiled", "warnings": ("It is slow.",)}
    monkeypatch.setattr(ModelRunner, "report", lambda self: replace(report(self), **compiled))
    json_path, plot_path = tmp_path / "bench.json", tmp_path / "bench.png"
    assert main([*bench, "--device", "cpu", "--json", str(json_path), "--plot", str(plot_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "warning: It is slow." in lines
    assert lines[-3].startswith("peak memory: ")
    assert lines[-2:] == ["", "engine.kind is eager, but the network ran with compiled"]
    content = json.loads(json_path.read_text())
    assert (content["model"], content["engine"]["warnings"]) == ("bands/1", ["It is slow."])
    assert plot_path.exists()


def test_each_line_is_flushed_before_the_next_measurement(
    bench: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.md"
    run_request = session.RequestRunner.run_request

    def interrupt_second_repeat(self: Any) -> dict[str, float]:
        if "| 1 |" in output.read_text():
            raise KeyboardInterrupt
        return run_request(self)

    monkeypatch.setattr(session.RequestRunner, "run_request", interrupt_second_repeat)
    with output.open("w", buffering=io.DEFAULT_BUFFER_SIZE) as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main([*bench, "--repeats", "2"]) == 130
        assert output.read_text().splitlines()[-1].startswith("| 1 | ")


def test_each_row_of_hosts_is_printed_immediately(
    bench: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []

    def measure(*_: object) -> Any:
        for row in (HostsRow(1, 100, 10.0), HostsRow(2, 200, 12.5)):
            yield row
            outputs.append(capsys.readouterr().out)

    monkeypatch.setattr(hosts, "measure_throughput", measure)
    json_path = tmp_path / "hosts.json"
    assert main([*bench, "--hosts", "--json", str(json_path)]) == 0
    assert outputs == [f"{hosts.TABLE_HEADER}\n| 1 | 10.0 | 100% |\n", "| 2 | 16.0 | 80% |\n"]
    assert [row["workers"] for row in json.loads(json_path.read_text())] == [1, 2]
