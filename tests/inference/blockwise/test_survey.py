"""Survey of a volume in parts: bitwise equal to one pass over the whole volume."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from service.core.errors import BadFile
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.blockwise import counting, survey
from service.inference.blockwise.run_folder import BlockTask, OpenRun, open_run
from service.inference.blockwise.survey import LayerReader
from service.inference.preprocessing.normalize import normalize_volume
from service.inference.preprocessing.percentiles import MAX_SORTED_VOXELS
from service.inference.windows.sliding_window import SparseImage
from tests.block_runs import create_run
from tests.segmenters import make_settings, start_runner
from tests.zarr_files import write_zarr


@pytest.mark.parametrize("depth", [1, 7])
def test_planes_from_many_layers_of_chunks_are_read_correctly(depth: int, tmp_path: Path) -> None:
    pixels = np.zeros((1100, 3, 4), np.uint16)
    pixels[::150] = np.random.default_rng(0).integers(1, 1000, (8, 3, 4))
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=(depth, 3, 4))
    with stack_reader.open_blocks(source, Selection()) as stack:
        layers = LayerReader(stack, tmp_path)
        for first, end in ((0, 1100), (3, 4), (148, 161)):
            assert np.array_equal(layers.read(first, end)[0], pixels[first:end])


def survey_in_rounds(run: OpenRun) -> int:
    """Survey a run in this process; return the number of rounds."""
    runner, parts, rounds = start_runner(run.spec, make_settings()), counting.get_part_count(run), 0
    while True:
        for number in range(rounds * parts, (rounds + 1) * parts):
            counting.count_part(run, number)
        record = survey.merge_counts(run, runner, rounds)
        rounds += 1
        if not record["requests"]:
            return rounds
        run.folder.write_record(BlockTask(str(run.folder.path), "survey", rounds - 1), record)


def make_volumes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    large = (66, 256, 257)
    assert np.prod(large) > MAX_SORTED_VOXELS
    real = rng.normal(10, 3, large).astype(np.float32)
    with_gaps = rng.normal(-5, 3, (30, 70, 50)).astype(np.float16)
    with_gaps[3:9, 40:] = np.nan
    with_gaps[0, 0, 0] = -np.inf
    wide_gaps = real.copy()
    wide_gaps[5:40, 20:, ::3] = np.nan
    rare = np.full((30, 70, 50), 7, np.uint16)
    rare[20, 60, 33] = 900
    return {
        "16 bits": rng.integers(0, 2**16, (30, 70, 50)).astype(np.uint16),
        "signed": rng.integers(-(2**15), 2**15, (30, 70, 50)).astype(np.int16),
        "rare": rare,
        "half": with_gaps,
        "32 bits": real,
        "32 bits with gaps": wide_gaps,
        "integers": (real * 1e6).astype(np.int32),
        "few of 32 bits": real[:20, :60, :60],
    }


FAST_CASES = {"16 bits", "half", "32 bits with gaps"}


@pytest.mark.parametrize(
    "case", [case if case in FAST_CASES else pytest.param(case, marks=pytest.mark.thorough) for case in make_volumes()]
)
def test_scalings_equal_those_of_the_whole_volume(case: str, tmp_path: Path, random_nuclei) -> None:
    pixels = make_volumes()[case]
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=(13, 32, 24) if pixels.size < 2**20 else (16, 128, 128))
    run = open_run(str(create_run(tmp_path / "run", source, random_nuclei, Options(), make_settings(), (1, 2, 2)).path))
    assert counting.get_part_count(run) > 1 or case == "few of 32 bits"
    assert survey_in_rounds(run) == (2 if pixels.itemsize > 2 and pixels.size > MAX_SORTED_VOXELS else 1)
    image, notes = normalize_volume(Volume.from_array(pixels[None]), random_nuclei)
    assert run.folder.survey.scalings == image.scalings
    assert run.folder.survey.notes[-len(notes) or 99 :] == notes


@pytest.mark.parametrize("below", ["auto", 600.0])
def test_empty_windows_equal_those_of_the_whole_volume(
    below: Literal["auto"] | float, tmp_path: Path, random_nuclei
) -> None:
    rng = np.random.default_rng(1)
    pixels = rng.normal(500, 15, (61, 70, 90)).astype(np.float32)
    pixels[20:40, 30:60, 50:] += 5000
    pixels[50, 60, 70] = np.nan
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=(7, 32, 24))
    options, decoding = Options(skip_below=below), random_nuclei.decoding.model_copy(update={"threshold": 0.99})
    spec = random_nuclei.model_copy(update={"decoding": decoding})
    folder = create_run(tmp_path / "run", source, spec, options, make_settings(), (1, 1, 1))
    run = OpenRun(folder, folder.plan, spec)
    survey_in_rounds(run)
    volume, runner = Volume.from_array(pixels[None]), start_runner(spec, make_settings())
    image, _notes = normalize_volume(volume, spec)
    whole = survey.skip_empty_windows(runner, image, volume, runner.estimator.plan(options), None)
    assert isinstance(whole.image, SparseImage)
    found = folder.survey
    assert (found.skipped, found.scores) == (whole.skipped, tuple(whole.image.scores.tolist()))
    assert {tuple(position) for position in folder.read_array("skipped.npy").tolist()} == whole.image.skipped_positions


def test_volume_without_finite_pixels_is_rejected(tmp_path: Path, random_nuclei) -> None:
    source = write_zarr(tmp_path / "in.zarr", np.full((20, 20, 20), np.nan, np.float32), chunks=(16, 20, 24))
    run = open_run(str(create_run(tmp_path / "run", source, random_nuclei, Options(), make_settings()).path))
    with pytest.raises(BadFile, match="NaN or infinite"):
        survey_in_rounds(run)


@pytest.mark.parametrize(("dtype", "extreme"), [("float32", 1e20), ("uint32", 2**32 - 1), ("uint16", 2000)])
def test_notes_equal_those_of_the_whole_volume(dtype: str, extreme: float, tmp_path: Path, random_nuclei) -> None:
    pixels = np.random.default_rng(0).integers(1, 2000, (30, 70, 50)).astype(dtype)
    pixels[20, 60, 40] = extreme
    if dtype == "float32":
        pixels[25, 60, 40] = np.nan
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=(13, 32, 24))
    next(source.rglob("c/0/0/1")).unlink()
    run = open_run(str(create_run(tmp_path / "run", source, random_nuclei, Options(), make_settings()).path))
    volume = stack_reader.read(source, Selection(), 2**30)
    survey_in_rounds(run)
    notes = (*normalize_volume(volume, random_nuclei)[1], *volume.notes)
    assert len(notes) == {"float32": 3, "uint32": 2, "uint16": 1}[dtype]
    assert set(notes) <= set(run.folder.survey.notes)
