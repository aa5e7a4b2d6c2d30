"""Diameter estimates of a network that detects every object at any scale."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import VoxelSize
from service.core.types import Volume
from service.inference.diameter import estimation
from service.inference.diameter.estimation import DiameterEstimator
from service.inference.diameter.scale_probe import (
    BLURRED_DEPTH_RATIO,
    MAX_ROUND_ASPECT,
    Factors,
    ScaleProbe,
    compute_expected_flatness,
)
from service.inference.preprocessing.normalize import IntensityScaling, NormalizedImage
from service.inference.types import DiameterEstimate
from service.models.spec import Calibration, ModelSpec
from service.models.spec_parts import Instances

ROI = (32, 32, 32)


@pytest.fixture
def spec(random_nuclei: ModelSpec) -> ModelSpec:
    """Model with objects of 10 voxels and windows of 32; outputs are logits of probabilities."""
    given = random_nuclei.input.model_copy(update={"diameter": 10.0, "roi_size": ROI})
    decoding = Instances(kind="instances", persistence=0.2, minimum_size=8)
    return random_nuclei.model_copy(update={"input": given, "activation": "sigmoid", "decoding": decoding})


def balls(shape: tuple[int, int, int], diameter: float, aspect: float = 1.0, gap: float = 1.2) -> NDArray[np.float32]:
    """Return balls on a lattice [Z, Y, X], 1 at the center and 0 at the surface, flattened along z by `aspect`."""
    z, y, x = np.indices(shape).astype(np.float32)
    steps = [gap * diameter / aspect, gap * diameter, gap * diameter]
    squares = []
    for axis, step, radius in zip((z, y, x), steps, (diameter / aspect / 2, diameter / 2, diameter / 2), strict=True):
        squares.append((((axis + step / 4) % step - step / 2) / radius) ** 2)
    return np.clip(1 - np.sqrt(np.sum(squares, axis=0)), 0, 1).astype(np.float32)


def score_brightness(windows: Tensor) -> Tensor:
    """Return scores: bright voxels are foreground, and brightness is the distance."""
    return torch.cat([100 * (windows - 0.1), torch.logit(windows.clamp(1e-3, 1 - 1e-3))], 1)


def make_image(pixels: NDArray[Any]) -> NormalizedImage:
    return NormalizedImage(Volume.from_array(pixels[None]), [IntensityScaling(0, 1)])


def estimate(
    pixels: NDArray[Any], spec: ModelSpec, score_windows: Any = score_brightness, voxel_size: VoxelSize | None = None
) -> DiameterEstimate:
    return DiameterEstimator(make_image(pixels), (1, 1, 1), spec, score_windows, voxel_size).estimate()


@pytest.mark.parametrize(
    ("diameter", "aspect", "estimated_aspect"),
    [(5, 1, 1), (7, 1, 1), (14, 1, 1), (20, 1, 1), (12, 2, 2 / MAX_ROUND_ASPECT), (16, 4, 4)],
)
def test_the_estimate_is_close_to_the_diameter_of_the_objects(
    spec: ModelSpec, diameter: float, aspect: float, estimated_aspect: float
) -> None:
    found = estimate(balls((80, 80, 88), diameter, aspect), spec)
    assert found.diameter is not None
    depth, width = found.diameter.lengths[0], found.diameter.lengths[-1]
    # The foreground is brighter than a tenth of the center. Diameters are whole voxels.
    assert (depth * width * width) ** (1 / 3) == pytest.approx(diameter / aspect ** (1 / 3), rel=0.2)
    assert width / depth == pytest.approx(estimated_aspect, rel=0.25)
    assert not found.matches_model
    assert found.num_objects >= 5
    assert found.diameter.describe() in found.note
    assert "diameter=none" in found.note


def test_a_trial_does_not_select_a_scale_at_which_flat_objects_are_not_resolved(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The confidence is high only at the smallest scale."""
    monkeypatch.setattr(estimation, "predict_confidence", lambda objects, *_: 0.9 if objects.median_size < 150 else 0.1)
    flat, round_objects = (estimate(balls((80, 80, 88), 16, aspect), with_calibration(spec)) for aspect in (4, 1.2))
    assert flat.trial is None
    assert flat.diameter is not None
    assert flat.diameter.lengths[-1] == pytest.approx(14, rel=0.1)
    assert round_objects.trial is not None


def test_a_trial_does_not_select_a_scale_at_which_flat_objects_with_low_peaks_are_not_resolved(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit is poor at every scale, so the diameter is not used, and the confidence is high at the smallest scale."""

    def score_with_low_peaks(windows: Tensor) -> Tensor:
        return torch.cat([100 * (windows - 0.1), torch.logit((0.45 * windows).clamp(1e-3, 1 - 1e-3))], 1)

    monkeypatch.setattr(estimation, "predict_confidence", lambda objects, *_: 0.9 if objects.median_size < 150 else 0.1)
    found = estimate(balls((80, 80, 88), 16, 4), with_calibration(spec), score_with_low_peaks)
    assert (found.diameter, found.trial) == (None, None)
    assert found.likely_diameter is not None
    depth, width = found.likely_diameter.lengths[0], found.likely_diameter.lengths[-1]
    assert (depth, width) == (pytest.approx(4, rel=0.2), pytest.approx(14, rel=0.1))


@pytest.mark.parametrize(
    ("spacing", "aspect", "expected"),
    [(2, 2, 2), (4, 4, 4), (4, 2.5, 4), (2, 5, 5 * BLURRED_DEPTH_RATIO / MAX_ROUND_ASPECT)],
)
def test_the_plane_spacing_corrects_the_depth_of_blurred_objects(spec, spacing, aspect, expected) -> None:
    found = estimate(balls((80, 80, 88), 16, aspect), spec, voxel_size=VoxelSize(spacing, 1, 1))
    assert found.diameter is not None
    depth, width = found.diameter.lengths[0], found.diameter.lengths[-1]
    assert width / depth == pytest.approx(expected / BLURRED_DEPTH_RATIO, rel=0.2)


def test_sparse_objects_in_a_bright_sample_are_measured_rather_than_its_edge(spec: ModelSpec) -> None:
    """The step at the edge of the sample has a higher contrast than windows with objects."""
    pixels = np.zeros((40, 256, 256), np.float32)
    pixels[:, 100:] = 0.6
    pixels[:, 160:240, 16:240] += 0.4 * balls((40, 80, 224), 14, gap=2)

    def score_sample(windows: Tensor) -> Tensor:
        return score_brightness((windows - 0.6) / 0.4)

    found = estimate(pixels, spec, score_sample)
    assert found.diameter is not None
    assert found.diameter.lengths[-1] == pytest.approx(0.9 * 14, rel=0.1)


def test_an_estimate_means_the_same_in_a_request(spec: ModelSpec) -> None:
    """A single length would describe flat objects if the planes are far apart."""
    round_objects = balls((80, 80, 88), 14)
    assert str(estimate(round_objects, spec).diameter).count(",") == 0
    for spacing in (0.5, 1.0, 2.0):
        voxel_size = VoxelSize(spacing, 1, 1)
        found = estimate(round_objects, spec, voxel_size=voxel_size).diameter
        assert found is not None
        assert found.to_voxels(voxel_size) == found.to_voxels(None)


def test_one_probe_is_enough_for_objects_of_the_expected_diameter(spec: ModelSpec) -> None:
    found = estimate(balls((48, 72, 80), 11), spec)
    assert found.matches_model
    assert found.num_windows == 4
    assert "needs no resampling" in found.note


def score_without_peaks(windows: Tensor) -> Tensor:
    """Return the scores of `score_brightness`, with distances that are too low for a certain center."""
    return score_brightness(windows) - torch.tensor([0.0, 2.5])[:, None, None, None]


@pytest.mark.parametrize(
    ("pixels", "score_windows"),
    [
        *(
            (np.zeros((40, 40, 40)), score_brightness),
            (np.pad(balls((12, 12, 12), 10), 20), score_brightness),
            (np.ones((1, 9, 9)), score_brightness),
        ),
        # Objects everywhere, but without high peaks, are noise.
        (balls((48, 72, 80), 7), score_without_peaks),
    ],
    ids=["nothing", "one object", "no object", "no peaks"],
)
def test_there_is_no_estimate_from_too_few_objects(spec: ModelSpec, pixels: NDArray[Any], score_windows: Any) -> None:
    found = estimate(pixels.astype(np.float32), spec, score_windows)
    assert found.diameter is None
    assert not found.matches_model
    assert f"could not be estimated ({found.num_objects} object{'s' * (found.num_objects != 1)} in" in found.note


def test_few_windows_of_one_shape_are_scored(spec: ModelSpec) -> None:
    shapes = []

    def score_windows(windows: Tensor) -> Tensor:
        shapes.append(tuple(windows.shape))
        return score_brightness(windows)

    found = estimate(balls((40, 90, 150), 6), spec, score_windows)
    assert all(shape[1:] == (1, *ROI) for shape in shapes)
    assert sum(shape[0] for shape in shapes) == found.num_windows <= 22


def test_planes_of_windows_are_read_one_at_a_time(spec: ModelSpec) -> None:
    pixels = balls((400, 40, 48), 20)
    planes_read: list[tuple[int, int]] = []

    def read(z0: int, z1: int) -> NDArray[Any]:
        planes_read.append((z0, z1))
        return pixels[None, z0:z1]

    volume = Volume((1, *pixels.shape), pixels.dtype, read)
    found = DiameterEstimator(
        NormalizedImage(volume, [IntensityScaling(0, 1)]), (1, 1, 1), spec, score_brightness
    ).estimate()
    assert found.diameter is not None
    assert all(z1 - z0 == 1 for z0, z1 in planes_read)
    assert len({z0 for z0, _ in planes_read}) < 400


def test_the_expected_flatness_follows_the_voxel_size_within_limits() -> None:
    def flatness(*voxel_size: float, base: tuple[float, float, float] = (1, 1, 1)) -> float:
        size = VoxelSize(*voxel_size) if voxel_size else None
        return compute_expected_flatness(size, base)

    assert flatness() == 1
    assert flatness(1.2, 0.4, 0.4) == pytest.approx(3 / BLURRED_DEPTH_RATIO)
    assert flatness(1.2, 0.4, 0.4, base=(3, 1, 1)) == 1
    assert (flatness(100, 1, 1), flatness(0.1, 1, 1)) == (6 / BLURRED_DEPTH_RATIO, 1)


@pytest.mark.parametrize(
    ("depth", "width", "expected"),
    [
        # Objects two planes deep: their planes, but not their pixels, may be enlarged more than five times.
        (4, 22, (7.5, 0.91, 0.91)),
        (2, 22, (10, 0.91, 0.91)),
        (1, 2, (5, 5, 5)),
    ],
)
def test_planes_of_flat_objects_may_be_enlarged_more_than_pixels(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, depth: float, width: float, expected: Factors
) -> None:
    """At its original resolution, the stack shows objects of this depth and width."""
    spec = spec.model_copy(update={"input": spec.input.model_copy(update={"diameter": 20.0})})
    probed = list[Factors]()

    def probe(self: DiameterEstimator, _centers: object, factors: Factors, num_windows: int) -> ScaleProbe:
        probed.append(factors)
        extents = (depth * factors[0], width * factors[1], width * factors[2])
        return ScaleProbe(factors, extents, 9, 0.4 if len(probed) == 1 else 0.9, num_windows)

    monkeypatch.setattr(DiameterEstimator, "probe", probe)
    estimate(np.zeros((64, 64, 64), np.float32), spec)
    assert max(probed) == pytest.approx(expected, rel=0.01)


def test_flat_objects_that_every_window_cuts_off_along_z_keep_the_size_of_the_first_probe(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enlarged planes, the windows show only parts of objects, which are narrower than whole objects."""

    def probe(_self: object, _centers: object, factors: Factors, num_windows: int) -> ScaleProbe:
        if factors == (1.0, 1.0, 1.0):
            return ScaleProbe(factors, (3, 11, 11), 9, 0.4, num_windows)
        return ScaleProbe(factors, (8, 8, 8), 9, 0.9, num_windows, has_depth=False)

    monkeypatch.setattr(DiameterEstimator, "probe", probe)
    found = estimate(np.zeros((64, 64, 64), np.float32), spec)
    assert found.diameter is not None
    assert found.diameter.lengths == pytest.approx((3 / MAX_ROUND_ASPECT, 11, 11))


def with_calibration(spec: ModelSpec) -> ModelSpec:
    """Return the model with a confidence of 0.5 at the expected diameter, and less at other diameters."""
    calibration = Calibration(intercept=0, certainty=0, peak=0, size=-6, giants=0, threshold=0.4)
    return spec.model_copy(update={"confidence": calibration})


def test_a_trial_selects_the_diameter_with_the_highest_confidence(spec: ModelSpec) -> None:
    pixels = balls((48, 72, 80), 5)
    assert estimate(pixels, spec, score_without_peaks).diameter is None
    found = estimate(pixels, with_calibration(spec), score_without_peaks)
    assert found.diameter is not None
    assert found.trial is not None
    assert found.diameter.lengths[0] == pytest.approx(5, rel=0.25)
    assert found.trial.confidence > 0.3 > 0.1 > found.trial.previous_confidence
    assert f"{found.diameter} gave the best result." in found.note
    assert f"Of {found.trial.num_diameters} object diameters" in found.note
    assert "diameter=none" in found.note
    smallest = found._replace(trial=found.trial._replace(is_smallest_diameter=True)).note
    assert "Smaller diameters were not tried." in smallest
    assert ("Smaller" in found.note) == found.trial.is_smallest_diameter


def test_a_few_objects_larger_than_a_window_are_found_at_a_smaller_scale(spec: ModelSpec) -> None:
    found = estimate(np.pad(balls((70, 70, 70), 58), 45), with_calibration(spec), score_without_peaks)
    assert found.diameter is not None
    assert found.diameter.lengths[-1] == pytest.approx(50, rel=0.2)
    assert found.num_objects < 5
    # At a larger scale, so few objects are not enough, because noise contains some that look like objects.
    assert estimate(np.pad(balls((12, 12, 6), 5), 30), with_calibration(spec), score_without_peaks).diameter is None


@pytest.mark.parametrize("confidence", [0.1, 0.01])
def test_a_trial_selects_a_larger_scale_than_its_own_only_if_the_objects_do_not_look_like_noise(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, confidence: float
) -> None:
    """Low peaks make the fit poor. The confidence is best at a scale above those that a trial adds."""

    def score_with_low_peaks(windows: Tensor) -> Tensor:
        return score_brightness(windows) - torch.tensor([0.0, 1.0])[:, None, None, None]

    monkeypatch.setattr(
        estimation, "predict_confidence", lambda objects, *_: confidence if objects.median_size > 400 else 0.002
    )
    found = estimate(balls((40, 40, 40), 3, gap=1.6), with_calibration(spec), score_with_low_peaks)
    diameter = found.diameter.lengths[0] if found.diameter else None
    assert diameter == (pytest.approx(2.5, rel=0.05) if confidence == 0.1 else None)
    assert found.likely_diameter is not None


def test_the_estimate_is_not_refined_to_a_scale_that_fits_worse(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects found at the scale of the best probe suggest the scale of a worse one."""
    estimator = DiameterEstimator(make_image(np.zeros((80, 80, 80), np.float32)), (1, 1, 1), spec, score_brightness)
    fits = {1.0: 0.1, 2.0: 0.6, 3.0: 0.2}
    extents = {1.0: 3.3, 2.0: 6.7, 3.0: 10.0}

    def probe(_centers: Any, factors: Factors, num_windows: int) -> ScaleProbe:
        scale = min(fits, key=lambda scale: abs(scale - factors[0]))
        return ScaleProbe(factors, (extents[scale],) * 3, 9, fits[scale], num_windows)

    monkeypatch.setattr(estimator, "probe", probe)
    found = estimator.estimate()
    assert found.diameter is not None
    assert found.diameter.lengths[0] == 10 / 2.0


def test_no_trial_runs_if_the_initial_confidence_is_high(spec: ModelSpec) -> None:
    """The estimate is also deterministic."""
    noisy_balls = balls((40, 48, 48), 9) + np.random.default_rng(0).normal(0, 0.02, (40, 48, 48)).astype(np.float32)
    fitting_balls = balls((48, 72, 80), 11)
    for pixels, score_windows in (
        (fitting_balls, score_brightness),
        (fitting_balls, score_without_peaks),
        (balls((80,) * 3, 14), score_brightness),
    ):
        assert estimate(pixels, with_calibration(spec), score_windows) == estimate(pixels, spec, score_windows)
    assert estimate(noisy_balls, spec) == estimate(noisy_balls, spec)


def test_a_trial_without_a_clear_improvement_changes_nothing(spec: ModelSpec) -> None:
    pixels = balls((48, 72, 80), 5)
    estimator = DiameterEstimator(
        make_image(pixels), (1, 1, 1), with_calibration(spec), score_without_peaks, margin=50.0
    )
    assert estimator.estimate() == estimate(pixels, spec, score_without_peaks)
