"""`stackseg bench` as a command: what it prints, when, and its exit status."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.__main__ import main
from service.cli.benchmark import hosts, session
from service.cli.benchmark.hosts import HostsRow
from service.inference.runner.model_runner import ModelRunner


@pytest.fixture
def config(bands_repository: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    def configure(engine: str) -> list[str]:
        path = tmp_path / "config.yaml"
        path.write_text(
            f"models: {{folder: {bands_repository}}}\nengine: {engine}\ndevice: {{name: cpu, threads: 1}}\n"
        )
        return ["bench", "--shape", "4", "20", "20", "--repeats", "1", "--config", str(path)]

    return configure


def test_a_network_that_runs_as_configured_is_status_zero(
    config: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(config("{kind: eager, precision: fp32, channels_last: false, compile_mode: default}")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bands/1: eager fp32 contiguous, compile_mode none, batch size 2, streams 1" in lines
    assert lines[-1].startswith("peak memory: ")


def test_a_fallback_is_printed_after_the_whole_report_and_is_status_one(
    config: Callable[[str], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = ModelRunner.report
    compiled = {"compile_mode": "default", "engine": "compiled", "warnings": ("It is slow.",)}
    monkeypatch.setattr(ModelRunner, "report", lambda self: replace(report(self), **compiled))
    numbers = tmp_path / "bench.json"
    assert main([*config("{kind: eager, precision: fp32}"), "--json", str(numbers)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "warning: It is slow." in lines
    assert lines[-3].startswith("peak memory: ")
    assert lines[-2:] == ["", "engine.kind is eager, but the network ran with compiled"]
    assert json.loads(numbers.read_text())["engine"]["warnings"] == ["It is slow."]


def test_each_line_is_flushed_before_the_next_is_measured(
    config: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.md"
    once = session.RequestRunner.once

    def interrupted(self: Any) -> dict[str, float]:
        if "| 1 |" in output.read_text():
            raise KeyboardInterrupt
        return once(self)

    monkeypatch.setattr(session.RequestRunner, "once", interrupted)
    with output.open("w", buffering=io.DEFAULT_BUFFER_SIZE) as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main([*config("{kind: eager, precision: fp32}"), "--repeats", "2"]) == 130
        assert output.read_text().splitlines()[-1].startswith("| 1 | ")


def test_each_row_of_hosts_is_shown_as_soon_as_it_is_measured(
    config: Callable[[str], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = []

    def measure(*_: object) -> Any:
        for row in (HostsRow(1, 100, 10.0), HostsRow(2, 200, 12.5)):
            yield row
            shown.append(capsys.readouterr().out)

    monkeypatch.setattr(hosts, "measure", measure)
    numbers = tmp_path / "hosts.json"
    assert main([*config("{kind: eager}"), "--hosts", "--json", str(numbers)]) == 0
    assert shown == [f"{hosts.HEAD}\n| 1 | 10.0 | 100% |\n", "| 2 | 16.0 | 80% |\n"]
    assert [row["workers"] for row in json.loads(numbers.read_text())] == [1, 2]
