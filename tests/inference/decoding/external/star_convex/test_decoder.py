"""Comparison of labels with those of StarDist, and properties of the decoder."""

import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from importing import import_model
from live import eager_settings
from paths import ROOT
from pixels import compute_overlaps

from service.core.errors import BadParameter, Cancelled, InternalError, OutOfMemory, TooLarge
from service.core.quantities import ObjectVolume
from service.core.types import Options, PostprocessingOptions, Volume
from service.inference.decoding.decoders import make_decoder
from service.inference.decoding.external.star_convex import child, decoder
from service.inference.decoding.external.star_convex.child_main import Task
from service.inference.decoding.external.star_convex.decoder import find_labels_at_faces
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.spec import ModelSpec

FIXTURES = ROOT / "tests" / "data" / "stardist"
FP32 = {"kind": "eager", "precision": "fp32"}

needs_stardist = pytest.mark.skipif(find_spec("stardist") is None, reason="needs the package stardist")


def make_spec(**decoding) -> ModelSpec:
    """Return a model with eight rays and one score per two voxels along y and x."""
    distances = [f"distance {number}" for number in range(8)]
    return ModelSpec(
        name="spheres",
        version="1",
        summary="",
        licence="",
        training_data="",
        architecture={"name": "StarDistUNet", "arguments": {"n_rays": 8, "grid": (1, 2, 2)}},
        weights={"sha256": "0" * 64},
        input={
            "normalisation": {"kind": "zscore"},
            "roi_size": (8, 32, 32),
            "roi_multiple": (1, 8, 8),
        },
        outputs=["probability", *distances],
        activation={"probability": "sigmoid", **dict.fromkeys(distances, "none")},
        decoding={"kind": "star-convex", "rays": {"count": 8}, "grid": (1, 2, 2), **decoding},
        folder=Path(),
    )


def make_scores(*objects) -> torch.Tensor:
    """Return scores of a stack of 12 x 40 x 50 voxels with an object of radius 4 at each (z, y, x, logit) of scores."""
    scores = torch.full((1, 9, 12, 20, 25), 4.0)
    scores[:, 0] = -10
    for z, y, x, logit in objects:
        scores[0, 0, z, y, x] = logit
    return scores


def decode(scores: torch.Tensor, output="labels", **decoding):
    """Decode scores that arrive in several slabs."""
    created = make_decoder(make_spec(**decoding), (12, 40, 50), output, None)
    for z in (0, 6):
        for y, height in ((0, 7), (7, 13)):
            created.add(z, y, scores[:, :, z : z + 6, y : y + height])
    return created.finish()


@pytest.fixture(scope="module")
def unet_runner(tmp_path_factory) -> ModelRunner:
    spec = import_model(
        FIXTURES / "unet", tmp_path_factory.mktemp("models"), {"input": {"roi_size": (28, 88, 96)}}
    ).spec
    return ModelRunner(spec, eager_settings(spec.folder.parent, engine=FP32))


@needs_stardist
@pytest.mark.parametrize("index", [0, 1, 2])
def test_labels_equal_those_of_stardist(unet_runner, index):
    stack = tifffile.imread(FIXTURES / f"stack{index}.tif")
    expected = tifffile.imread(FIXTURES / f"stack{index}-unet.tif")
    result = segment(unet_runner, Volume.from_array(stack[None]), Options()).segmentation
    assert result.count == expected.max() > 0
    assert min(compute_overlaps(result.pixels, expected)) >= 0.99


@needs_stardist
def test_labels_of_tiles_equal_those_of_stardist_if_they_overlap_by_the_receptive_field(tmp_path):
    spec = import_model(FIXTURES / "resnet", tmp_path, {"input": {"roi_size": (16, 40, 40)}}).spec
    runner = ModelRunner(spec, eager_settings(tmp_path, engine=FP32, limits={"overlap": 0.8}))
    stack, expected = (tifffile.imread(FIXTURES / f"stack0{suffix}.tif") for suffix in ("", "-resnet"))
    volume, options = Volume.from_array(stack[None]), Options(overlap=0.6)
    assert runner.estimator.estimate(volume, options).windows == 4
    result = segment(runner, volume, options)
    assert min(compute_overlaps(result.segmentation.pixels, expected)) >= 0.99


@needs_stardist
def test_outputs_other_than_labels_have_the_resolution_of_the_stack(unet_runner):
    volume = Volume.from_array(tifffile.imread(FIXTURES / "stack1.tif")[None])
    probabilities = segment(unet_runner, volume, Options(output="probabilities")).segmentation
    assert (probabilities.pixels.shape, probabilities.names) == ((1, *volume.shape[1:]), ("probability",))
    assert np.array_equal(probabilities.pixels[0, :, 0:60:2, 0:66:2], probabilities.pixels[0, :, 1:61:2, 1:66:2])
    classes = segment(unet_runner, volume, Options(output="classes")).segmentation.pixels
    threshold = unet_runner.spec.decoding.threshold
    assert np.array_equal(classes, probabilities.pixels[0] > threshold)


@needs_stardist
def test_objects_are_numbered_by_probability_which_is_their_confidence():
    result = decode(make_scores((5, 8, 6, 1.0), (6, 12, 18, 3.0), (6, 12, 17, 2.0)))
    assert result.count == 2, "the second polyhedron suppresses the third"
    assert result.pixels[6, 24, 36] == 1
    assert result.pixels[5, 16, 12] == 2
    assert result.objects.confidence == pytest.approx(1 / (1 + np.exp([-3.0, -1.0])))
    assert np.array_equal(result.objects.voxel_counts, np.bincount(result.pixels.ravel())[1:])


@needs_stardist
def test_parameters_of_the_decoding_exclude_objects():
    scores = make_scores((5, 8, 6, 1.0), (6, 12, 18, 3.0), (3, 3, 3, 2.0))
    objects = decode(scores).objects
    assert len(objects) == 3
    assert decode(scores, threshold=0.8).count == 2
    assert decode(scores, min_confidence=0.8, minimum_size=int(objects.voxel_counts.min())).count == 2
    dropped = decode(make_scores((2, 8, 6, 1.0), (6, 12, 18, 3.0)), border="drop", minimum_size=10)
    assert dropped.count == dropped.pixels.max() == 1


def test_scores_near_the_faces_are_not_origins_of_objects():
    result = decode(make_scores((1, 8, 6, 5.0), (6, 1, 6, 5.0), (6, 18, 6, 5.0), (10, 8, 8, 5.0), (6, 8, 1, 5.0)))
    assert (result.count, len(result.objects), result.pixels.any()) == (0, 0, False)


def test_coarse_scores_are_enlarged_to_voxels():
    scores = make_scores((5, 8, 24, 5.0))
    classes = decode(scores, "classes").pixels
    assert np.argwhere(classes).tolist() == [[5, y, x] for y in (16, 17) for x in (48, 49)]
    probabilities = decode(scores, "probabilities").pixels
    assert probabilities.shape == (1, 12, 40, 50)
    assert probabilities[0, 5, 16, 48] == pytest.approx(1 / (1 + np.exp(-5.0)))


def test_number_of_candidates_is_limited(monkeypatch):
    monkeypatch.setattr(decoder, "MAX_CANDIDATE_BYTES", 1000)
    scores = make_scores()
    scores[:, 0] = 10
    with pytest.raises(TooLarge, match="higher threshold"):
        decode(scores)


def test_labels_at_faces_are_found():
    labels = np.zeros((1, 5, 6), np.uint16)
    labels[0, 2, 3], labels[0, 0, 1], labels[0, 3, 5] = 1, 2, 3
    assert find_labels_at_faces(labels).tolist() == [2, 3]


def start_child(monkeypatch, source: str, cancelled=lambda: False):
    """Run Python code instead of the module that renders polyhedra."""
    monkeypatch.setattr(child, "MODULE", "timeit")
    monkeypatch.setattr(child.json, "dumps", lambda _task: source)
    with tempfile.TemporaryFile() as candidates:
        return child.render_polyhedra(Task((2, 2, 2), 1, 8, None, 0.4), candidates, cancelled)


def test_child_process_is_stopped_if_the_request_is_cancelled(monkeypatch):
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    start_time = time.monotonic()
    with pytest.raises(Cancelled):
        start_child(monkeypatch, "import time; time.sleep(60)", cancel.is_set)
    assert time.monotonic() - start_time < 30


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", OutOfMemory),
        ("raise MemoryError", OutOfMemory),
        ("raise ImportError('no module')", InternalError),
        ("import os; os._exit(0)", InternalError),
    ],
)
def test_failures_of_the_child_process_are_reported(monkeypatch, source, error):
    with pytest.raises(error):
        start_child(monkeypatch, source)


@needs_stardist
def test_request_can_be_cancelled_while_objects_are_rendered(unet_runner):
    stack = tifffile.imread(FIXTURES / "stack2.tif")
    progress = list[int]()

    def is_cancelled() -> bool:
        return bool(progress) and progress[-1] > 0

    callbacks = Callbacks(cancelled=is_cancelled, progress=lambda done, _total: progress.append(done))
    with pytest.raises(Cancelled, match="rendered"):
        segment(unet_runner, Volume.from_array(stack[None]), Options(), callbacks=callbacks)


@needs_stardist
def test_unsupported_options_are_refused_with_a_reason(unet_runner):
    volume = Volume.from_array(np.zeros((1, 16, 48, 48), np.uint8))
    for options, message in (
        (Options(quality="best"), "mirrored"),
        (Options(skip_below="auto"), "skip_below"),
        (Options(diameter="auto"), "no object diameter"),
        (Options(postprocessing=PostprocessingOptions(fill_holes=True)), "polyhedra"),
    ):
        with pytest.raises(BadParameter, match=message):
            segment(unet_runner, volume, options)
    few = Options(postprocessing=PostprocessingOptions(threshold=0.9, minimum_size=ObjectVolume(10, "px")))
    assert segment(unet_runner, volume, few).segmentation.count == 0
