"""Killed workers and drivers: only their unfinished blocks are repeated, and the result is the same."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from service.__main__ import main
from service.core.errors import BadParameter, InternalError
from service.core.types import Options
from service.inference.blockwise.run_folder import BlockTask, RunFolder
from service.inference.blockwise.workers import MAX_WORKER_DEATHS, LocalWorkers, run_block
from tests.block_runs import InlineWorkers, create_run, segment_blocks, segment_whole
from tests.segmenters import make_settings
from tests.zarr_files import write_zarr


def die_once(task: BlockTask) -> dict[str, Any]:
    """Run a block, but kill the process at the third group of windows, before and after its scores are written."""
    for when in ("before", "after"):
        mark = Path(task.folder) / f"died-{when}"
        if when == "after" and task.step == "scores":
            run_block(task)
        if (task.step, task.number) == ("scores", 2) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return run_block(task) if task.step != "scores" else RunFolder(Path(task.folder)).read_record("scores", task.number)


def always_die(_task: BlockTask) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.fixture
def source(tmp_path: Path, phantom) -> Path:
    return write_zarr(tmp_path / "in.zarr", phantom.image, chunks=(16, 32, 32))


@pytest.fixture
def start(tmp_path: Path, source: Path, bands) -> Callable[..., RunFolder]:
    """Function start(folder, options, windows) that starts a run."""

    def start_run(folder: Path = tmp_path / "run", options=Options(), windows=None) -> RunFolder:  # noqa: B008
        return create_run(folder, source, bands, options, make_settings(), windows)

    return start_run


@pytest.mark.thorough
def test_killed_worker_loses_only_its_current_block(tmp_path: Path, source: Path, bands, start) -> None:
    whole = segment_whole(source, bands, Options(), make_settings()).segmentation.pixels
    folder = start(windows=(1, 1, 1))
    with closing(LocalWorkers(2, die_once)) as workers:
        assert np.array_equal(segment_blocks(folder, tmp_path / "out.zarr", workers), whole)
    assert (folder.path / "died-before").exists()
    assert (folder.path / "died-after").exists()


@pytest.mark.thorough
def test_block_that_kills_every_worker_fails_the_run(tmp_path: Path) -> None:
    with (
        closing(LocalWorkers(1, always_die)) as workers,
        pytest.raises(InternalError, match=f"{MAX_WORKER_DEATHS} workers"),
    ):
        workers.submit(BlockTask(str(tmp_path), "scores", 3)).result(60)


def test_finished_blocks_are_not_repeated(tmp_path: Path, start) -> None:
    folder, first, again = start(windows=(1, 1, 1)), InlineWorkers(), InlineWorkers()
    labels = segment_blocks(folder, tmp_path / "out.zarr", first)
    count = folder.plan.layout.total_groups
    assert not list((folder.path / "scores").iterdir())
    for step, number in (("tile", count - 1), ("labels", 0)):
        (folder.path / f"records/{step}-{number}.json").unlink()
    (tmp_path / "out.zarr").rename(tmp_path / ".out.zarr.part")
    zarr.open_array(tmp_path / ".out.zarr.part/0")[...] = 9
    assert np.array_equal(segment_blocks(folder, tmp_path / "out.zarr", again), labels)
    assert set(again.submitted) < set(first.submitted)
    assert [number for step, number in again.submitted if step == "tile"] == [count - 1]


def test_folder_of_another_run_is_rejected(tmp_path: Path, source: Path, start) -> None:
    for strict in (True, False):
        start(options=Options(strict=strict))
    with pytest.raises(BadParameter, match="a different stack, model or options"):
        start(options=Options(overlap=0.4))
    with pytest.raises(BadParameter, match="contains other files"):
        start(source)


@pytest.mark.parametrize("changes", [{"version": "0.0.1"}, {"version": None}])
def test_run_of_another_version_is_rejected(tmp_path: Path, start, changes: dict[str, str | None]) -> None:
    start()
    plan_file = tmp_path / "run" / "plan.json"
    plan = {key: value for key, value in (json.loads(plan_file.read_bytes()) | changes).items() if value is not None}
    plan_file.write_text(json.dumps(plan))
    with pytest.raises(BadParameter, match=r"another version of StackSeg .* Delete the folder to start again"):
        start()


def test_run_that_was_killed_before_it_had_a_plan_starts_again(tmp_path: Path, start) -> None:
    whole, leftover = start(), tmp_path / "killed"
    (leftover / "records").mkdir(parents=True)
    (leftover / "plan.json.part-17").touch()
    folder = start(leftover)
    assert folder.plan == whole.plan
    (leftover / "settings.json").unlink()
    assert start(leftover).settings == folder.settings


def test_invalid_record_names_are_ignored(start) -> None:
    folder = start()
    for name in ("tile-x.json", "tile-3.json.part-8", "tile.json", "tile-4.json"):
        (folder.path / "records" / name).write_text("{}")
    assert folder.find_finished_blocks("tile") == {4}


def test_folder_in_use_by_another_command_is_rejected(tmp_path, source, bands, capsys, monkeypatch) -> None:
    out, scratch = tmp_path / "out.zarr", tmp_path / "run"
    command = ["segment", str(source), str(out), "--workers", "1", "--scratch", str(scratch)]
    # Use a relative path, because model arguments have at most 64 characters.
    monkeypatch.chdir(bands.folder.parent)
    with RunFolder(scratch).lock():
        assert main([*command, "--model", f"./{bands.folder.name}"]) == 1
        assert "is in use by another process" in capsys.readouterr().err
        assert list(scratch.iterdir()) == []


@pytest.mark.thorough
def test_killed_command_continues_where_it_stopped(tmp_path: Path, source: Path, bands) -> None:
    whole = segment_whole(source, bands, Options(), make_settings()).segmentation.pixels
    out, scratch = tmp_path / "out.zarr", tmp_path / "run"
    command = [sys.executable, "-m", "service", "segment", source, out, "--workers", "2", "--scratch", scratch]
    command += ["--model", bands.folder]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while len(list((scratch / "records").glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in (scratch / "records").glob("*.json")}
    assert done
    assert not out.exists()
    subprocess.run(command, check=True, timeout=300)
    labels = zarr.open_group(out, mode="r")["0"][...]
    assert np.count_nonzero(labels != whole) <= 0.001 * labels.size
    assert not scratch.exists()
