"""Labels of a block-wise run are those of the whole volume, to the bit, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from scipy.ndimage import gaussian_filter

from service.core.config import override_settings
from service.core.volume import ObjectVolume, Options, Steering
from service.formats import zarr_writer
from tests.block_runs import begin, segment_blocks, segment_whole
from tests.segmenters import settings_of
from tests.zarr_files import write_zarr

SHAPE = (37, 45, 50)


def hills(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Smooth noise of 16 bits."""
    noise = gaussian_filter(np.random.default_rng(seed).normal(size=shape), 1.5)
    return ((noise - noise.min()) / np.ptp(noise) * 60000).astype(np.uint16)


def instances(content: dict[str, Any], **decoding: Any) -> dict[str, Any]:
    """The model file of a model whose random scores have objects."""
    return content | {"decoding": {"kind": "instances", "threshold": 0.5, "persistence": 0.02, **decoding}}


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], Options]] = {
    "single windows": ((1, 1, 1), {}, Options()),
    "odd groups": ((1, 2, 3), {}, Options()),
    "smoothed": ((2, 1, 2), {"smoothing": 2}, Options()),
    "much overlap": ((2, 3, 2), {}, Options(overlap=0.6)),
    "no border": ((2, 2, 2), {"border": "drop", "minimum_size": 5}, Options(overlap=0.5)),
    "in views": ((2, 2, 1), {}, Options(quality="best")),
    "steered": (
        (1, 2, 2),
        {"minimum_fraction": 0.1},
        Options(steering=Steering(threshold=0.45, min_confidence=0.52, minimum_size=ObjectVolume(9, "px"))),
    ),
    "foreground": ((1, 1, 2), {}, Options(output="classes")),
    "empty windows": ((1, 2, 1), {}, Options(skip_below=20000.0)),
}


FEW = {"odd groups", "empty windows"}


@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.thorough) for case in CASES]
)
def test_labels_are_those_of_the_whole(case: str, tmp_path: Path, write_model, random_nuclei_content) -> None:
    windows, decoding, options = CASES[case]
    spec = write_model(instances(random_nuclei_content, **decoding))
    pixels = hills(SHAPE, 3)
    if case == "empty windows":
        pixels[:, 20:] = 100
    source = write_zarr(tmp_path / "in.zarr", pixels, chunks=(16, 20, 24))
    whole = segment_whole(source, spec, options, settings_of()).segmentation
    folder = begin(tmp_path / "run", source, spec, options, settings_of(), windows)
    labels = segment_blocks(folder, tmp_path / "out.zarr")
    skipped = folder.survey.skipped
    assert (skipped is not None and skipped.windows > 0) == (case == "empty windows")
    assert whole.pixels.any()
    assert labels.dtype == whole.pixels.dtype
    assert np.array_equal(labels, whole.pixels)


def test_a_volume_with_nothing_in_it_has_no_labels(tmp_path: Path, write_model, random_nuclei_content) -> None:
    spec = write_model(instances(random_nuclei_content))
    source = write_zarr(tmp_path / "in.zarr", hills((20, 20, 30), 3), chunks=(16, 20, 24))
    options = Options(steering=Steering(threshold=0.999))
    folder = begin(tmp_path / "run", source, spec, options, settings_of(), (1, 1, 2))
    assert not segment_blocks(folder, tmp_path / "out.zarr").any()
    assert folder.read_record("join")["objects"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(1, 40, 50), (9, 16, 61), (40, 7, 8), (16, 16, 16), (17, 16, 16)])
def test_shapes_that_are_hardly_larger_than_a_window(
    shape: tuple[int, int, int], tmp_path: Path, write_model, random_nuclei_content
) -> None:
    spec = write_model(instances(random_nuclei_content))
    source = write_zarr(tmp_path / "in.zarr", hills(shape, 5).astype(np.float32), chunks=(8, 16, 16))
    whole = segment_whole(source, spec, Options(), settings_of()).segmentation.pixels
    folder = begin(tmp_path / "run", source, spec, Options(), settings_of(), (1, 1, 1))
    assert np.array_equal(segment_blocks(folder, tmp_path / "out.zarr"), whole)


def test_classes_and_their_pyramid(tmp_path: Path, bands, phantom) -> None:
    source = write_zarr(tmp_path / "in.zarr", phantom.image, chunks=(16, 32, 32))
    whole = segment_whole(source, bands, Options(), settings_of()).segmentation
    out = source / "labels" / "bands"
    labels = segment_blocks(begin(tmp_path / "run", source, bands, Options(), settings_of(), (1, 1, 2)), out)
    assert np.array_equal(labels, whole.pixels)
    zarr_writer.write(whole, tmp_path / "whole.zarr")
    one, other = (zarr.open_group(path, mode="r") for path in (out, tmp_path / "whole.zarr"))
    assert sorted(one.array_keys()) == sorted(other.array_keys())
    for level in one.array_keys():
        assert np.array_equal(one[level][...], other[level][...])
    assert one.attrs["ome"]["multiscales"][0]["datasets"] == other.attrs["ome"]["multiscales"][0]["datasets"]
    assert zarr.open_group(source / "labels", mode="r").attrs["ome"]["labels"] == ["bands"]


def test_a_run_may_have_more_windows_than_a_request(tmp_path: Path, write_model, random_nuclei_content) -> None:
    content = instances(random_nuclei_content)
    spec = write_model(content | {"input": content["input"] | {"diameter": 6.0}})
    source = write_zarr(tmp_path / "in.zarr", hills((20, 20, 20), 1), chunks=(16, 20, 24))
    settings = override_settings(settings_of(), "limits", {"windows": 1})
    folder = begin(tmp_path / "run", source, spec, Options(diameter="auto"), settings)
    assert segment_blocks(folder, tmp_path / "out.zarr").shape == (20, 20, 20)
