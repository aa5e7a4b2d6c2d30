"""Comparison of the segmentation with that of Cellpose, which `scripts/fixtures/cellpose*.py` have stored."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
from importing import import_model
from live import eager_settings
from numpy.typing import NDArray
from paths import ROOT
from pixels import compute_overlaps

from service.core.errors import BadParameter, Cancelled
from service.core.quantities import Diameter, ObjectVolume, VoxelSize
from service.core.types import Options, PostprocessingOptions, Volume
from service.inference.decoding.external.flows.decoder import FlowDecoder
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.windows.grid import Grid
from service.models.spec_parts import Flows, Tiling

FIXTURES = ROOT / "tests" / "data" / "cellpose"
FP32 = {"kind": "eager", "precision": "fp32"}
SCORE_STEP = 2.0**-10
# Names of models, and for each stack its voxel size and options.
STACKS = {
    "CP_synthetic": {
        "isotropic": (None, Options(diameter=Diameter((17.0,), "px"))),
        "anisotropic": (VoxelSize(2.5, 1, 1), Options()),
        "diameter": (VoxelSize(0.5, 0.5, 0.5), Options(diameter=Diameter((6.0,), "um"))),
        "channels": (None, Options(diameter=Diameter((16.0,), "px"))),
    },
    "cpsam_synthetic": {
        "anisotropic": (VoxelSize(2.5, 1, 1), Options()),
        "diameter": (None, Options(diameter=Diameter((24.0,), "px"))),
        "channels": (None, Options()),
    },
}
CASES = [(model, name) for model, stacks in STACKS.items() for name in stacks]
SAM_RESULTS = np.load(FIXTURES / "expected-sam.npz")


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    """Return the runners of the models for one and for two channels."""
    folder, runners = tmp_path_factory.mktemp("models"), {}
    for model, channels in itertools.product(STACKS, (1, 2)):
        spec = import_model(
            FIXTURES / model, folder, {"input": {"channels": channels}}, f"{model.lower()}{channels}"
        ).spec
        runners[model, channels] = ModelRunner(spec, eager_settings(folder, engine=FP32))
    return runners


def read_stack(model: str, name: str) -> tuple[Volume, Options]:
    """Return a stack, and the options with which Cellpose was run."""
    pixels = tifffile.imread(FIXTURES / f"{name}.tif")
    pixels = pixels.reshape(-1, *pixels.shape[-3:])
    if model == "cpsam_synthetic":
        z, y, x = SAM_RESULTS[f"{name}-labels"].shape
        pixels = pixels[:, :z, :y, :x]
    voxel_size, options = STACKS[model][name]
    return Volume.from_array(pixels, voxel_size), options


def read_labels(model: str, name: str) -> NDArray[np.uint16]:
    """Return the labels of Cellpose."""
    if model == "cpsam_synthetic":
        return SAM_RESULTS[f"{name}-labels"]
    return tifffile.imread(FIXTURES / f"{name}-labels.tif")


@pytest.mark.parametrize(("model", "name"), CASES)
def test_scores_and_labels_equal_those_of_cellpose(runners, model, name, monkeypatch):
    collected, add = [], FlowDecoder.add

    def collect(decoder, z0, y0, scores):
        collected.append(scores[0].clone())
        add(decoder, z0, y0, scores)

    monkeypatch.setattr(FlowDecoder, "add", collect)
    (volume, options), expected = read_stack(model, name), read_labels(model, name)
    result = segment(runners[model, volume.shape[0]], volume, options)
    assert result.segmentation.count == expected.max() > 5
    assert min(compute_overlaps(result.segmentation.pixels, expected)) >= 0.99
    expected_scores = SAM_RESULTS if model == "cpsam_synthetic" else np.load(FIXTURES / "expected.npz")
    if name in expected_scores:
        differences = torch.cat(collected, 1).numpy() - expected_scores[name] * SCORE_STEP
        assert np.abs(differences).max() < 1e-3


def test_fixed_tiles_are_those_of_cellpose():
    for name in SAM_RESULTS:
        if name.startswith("tiles-"):
            length = int(name.removeprefix("tiles-"))
            grid = Grid.cover((4, 256, length), (4, 256, 256), 0.1, Tiling("cellpose", is_fixed=True))
            assert [grid.pad_before[2], *grid.starts[2]] == SAM_RESULTS[name].tolist(), name


def make_scores(size=(12, 20, 20)) -> torch.Tensor:
    """Return the scores of two touching blocks, whose voxels flow to their centers."""
    scores = torch.zeros(1, 4, *size)
    scores[:, 0] = -5
    z, y, x = (torch.arange(length, dtype=torch.float32) for length in size)
    for center in (6.0, 13.0):
        box = (slice(3, 9), slice(6, 14), slice(int(center) - 3, int(center) + 4))
        scores[0, 0][box] = 3
        scores[0, 1][box] = (5 * (5.5 - z[box[0]])).clamp(-5, 5)[:, None, None]
        scores[0, 2][box] = (5 * (9.5 - y[box[1]])).clamp(-5, 5)[None, :, None]
        scores[0, 3][box] = (5 * (center - x[box[2]])).clamp(-5, 5)[None, None]
    return scores


def decode(scores: torch.Tensor, cancelled=lambda: False, **decoding):
    """Decode scores that arrive in several slabs."""
    decoder = FlowDecoder(Flows(kind="flows", steps=50, **decoding), tuple(scores.shape[2:]), None, cancelled)
    for z in (0, 6):
        decoder.add(z, 0, scores[:, :, z : z + 6, :7])
        decoder.add(z, 7, scores[:, :, z : z + 6, 7:])
    return decoder.finish()


def test_voxels_that_end_at_the_same_place_are_one_object():
    result = decode(make_scores())
    assert result.count == result.pixels.max() == 2
    assert np.array_equal(result.objects.voxel_counts, np.bincount(result.pixels.ravel())[1:])
    assert result.objects.voxel_counts.tolist() == [6 * 8 * 7] * 2
    assert result.objects.confidence == pytest.approx(1 / (1 + np.exp(-3.0)))


def test_parameters_of_the_decoding_exclude_objects():
    scores = make_scores()
    assert decode(scores, minimum_size=6 * 8 * 7 + 1).count == 0
    assert decode(scores, maximum_fraction=0.05).count == 0
    assert decode(scores, min_confidence=0.99).count == 0
    assert decode(scores, threshold=0.96).count == 0
    assert decode(scores[..., 4:], border="drop").count == 1


def test_holes_are_filled_unless_the_request_keeps_them():
    scores = make_scores()
    scores[0, 0, 5, 9, 8] = -5
    assert decode(scores).pixels[5, 9, 8] == 1
    assert decode(scores, holes="keep").pixels[5, 9, 8] == 0


def test_stacks_without_foreground_have_no_objects():
    result = decode(torch.full((1, 4, 12, 20, 20), -1.0))
    assert (result.count, result.pixels.any(), len(result.objects)) == (0, False, 0)


def test_decoding_can_be_cancelled():
    with pytest.raises(Cancelled):
        decode(make_scores(), lambda: True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(quality="best"), "fixed directions"),
        (Options(skip_below=3.0), "skip_below"),
        (Options(overlap=0.5), "overlap by 10%"),
        (Options(diameter="auto"), "can be estimated"),
        (Options(roi_size=(4, 64, 64)), "supports only the window size"),
    ],
)
def test_options_that_do_not_apply_are_refused_by_name(runners, options, message):
    volume, _options = read_stack(*CASES[2])
    with pytest.raises(BadParameter, match=message):
        runners["CP_synthetic", 1].estimator.plan_request(volume, options)


def test_single_planes_are_refused(runners):
    with pytest.raises(BadParameter, match="at least two planes"):
        runners["CP_synthetic", 1].estimator.plan_request(
            Volume.from_array(np.zeros((1, 1, 50, 50), np.uint8)), Options()
        )


def test_minimum_size_refers_to_the_voxels_of_the_stack(runners):
    (volume, options), expected = (read(*CASES[2]) for read in (read_stack, read_labels))
    sizes = np.bincount(expected.ravel())[1:]
    minimum = int(np.median(sizes))
    postprocessing = PostprocessingOptions(minimum_size=ObjectVolume(minimum, "px"))
    result = segment(runners["CP_synthetic", 1], volume, replace(options, postprocessing=postprocessing))
    assert result.segmentation.count == np.count_nonzero(sizes >= minimum)
