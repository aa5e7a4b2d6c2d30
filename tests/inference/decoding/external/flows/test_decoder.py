"""Comparison of the segmentation with that of Cellpose, which `scripts/fixtures/cellpose.py` has stored."""

from io import BytesIO

import numpy as np
import pytest
import tifffile
import torch
from importing import import_model
from live import as_tiff, eager_settings, serve
from paths import ROOT
from pixels import compute_overlaps

from service.core.errors import BadParameter, Cancelled
from service.core.quantities import Diameter, ObjectVolume, VoxelSize
from service.core.types import Options, PostprocessingOptions, Volume
from service.inference.decoding.external.flows.decoder import FlowDecoder
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.spec_parts import Flows

FIXTURES = ROOT / "tests" / "data" / "cellpose"
FP32 = {"kind": "eager", "precision": "fp32"}
SCORE_STEP = 2.0**-10
# Voxel size, options, and channels of the stacks.
STACKS = {
    "isotropic": (None, Options(diameter=Diameter((17.0,), "px"))),
    "anisotropic": (VoxelSize(2.5, 1, 1), Options()),
    "diameter": (VoxelSize(0.5, 0.5, 0.5), Options(diameter=Diameter((6.0,), "um"))),
    "channels": (None, Options(diameter=Diameter((16.0,), "px"))),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder with the model for one channel, and the runners for one and for two channels."""
    folder = tmp_path_factory.mktemp("models")
    specs = [
        import_model(FIXTURES / "CP_synthetic", folder, {"input": {"channels": count}}, f"cells{count}").spec
        for count in (1, 2)
    ]
    return folder, {spec.input.channels: ModelRunner(spec, eager_settings(folder, engine=FP32)) for spec in specs}


def read_volume(name: str) -> Volume:
    pixels = tifffile.imread(FIXTURES / f"{name}.tif")
    return Volume.from_array(pixels if pixels.ndim == 4 else pixels[None], STACKS[name][0])


@pytest.mark.parametrize("name", STACKS)
def test_labels_equal_those_of_cellpose(models, name):
    volume, expected = read_volume(name), tifffile.imread(FIXTURES / f"{name}-labels.tif")
    result = segment(models[1][volume.shape[0]], volume, STACKS[name][1])
    assert result.segmentation.count == expected.max() > 5
    assert min(compute_overlaps(result.segmentation.pixels, expected)) >= 0.99


@pytest.mark.parametrize("name", ["anisotropic", "channels"])
def test_scores_equal_those_of_cellpose(models, name, monkeypatch):
    collected = []
    monkeypatch.setattr(FlowDecoder, "add", lambda _decoder, _z, _y, scores: collected.append(scores[0].clone()))
    volume = read_volume(name)
    segment(models[1][volume.shape[0]], volume, STACKS[name][1])
    expected = np.load(FIXTURES / "expected.npz")[name] * SCORE_STEP
    assert np.abs(torch.cat(collected, 1).numpy() - expected).max() < 1e-3
    assert np.abs(expected).max() > 5


def test_service_returns_the_labels_of_cellpose(models):
    volume, expected = read_volume("diameter"), tifffile.imread(FIXTURES / "diameter-labels.tif")
    parameters = {"diameter": "12px", "voxel_size": "1,1,1"}
    settings = eager_settings(models[0], engine=FP32, models={"default": "cells1", "load": ["cells1"]})
    with serve(settings) as server:
        response = server.client.post(
            "/segment", params=parameters, content=as_tiff(volume.read_all()[0]), headers={"Content-Type": "image/tiff"}
        )
    assert response.status_code == 200, response.text
    assert min(compute_overlaps(tifffile.imread(BytesIO(response.content)), expected)) >= 0.99


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
def test_options_that_do_not_apply_are_refused_by_name(models, options, message):
    with pytest.raises(BadParameter, match=message):
        models[1][1].estimator.plan_request(read_volume("diameter"), options)


def test_single_planes_are_refused(models):
    with pytest.raises(BadParameter, match="at least two planes"):
        models[1][1].estimator.plan_request(Volume.from_array(np.zeros((1, 1, 50, 50), np.uint8)), Options())


def test_minimum_size_refers_to_the_voxels_of_the_stack(models):
    volume, expected = read_volume("diameter"), tifffile.imread(FIXTURES / "diameter-labels.tif")
    sizes = np.bincount(expected.ravel())[1:]
    minimum = int(np.median(sizes))
    postprocessing = PostprocessingOptions(minimum_size=ObjectVolume(minimum, "px"))
    options = Options(diameter=STACKS["diameter"][1].diameter, postprocessing=postprocessing)
    assert segment(models[1][1], volume, options).segmentation.count == np.count_nonzero(sizes >= minimum)
