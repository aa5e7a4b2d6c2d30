"""Labels of a block-wise run: bitwise equal to those of the whole volume, however the volume is divided."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tifffile
import zarr
from scipy.ndimage import gaussian_filter, zoom

from service.cli.segmentation.blocks import read_objects
from service.core.config import override_settings
from service.core.errors import BadParameter
from service.core.files.bundled import get_bundled_folder
from service.core.quantities import Diameter, ObjectVolume
from service.core.types import Options, PostprocessingOptions, Selection
from service.formats import stack_reader
from service.formats.zarr import writer as zarr_writer
from service.inference.blockwise.output import collect_table
from service.inference.blockwise.run_folder import Step, open_run
from service.inference.measurements import measure_objects
from service.inference.types import DiameterEstimate
from service.models.repository import read_spec
from tests.block_runs import FULL_SELECTION, create_run, segment_blocks, segment_whole
from tests.segmenters import make_settings
from tests.zarr_files import write_zarr

SHAPE = (37, 45, 50)


def make_hills(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return smooth 16-bit noise."""
    noise = gaussian_filter(np.random.default_rng(seed).normal(size=shape), 1.5)
    return ((noise - noise.min()) / np.ptp(noise) * 60000).astype(np.uint16)


def detect_objects(content: dict[str, Any], **decoding: Any) -> dict[str, Any]:
    """Return the `model.yaml` of a model that detects objects in its random scores."""
    return content | {"decoding": {"kind": "instances", "threshold": 0.5, "persistence": 0.02, **decoding}}


def expect_diameter(content: dict[str, Any], diameter: float) -> dict[str, Any]:
    """Return the `model.yaml` of a model that expects this object diameter."""
    return content | {"input": content["input"] | {"diameter": diameter}}


DEFAULT_OPTIONS = Options()
NINE = ObjectVolume(9, "px")
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], Options]] = {
    "single windows": ((1, 1, 1), {}, Options()),
    "odd groups": ((1, 2, 3), {}, Options()),
    "smoothed": ((2, 1, 2), {"smoothing": 2}, Options()),
    "large overlap": ((2, 3, 2), {}, Options(overlap=0.6)),
    "no border": ((2, 2, 2), {"border": "drop", "minimum_size": 5}, Options(overlap=0.5)),
    "several views": ((2, 2, 1), {}, Options(quality="best")),
    "post-processing options": (
        (1, 2, 2),
        {"minimum_fraction": 0.1},
        Options(postprocessing=PostprocessingOptions(0.45, NINE, min_confidence=0.52)),
    ),
    "minimum confidence": ((2, 1, 2), {"min_relative_odds": 0.97, "min_confidence": 0.51}, Options()),
    "finer": ((1, 2, 2), {"threshold": 0.45}, Options(diameter=Diameter((4.3,), "px"))),
    "coarser": (
        (1, 1, 1),
        {"smoothing": 1},
        Options(
            diameter=Diameter((4.1, 8.3, 13.0), "px"),
            postprocessing=PostprocessingOptions(minimum_size=ObjectVolume(200, "px")),
        ),
    ),
    "coarser foreground": ((1, 1, 1), {}, Options(output="classes", diameter=Diameter((9.0, 14.0, 5.0), "px"))),
    "finer, empty windows": ((1, 2, 1), {"threshold": 0.45}, Options(skip_below=2e4, diameter=Diameter((5.0,), "px"))),
    "foreground": ((1, 1, 2), {}, Options(output="classes")),
    "empty windows": ((1, 2, 1), {}, Options(skip_below=20000.0)),
}


def compare(tmp_path: Path, pixels: np.ndarray, spec, options=DEFAULT_OPTIONS, windows=None, chunks=(16, 20, 24)):
    """Assert that both methods return equal labels and notes; return the folder of the run, and the labels."""
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=chunks)
    whole = segment_whole(source, spec, options, make_settings())
    folder = create_run(tmp_path / "run", source, spec, options, make_settings(), windows)
    labels = segment_blocks(folder, tmp_path / "out.zarr")
    assert labels.dtype == whole.segmentation.pixels.dtype
    assert np.array_equal(labels, whole.segmentation.pixels)
    assert folder.survey.notes == whole.notes
    return folder, labels


FAST_CASES = {("odd groups", "keep"), ("single windows", "fill"), ("empty windows", "fill"), ("coarser", "fill")}


@pytest.mark.parametrize(
    ("case", "holes"),
    [
        (case, holes) if (case, holes) in FAST_CASES else pytest.param(case, holes, marks=pytest.mark.thorough)
        for case in CASES
        for holes in ("keep", "fill")
    ],
)
def test_labels_equal_those_of_the_whole_volume(case, holes, tmp_path, write_model, random_nuclei_content) -> None:
    windows, decoding, options = CASES[case]
    spec = write_model(detect_objects(expect_diameter(random_nuclei_content, 6.0), holes=holes, **decoding))
    pixels, has_empty = make_hills(SHAPE, 3), "empty windows" in case
    if has_empty:
        pixels[:, 20:] = 100
    folder, labels = compare(tmp_path, pixels, spec, options, windows)
    skipped = folder.survey.skipped
    assert (skipped is not None and skipped.windows > 0) == has_empty
    assert labels.any()


def test_volume_without_objects_has_no_labels(tmp_path: Path, write_model, random_nuclei_content) -> None:
    spec, options = (
        write_model(detect_objects(random_nuclei_content)),
        Options(postprocessing=PostprocessingOptions(threshold=0.999)),
    )
    folder, labels = compare(tmp_path, make_hills((20, 20, 30), 3), spec, options, (1, 1, 2))
    assert not labels.any()
    assert folder.read_record("objects")["objects"] == 0


def test_star_convex_polyhedra_are_refused(tmp_path: Path, write_model, random_nuclei_content) -> None:
    names = random_nuclei_content["outputs"]
    names = [*names, *(f"ray {number}" for number in range(5 - len(names)))]
    arguments = random_nuclei_content["architecture"]["arguments"] | {"out_channels": len(names)}
    spec = write_model(
        random_nuclei_content
        | {
            "architecture": random_nuclei_content["architecture"] | {"arguments": arguments},
            "outputs": names,
            "activation": "none",
            "decoding": {"kind": "star-convex", "rays": {"count": 4}},
        }
    )
    source = write_zarr(tmp_path / "stack.zarr", make_hills((20, 20, 30), 3))
    with pytest.raises(BadParameter, match="block-wise segmentation does not support star-convex"):
        create_run(tmp_path / "run", source, spec, DEFAULT_OPTIONS, make_settings())


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(1, 40, 50), (9, 16, 61), (40, 7, 8), (16, 16, 16), (17, 16, 16)])
def test_volumes_of_about_one_window_are_supported(shape, tmp_path: Path, write_model, random_nuclei_content) -> None:
    spec = write_model(detect_objects(random_nuclei_content))
    compare(tmp_path, make_hills(shape, 5).astype(np.float32), spec, windows=(1, 1, 1), chunks=(8, 16, 16))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
def test_labels_are_equal_for_any_diameter(seed: int, tmp_path: Path, write_model, random_nuclei_content) -> None:
    rng = np.random.default_rng(seed)
    z, y, x = rng.integers(12, 50, 3).tolist()
    widths = np.exp(rng.uniform(np.log(3), np.log(14), 3)).tolist()
    postprocessing = (
        PostprocessingOptions(minimum_size=ObjectVolume(float(rng.integers(1, 300)), "px"))
        if seed % 3
        else PostprocessingOptions()
    )
    options = Options(diameter=Diameter((widths[0], widths[1], widths[2]), "px"), postprocessing=postprocessing)
    spec = write_model(detect_objects(expect_diameter(random_nuclei_content, 6.0), threshold=0.44, smoothing=seed % 2))
    compare(tmp_path, make_hills((z, y, x), seed), spec, options, (1, 2, 1), (8, 16, 16))


def test_estimated_diameter_is_kept_when_a_run_is_resumed(tmp_path, write_model, random_nuclei_content) -> None:
    spec = write_model(detect_objects(expect_diameter(random_nuclei_content, 6.0), threshold=0.44))
    source = write_zarr(tmp_path / "in.zarr", make_hills((20, 24, 28), 4), chunks=(16, 20, 24))
    diameter = Diameter((9.0,), "px")
    folder = create_run(tmp_path / "run", source, spec, Options(diameter="auto"), make_settings())
    segment_blocks(folder, tmp_path / "first.zarr")
    survey = replace(
        folder.survey, diameter_estimate=DiameterEstimate(diameter, matches_model=False, num_objects=9, num_windows=4)
    )
    folder.write_survey(survey, folder.read_array("skipped.npy"))
    for step in get_args(Step):
        if step not in {"count", "survey"}:
            folder.discard_records(step)
    open_run.cache_clear()
    create_run(tmp_path / "run", source, spec, Options(diameter="auto"), make_settings())
    labels = segment_blocks(folder, tmp_path / "out.zarr")
    whole = segment_whole(source, spec, Options(diameter=diameter), make_settings()).segmentation.pixels
    assert whole.any()
    assert np.array_equal(labels, whole)


def test_run_resumed_with_another_output_path_writes_the_whole_result(tmp_path, bands, phantom) -> None:
    source = write_zarr(tmp_path / "in.zarr", phantom.image, chunks=(16, 32, 32))
    folder = create_run(tmp_path / "run", source, bands, Options(), make_settings())
    labels = segment_blocks(folder, tmp_path / "first.zarr")
    # Left behind by another interrupted run.
    shutil.copytree(tmp_path / "first.zarr", zarr_writer.get_partial_path(tmp_path / "out.zarr"))
    partial = zarr.open_group(zarr_writer.get_partial_path(tmp_path / "out.zarr"))
    partial["0"][...] = 1  # type: ignore[index]
    assert np.array_equal(segment_blocks(folder, tmp_path / "out.zarr"), labels)


@pytest.mark.thorough
def test_diameter_is_estimated_as_for_the_whole_volume_by_default(tmp_path: Path) -> None:
    nuclei = read_spec(get_bundled_folder("models") / "nuclei")
    enlarged = zoom(tifffile.imread(nuclei.folder / "sample.tif")[:, :64, :64], 1.7, order=1)
    folder, labels = compare(tmp_path, enlarged, nuclei, chunks=(16, 32, 32))
    assert labels.any()
    assert any(note.startswith("Resampled from") for note in folder.survey.notes)


@pytest.mark.parametrize("options", [Options(), Options(diameter=Diameter((9.0,), "px"))])
def test_objects_are_measured_in_each_channel(options, tmp_path, write_model, random_nuclei_content) -> None:
    spec = write_model(detect_objects(expect_diameter(random_nuclei_content, 6.0), threshold=0.44))
    # Labels are written in blocks of 64 planes.
    pixels = np.stack([make_hills((70, 20, 24), 4), make_hills((70, 20, 24), 5)])
    source = write_zarr(tmp_path / "in.zarr", pixels, "czyx", chunks=(1, 16, 20, 24))
    first = Selection(channel=0)
    whole = segment_whole(source, spec, options, make_settings(), first).segmentation
    table = measure_objects(whole, stack_reader.read(source, FULL_SELECTION, 2**40))
    folder = create_run(tmp_path / "run", source, spec, options, make_settings(), selection=first, measured=True)
    segment_blocks(folder, tmp_path / "out.zarr")
    found = collect_table(open_run(str(folder.path), has_survey=True), read_objects(folder))
    assert len(table["label"]) > 1
    assert list(found) == list(table)
    for name, column in table.items():
        assert np.array_equal(found[name], column), name


def test_classes_and_their_pyramid_equal_those_of_the_whole_volume(tmp_path: Path, bands, phantom) -> None:
    source = write_zarr(tmp_path / "in.zarr", phantom.image, chunks=(16, 32, 32))
    whole = segment_whole(source, bands, Options(), make_settings()).segmentation
    out = source / "labels" / "bands"
    labels = segment_blocks(create_run(tmp_path / "run", source, bands, Options(), make_settings(), (1, 1, 2)), out)
    assert np.array_equal(labels, whole.pixels)
    zarr_writer.write(whole, tmp_path / "whole.zarr")
    blockwise, expected = (zarr.open_group(path, mode="r") for path in (out, tmp_path / "whole.zarr"))
    assert sorted(blockwise.array_keys()) == sorted(expected.array_keys())
    for level in blockwise.array_keys():
        assert np.array_equal(blockwise[level][...], expected[level][...])
    assert blockwise.attrs["ome"]["multiscales"][0]["datasets"] == expected.attrs["ome"]["multiscales"][0]["datasets"]
    assert zarr.open_group(source / "labels", mode="r").attrs["ome"]["labels"] == ["bands"]


def test_window_limit_of_requests_does_not_apply_to_runs(tmp_path: Path, write_model, random_nuclei_content) -> None:
    spec = write_model(expect_diameter(detect_objects(random_nuclei_content), 6.0))
    source = write_zarr(tmp_path / "in.zarr", make_hills((20, 20, 20), 1), chunks=(16, 20, 24))
    settings = override_settings(make_settings(), "limits", {"windows": 1})
    folder = create_run(tmp_path / "run", source, spec, Options(diameter="auto"), settings)
    assert segment_blocks(folder, tmp_path / "out.zarr").shape == (20, 20, 20)


def test_windows_of_nnunet_are_divided_like_others(tmp_path: Path, write_model, random_nuclei_content) -> None:
    content = detect_objects(random_nuclei_content)
    spec = write_model(content | {"input": content["input"] | {"tiling": "nnunet"}})
    compare(tmp_path, make_hills(SHAPE, 3), spec, Options(overlap=0.4), (1, 2, 2))


def test_resampling_of_scores_is_not_supported(tmp_path: Path, write_model, random_nuclei_content) -> None:
    inputs = random_nuclei_content["input"] | {"resampling": "nnunet", "voxel_size": [1, 0.2, 0.2]}
    spec = write_model(detect_objects(random_nuclei_content | {"input": inputs}))
    source = write_zarr(tmp_path / "in.zarr", make_hills((20, 20, 20), 1))
    with pytest.raises(BadParameter, match="resamples scores as nnU-Net does"):
        create_run(tmp_path / "run", source, spec, Options(output="classes"), make_settings())


def test_only_classes_of_boundary_models_are_supported(tmp_path: Path, write_model, random_nuclei_content) -> None:
    pytest.importorskip("bioimage_cpp", reason="requires the extra boundaries")
    decoding = {"kind": "boundaries", "boundary": "foreground"}
    spec = write_model(random_nuclei_content | {"decoding": decoding})
    pixels = make_hills((20, 20, 20), 1)
    source = write_zarr(tmp_path / "labels.zarr", pixels, chunks=(16, 20, 24))
    with pytest.raises(BadParameter, match="the merging of supervoxels depends on the whole stack"):
        create_run(tmp_path / "run of labels", source, spec, Options(), make_settings())
    compare(tmp_path, pixels, spec, Options(output="classes"))
    attributes = zarr.open_group(tmp_path / "out.zarr", mode="r").attrs
    assert "foreground" in str(attributes.asdict())
