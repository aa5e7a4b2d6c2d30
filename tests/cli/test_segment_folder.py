"""`stackseg segment FOLDER`: through the real command line, interrupted and resumed, with a file that is broken."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import tifffile
from fakes import until
from imagecodecs import png_decode
from live import as_tiff
from paths import ROOT

from scripts.recipes.synthetic_nuclei import synthesise
from service.__main__ import main
from service.cli.folder_records import Records
from service.cli.progress import show_progress
from service.cli.segment_folder import FolderWork
from service.core.config import Settings
from service.core.errors import BadParameter, DeviceLost
from service.inference.batcher import open_batcher
from service.inference.segmenter import Segmenter
from service.models.spec import ModelSpec
from service.serving.parameters import Query

STACKS = [f"stack {number:02}" for number in range(19)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty small stacks, of which one is broken."""
    folder = tmp_path_factory.mktemp("stacks")
    image, _labels = synthesise(np.random.default_rng(0), (16, 48, 64))
    for number, name in enumerate(STACKS):
        (folder / f"{name}.tif").write_bytes(as_tiff(np.roll(image, 3 * number, 1)))
    (folder / "broken.tif").write_bytes(as_tiff(image)[:5000])
    (folder / "notes.txt").write_text("no stack")
    return folder


@pytest.fixture
def config(random_nuclei: ModelSpec, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"models: {{folder: {random_nuclei.folder.parent}}}\nengine: {{kind: eager}}\n"
        "device: {name: cpu, threads: 1}\n"
    )
    return path


def recorded(out: Path) -> list[str]:
    """The stacks in the records, in the order in which they were added."""
    path = out / "stacks.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [content["stack"] for content in map(json.loads, lines) if "stack" in content]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_is_interrupted_and_resumed(folder: Path, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Whoever runs the tests may have them ignore the signal, which a child inherits.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from service.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "segment", str(folder), "-o", str(out), "--config", str(config)]

    def run() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with run() as process:
        until(lambda: len(recorded(out)) >= 4 or process.poll() is not None, 120)
        process.send_signal(signal.SIGINT)
        _told, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "stackseg: interrupted\n")
    before = recorded(out)
    assert 4 <= len(before) < 20
    assert "not begun" in (out / "report.html").read_text()

    with run() as process:
        told, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.startswith("stackseg: broken.tif: ")
    # Only what has failed is tried again.
    assert sorted(recorded(out)) == sorted([*(f"{name}.tif" for name in STACKS), "broken.tif", "broken.tif"])
    assert told.startswith(f"{out / 'report.html'}: 19 of 20 stacks, {len(before) - 1} of them before, ")

    table, report = rows(out / "objects.csv"), (out / "report.html").read_text()
    for name in STACKS:
        labels = tifffile.imread(out / f"{name}_labels.ome.tif")
        found = [row for row in table if row["stack"] == f"{name}.tif"]
        assert [int(row["label"]) for row in found] == list(range(1, labels.max() + 1))
        assert f">{name}.tif</a></td><td>{labels.max()}</td>" in report
        assert png_decode((out / f"{name}.png").read_bytes()).shape == (48, 64, 3)
    assert "cut short" in report
    assert "not begun" not in report


def segment(*arguments: object) -> int:
    return main(["segment", *map(str, arguments)])


def few(folder: Path, tmp_path: Path, names: Sequence[str] = STACKS[:3]) -> Path:
    """A folder with some of the stacks."""
    chosen = tmp_path / "few"
    chosen.mkdir()
    for name in names:
        (chosen / f"{name}.tif").write_bytes((folder / f"{name}.tif").read_bytes())
    return chosen


def test_what_is_done_is_skipped_unless_parameters_or_the_file_differ(
    folder: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, out = few(folder, tmp_path), tmp_path / "out"

    def before(*arguments: object) -> str:
        assert segment(chosen, out, "--config", config, *arguments) == 0
        return capsys.readouterr().out.partition(" stacks, ")[2].partition(" of them")[0]

    assert before() == "0"
    assert before() == "3"
    assert before("--overlap", "0.5") == "0"
    assert before("--overlap", "0.5") == "3"
    (chosen / f"{STACKS[1]}.tif").write_bytes((folder / f"{STACKS[5]}.tif").read_bytes())
    assert before("--overlap", "0.5") == "2"
    (out / f"{STACKS[0]}_labels.ome.tif").unlink()
    assert before("--overlap", "0.5") == "2"


def test_one_width_holds_for_the_series(folder: Path, config: Path, tmp_path: Path) -> None:
    chosen, out = few(folder, tmp_path), tmp_path / "out"
    assert segment(chosen, out, "--config", config, "--diameter", "auto") == 0
    widths = {record.notes[0] for record in Records(out).values()}
    assert len(widths) == 1
    assert "wide" in widths.pop()


def test_no_width_is_recorded_where_the_device_was_lost(folder: Path, random_nuclei: ModelSpec, tmp_path: Path) -> None:
    class LostSegmenter:
        def estimate_diameter(self, *_: object, **__: object) -> None:
            raise DeviceLost("The device is gone.")

    settings = Settings()
    with open_batcher(settings) as device, show_progress() as bar:
        segmenter = cast(Segmenter, LostSegmenter())
        work = FolderWork(folder, tmp_path, random_nuclei, segmenter, device, settings, tmp_path, bar)
        with pytest.raises(DeviceLost):
            work.segment([f"{name}.tif" for name in STACKS], Query())
    assert not (tmp_path / "stacks.jsonl").exists()


def test_stacks_of_subfolders_are_found_and_keep_their_places(folder: Path, config: Path, tmp_path: Path) -> None:
    chosen, out = few(folder, tmp_path), tmp_path / "out"
    below = chosen / "day 2"
    below.mkdir()
    (chosen / f"{STACKS[0]}.tif").rename(below / "a.ome.tif")
    assert segment(chosen, out, "--config", config, "--glob", "**/*.tif") == 0
    assert (out / "day 2" / "a_labels.ome.tif").is_file()
    assert {row["stack"] for row in rows(out / "objects.csv")} <= {"day 2/a.ome.tif", *(f"{n}.tif" for n in STACKS)}


def test_a_stack_that_goes_during_the_run_fails_alone(
    folder: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, out = few(folder, tmp_path, STACKS[:8]), tmp_path / "out"

    def remove_last() -> None:
        until(lambda: len(recorded(out)) > 0, 60)
        (chosen / f"{STACKS[7]}.tif").unlink()

    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(remove_last)
        assert segment(chosen, out, "--config", config) == 1
        removal.result()
    assert recorded(out) == [f"{name}.tif" for name in STACKS[:8]]
    assert f"stackseg: {STACKS[7]}.tif: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{few}", "{few}"], "is the folder of the stacks"),
        (["{few}", "{full}"], "holds something else already; name another folder, or use it with --force"),
        (["{few}", "{few}/stack 00.tif"], "is a file; name a folder"),
        (["{few}", "out", "--glob", "*.lsm"], "holds no stack that matches *.lsm"),
        (["{full}", "out"], "holds no stack that matches *.tif"),
        (["{zarr}", "out"], "this folder is OME-Zarr"),
        (["{few}", "out", "--measurements", "objects.csv"], "objects.csv among its results"),
        (["{few}"], "Say once where the result goes"),
        (["{few}", "out", "-o", "out"], "Say once where the result goes"),
        (["{few}/stack 00.tif", "out.tif", "--glob", "*"], "is not a folder"),
    ],
)
def test_what_cannot_be_done_is_refused(
    folder: Path,
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"few": few(folder, tmp_path), "full": tmp_path / "full", "zarr": tmp_path / "a.zarr"}
    for place, name in ((places["full"], "thesis.doc"), (places["zarr"], "zarr.json")):
        place.mkdir()
        (place / name).touch()
    given = [argument.format(**places) for argument in arguments]
    assert segment(*given, "--config", config) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("line", ["no JSON", '{"stack": "a.tif", "later": 1}', '{"later": 1}', "[]", "3"])
def test_damaged_records_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "stacks.jsonl").write_text(f"{line}\n")
    with pytest.raises(BadParameter, match=r"stacks\.jsonl is damaged, or of another version; delete it"):
        Records(tmp_path)


def test_records_survive_an_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.set_series("key", ("15px", "seen"))
    with (tmp_path / "stacks.jsonl").open("a") as file:
        file.write('{"stack": "a.tif", "ke')
    again = Records(tmp_path)
    assert (again.series("key"), len(again)) == (("15px", "seen"), 0)
    again.set_series("other", ("", ""))
    assert Records(tmp_path).series("other") == ("", "")
