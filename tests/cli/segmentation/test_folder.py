"""`stackseg segment FOLDER` with the real command line: interruption, resumption, and a damaged file."""

from __future__ import annotations

import csv
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import yaozarrs
from fakes import wait_until
from imagecodecs import png_decode
from live import as_tiff, read_recorded_stacks
from paths import ROOT
from zarr_files import write_zarr

from scripts.recipes.synthetic_nuclei import synthesize
from service.__main__ import main
from service.cli.segmentation.folder import find_stacks
from service.core.types import Selection
from service.formats import stack_reader
from service.models.spec import ModelSpec

STACKS = [f"stack {number:02}" for number in range(19)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with twenty small stacks, one of which is damaged."""
    folder = tmp_path_factory.mktemp("stacks")
    image, _labels = synthesize(np.random.default_rng(0), (16, 48, 64))
    for number, name in enumerate(STACKS):
        (folder / f"{name}.tif").write_bytes(as_tiff(np.roll(image, 3 * number, 1)))
    (folder / "broken.tif").write_bytes(as_tiff(image)[:5000])
    (folder / "notes.txt").write_text("not a stack")
    return folder


@pytest.fixture
def config(random_nuclei: ModelSpec, write_config: Any) -> Path:
    return Path(write_config(random_nuclei.folder.parent))


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_interrupted_folder_is_resumed(
    folder: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    # The process that runs the tests may ignore the signal, and its children inherit this.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from service.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["segment", str(folder), "-o", str(out), "--config", str(config)]
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(read_recorded_stacks(out)) >= 4 or process.poll() is not None, 120)
        process.send_signal(signal.SIGINT)
        _output, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "stackseg: interrupted\n")
    previous_stacks = read_recorded_stacks(out)
    assert 4 <= len(previous_stacks) < 20
    assert "not processed" in (out / "report.html").read_text()

    assert main(arguments) == 1
    output, err = capsys.readouterr()
    assert err.startswith("stackseg: broken.tif: ")
    # Only failed stacks are tried again.
    assert sorted(read_recorded_stacks(out)) == sorted(
        [*(f"{name}.tif" for name in STACKS), "broken.tif", "broken.tif"]
    )
    assert output.startswith(
        f"{out / 'report.html'}: 19 of 20 stacks, {len(previous_stacks) - 1} of them in earlier runs, "
    )

    table, report = read_table(out / "objects.csv"), (out / "report.html").read_text()
    for name in STACKS:
        labels = tifffile.imread(out / f"{name}_labels.ome.tif")
        rows = [row for row in table if row["stack"] == f"{name}.tif"]
        assert [int(row["label"]) for row in rows] == list(range(1, labels.max() + 1))
        assert f">{name}.tif</a></td><td>{labels.max()}</td>" in report
        assert png_decode((out / f"{name}.png").read_bytes()).shape == (48, 64, 3)
    assert "truncated" in report
    assert "not processed" not in report


def copy_few_stacks(folder: Path, tmp_path: Path, names: Sequence[str] = STACKS[:3]) -> Path:
    """Copy some of the stacks to a new folder, and return it."""
    copied_folder = tmp_path / "few"
    copied_folder.mkdir()
    for name in names:
        (copied_folder / f"{name}.tif").write_bytes((folder / f"{name}.tif").read_bytes())
    return copied_folder


def test_completed_stacks_are_skipped_unless_parameters_or_files_changed(
    folder: Path, config: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    copied_folder, out = copy_few_stacks(folder, tmp_path), tmp_path / "out"

    def count_previous_stacks(*arguments: object) -> str:
        output = run_stackseg("segment", copied_folder, out, "--config", config, *arguments).partition(" stacks, ")[2]
        return output.partition(" of them")[0] if "in earlier runs" in output else "0"

    assert count_previous_stacks() == "0"
    assert count_previous_stacks() == "3"
    assert count_previous_stacks("--overlap", "0.5") == "0"
    assert count_previous_stacks("--overlap", "0.5") == "3"
    (copied_folder / f"{STACKS[1]}.tif").write_bytes((folder / f"{STACKS[5]}.tif").read_bytes())
    assert count_previous_stacks("--overlap", "0.5") == "2"
    (out / f"{STACKS[0]}_labels.ome.tif").unlink()
    assert count_previous_stacks("--overlap", "0.5") == "2"


def test_labels_of_a_folder_are_written_as_ome_zarr_on_request(
    folder: Path, config: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    copied_folder, out = copy_few_stacks(folder, tmp_path), tmp_path / "out"
    names = sorted(path.stem for path in copied_folder.glob("*.tif"))
    run_stackseg("segment", copied_folder, out, "--config", config)
    for previous_count in (0, len(names) - 1):
        if previous_count:
            (out / f"{names[0]}_labels.ome.zarr" / "zarr.json").unlink()
        output = run_stackseg("segment", copied_folder, out, "--config", config, "--format", "zarr")
        assert (f", {previous_count} of them in earlier runs" in output) == (previous_count > 0)
        for name in names:
            store = out / f"{name}_labels.ome.zarr"
            yaozarrs.validate_zarr_store(str(store))
            volume = stack_reader.read(store, Selection(), 10**9)
            assert np.array_equal(volume.read_all()[0], tifffile.imread(out / f"{name}_labels.ome.tif"))
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert f"{names[0].replace(' ', '%20')}_labels.ome.zarr" in (out / "report.html").read_text()


def test_folder_with_different_formats_is_segmented(
    folder: Path, config: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    mixed, out = copy_few_stacks(folder, tmp_path, STACKS[:1]), tmp_path / "out"
    pixels = tifffile.imread(folder / f"{STACKS[0]}.tif")
    write_zarr(mixed / "folder.ome.zarr", pixels, chunks=(8, 48, 64))
    write_zarr(mixed / "old.zarr", pixels, version="0.4", chunks=(8, 48, 64))
    with zipfile.ZipFile(mixed / "packed.ozx", "w") as archive:
        for path in sorted((mixed / "folder.ome.zarr").rglob("*")):
            archive.write(path, path.relative_to(mixed / "folder.ome.zarr"))
    (mixed / "._stack.tif").write_bytes(b"\0\5\x16\7" + bytes(100))
    (mixed / "page.tif").write_text("<html>")
    write_zarr(mixed / "empty.zarr", pixels, chunks=(8, 48, 64))
    shutil.rmtree(mixed / "empty.zarr" / "0")

    err = run_stackseg("segment", mixed, out, "--config", config, "--diameter", "none", status=1)

    assert sorted(line.split(": ")[1] for line in err.splitlines()) == ["empty.zarr", "page.tif"]
    expected = tifffile.imread(out / f"{STACKS[0]}_labels.ome.tif")
    for name in ("folder", "old", "packed"):
        np.testing.assert_array_equal(tifffile.imread(out / f"{name}_labels.ome.tif"), expected)
    # Finished OME-Zarr images are skipped, unless a chunk has changed. Files in OME-Zarr folders are not stacks.
    (mixed / "folder.ome.zarr" / "0" / "c" / "0" / "0" / "0").touch()
    previous_count = len(read_recorded_stacks(out))
    run_stackseg("segment", mixed, out, "--config", config, "--diameter", "none", "--glob", "**/*", status=1)
    assert sorted(read_recorded_stacks(out)[previous_count:]) == ["empty.zarr", "folder.ome.zarr", "page.tif"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{few}", "{few}"], "is the folder that contains the stacks"),
        (
            ["{few}", "{full}"],
            "already contains other files. Choose another folder, or use --force to write to it anyway",
        ),
        (["{few}", "{few}/stack 00.tif"], "is a file. Choose a folder"),
        (["{few}", "out", "--diameter", "auto"], "has no object diameter"),
        (["{few}", "out", "--glob", "*.lsm"], "contains no stacks that match *.lsm"),
        (["{full}", "out"], "contains no files in a supported format"),
        (["{few}", "out", "--measurements", "objects.csv"], "objects.csv in the results folder"),
        (["{few}"], "Specify the result exactly once"),
        (["{few}", "out", "-o", "out"], "Specify the result exactly once"),
        (["{few}/stack 00.tif", "out.tif", "--glob", "*"], "is not a folder"),
        (["{few}", "out", "--workers", "2"], "--workers requires an OME-Zarr folder"),
        (["s3://bucket/a.zarr", "out.zarr", "--workers", "2"], "--workers requires an OME-Zarr folder"),
        (["{few}", "out", "--scratch", "here"], "--scratch requires block-wise segmentation"),
        (["{zarr}", "out.tif", "--workers", "2"], "must end with .zarr"),
    ],
)
def test_invalid_arguments_are_rejected(
    folder: Path, config: Path, tmp_path: Path, run_stackseg: Any, monkeypatch: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    zarr = write_zarr(tmp_path / "in.zarr", np.zeros((4, 8, 8), np.uint8), chunks=(4, 8, 8))
    paths = {"few": copy_few_stacks(folder, tmp_path), "full": tmp_path / "full", "zarr": zarr}
    paths["full"].mkdir()
    (paths["full"] / "thesis.doc").touch()
    formatted = [argument.format(**paths) for argument in arguments]
    assert message in run_stackseg("segment", *formatted, "--config", config, status=1)


def test_time_series_of_a_folder_have_linked_objects(
    folder: Path, config: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    time_series, out = tmp_path / "movies", tmp_path / "out"
    time_series.mkdir()
    points = np.stack([tifffile.imread(folder / f"{name}.tif")[:8] for name in STACKS[:3]])
    axes = {"axes": "TZYX", "spacing": 0.5, "unit": "um"}
    for name in ("one", "two"):
        (time_series / f"{name}.tif").write_bytes(as_tiff(points, metadata=axes))
    content = as_tiff(points, metadata=axes, compression="zlib")
    with tifffile.TiffFile(time_series / "one.tif") as plain:
        assert plain.series[0].axes == "TZYX"
    (time_series / "cut.tif").write_bytes(content[: len(content) // 2])
    arguments = ["--config", config, "--diameter", "none", "--time", "all", "--link", "overlap"]

    assert "stackseg: cut.tif: " in run_stackseg("segment", time_series, out, *arguments, status=1)

    table = read_table(out / "objects.csv")
    for name in ("one", "two"):
        labels = tifffile.imread(out / f"{name}_labels.ome.tif")
        assert labels.shape == points.shape
        tracks = {int(row["track_id"]) for row in table if row["stack"] == f"{name}.tif"}
        assert tracks == set(np.unique(labels[labels > 0]).tolist())
        assert png_decode((out / f"{name}.png").read_bytes()).shape == (48, 64, 3)
    # The result is the same as for the single file.
    run_stackseg("segment", time_series / "one.tif", tmp_path / "one.tif", *arguments)
    single_result = tifffile.imread(tmp_path / "one.tif")
    np.testing.assert_array_equal(single_result, tifffile.imread(out / "one_labels.ome.tif"))


def test_broken_links_are_listed_if_their_names_are_those_of_stacks(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(as_tiff(np.ones((3, 8, 8), np.uint8)))
    for name, target in {"b.tif": "a.tif", "c.tif": "missing.tif", "d.tif": "d.tif", "notes": "missing"}.items():
        (tmp_path / name).symlink_to(target)
    assert find_stacks(tmp_path, None, tmp_path / "out") == ["a.tif", "b.tif", "c.tif", "d.tif"]


def test_results_may_be_written_around_the_stacks_but_are_not_stacks(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    (stacks / "out").mkdir(parents=True)
    for name in ("a.tif", "out/b.tif"):
        (stacks / name).write_bytes(as_tiff(np.ones((3, 8, 8), np.uint8)))
    assert find_stacks(stacks, "**/*.tif", tmp_path) == ["a.tif", "out/b.tif"]
    assert find_stacks(stacks, "**/*.tif", stacks / "out") == ["a.tif"]
