"""The width of objects, estimated with a network that sees every object at any scale."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import VoxelSize
from service.core.types import Volume
from service.inference.diameter.estimation import DEEPER, ROUND, DiameterEstimator, expect_flatness
from service.inference.diameter.places import signals
from service.inference.preprocessing.normalize import IntensityScaling, NormalisedImage
from service.inference.types import Sizing
from service.models.spec import Calibration, Instances, ModelSpec

ROI = (32, 32, 32)


@pytest.fixture
def spec(random_nuclei: ModelSpec) -> ModelSpec:
    """Wants objects of 10 voxels in windows of 32; outputs are probabilities as logits."""
    given = random_nuclei.input.model_copy(update={"diameter": 10.0, "roi_size": ROI})
    decoding = Instances(kind="instances", persistence=0.2, minimum_size=8)
    return random_nuclei.model_copy(update={"input": given, "activation": "sigmoid", "decoding": decoding})


def cones(shape: tuple[int, int, int], width: float, flatness: float = 1.0, apart: float = 1.2) -> NDArray[np.float32]:
    """Balls on a lattice, 1 in their middle and 0 at their outline, along z flatter by a factor. [Z, Y, X]."""
    z, y, x = np.indices(shape).astype(np.float32)
    steps = [apart * width / flatness, apart * width, apart * width]
    squares = []
    for axis, step, radius in zip((z, y, x), steps, (width / flatness / 2, width / 2, width / 2), strict=True):
        squares.append((((axis + step / 4) % step - step / 2) / radius) ** 2)
    return np.clip(1 - np.sqrt(np.sum(squares, axis=0)), 0, 1).astype(np.float32)


def see(windows: Tensor) -> Tensor:
    """Foreground wherever there is light, and light as the distance."""
    return torch.cat([100 * (windows - 0.1), torch.logit(windows.clamp(1e-3, 1 - 1e-3))], 1)


def image_of(pixels: NDArray[Any]) -> NormalisedImage:
    return NormalisedImage(Volume.from_array(pixels[None]), [IntensityScaling(0, 1)])


def sized(pixels: NDArray[Any], spec: ModelSpec, look: Any = see, voxel_size: VoxelSize | None = None) -> Sizing:
    return DiameterEstimator(image_of(pixels), (1, 1, 1), spec, look, voxel_size).estimate()


@pytest.mark.parametrize(("width", "flatness"), [(5, 1), (7, 1), (14, 1), (20, 1), (12, 2.5), (16, 4)])
def test_objects_are_as_wide_as_they_are(spec: ModelSpec, width: float, flatness: float) -> None:
    found = sized(cones((80, 80, 88), width, flatness), spec)
    assert found.diameter is not None
    deep, wide = found.diameter.lengths[0], found.diameter.lengths[-1]
    # Seen is what is brighter than a tenth of the middle, in whole voxels.
    assert (deep * wide * wide) ** (1 / 3) == pytest.approx(width / flatness ** (1 / 3), rel=0.2)
    assert wide / deep == pytest.approx(max(flatness / ROUND, 1), rel=0.25)
    assert not found.fits
    assert found.objects >= 5
    assert str(found.diameter) in found.note
    assert "diameter=none" in found.note


@pytest.mark.parametrize(
    ("spacing", "flatness", "expected"), [(2, 2, 2), (4, 4, 4), (4, 2.5, 4), (2, 5, 5 * DEEPER / ROUND)]
)
def test_planes_tell_how_deep_objects_are_that_light_blurs(spec, spacing, flatness, expected) -> None:
    found = sized(cones((80, 80, 88), 16, flatness), spec, voxel_size=VoxelSize(spacing, 1, 1))
    assert found.diameter is not None
    deep, wide = found.diameter.lengths[0], found.diameter.lengths[-1]
    assert wide / deep == pytest.approx(expected / DEEPER, rel=0.2)


def test_an_estimate_means_the_same_where_it_is_stated(spec: ModelSpec) -> None:
    """One length alone would make objects flat where planes are apart."""
    round_ones = cones((80, 80, 88), 14)
    assert str(sized(round_ones, spec).diameter).count(",") == 0
    for spacing in (0.5, 1.0, 2.0):
        voxel_size = VoxelSize(spacing, 1, 1)
        found = sized(round_ones, spec, voxel_size=voxel_size).diameter
        assert found is not None
        assert found.in_voxels(voxel_size) == found.in_voxels(None)


def test_a_first_look_is_enough_for_objects_of_the_right_width(spec: ModelSpec) -> None:
    found = sized(cones((48, 72, 80), 11), spec)
    assert found.fits
    assert found.windows == 4
    assert "suits the model" in found.note


def unsure(windows: Tensor) -> Tensor:
    """Return the scores of `see` with distances so low that no object has a certain middle."""
    return see(windows) - torch.tensor([0.0, 2.5])[:, None, None, None]


@pytest.mark.parametrize(
    ("pixels", "look"),
    [
        *((np.zeros((40, 40, 40)), see), (np.pad(cones((12, 12, 12), 10), 20), see), (np.ones((1, 9, 9)), see)),
        # What is found everywhere, but never with a certain middle, is noise.
        (cones((48, 72, 80), 7), unsure),
    ],
    ids=["nothing", "one object", "no object", "no peaks"],
)
def test_where_hardly_anything_is_found_nothing_is_claimed(spec: ModelSpec, pixels: NDArray[Any], look: Any) -> None:
    found = sized(pixels.astype(np.float32), spec, look)
    assert found.diameter is None
    assert not found.fits
    assert "could not be told" in found.note


def test_windows_have_the_one_shape_and_are_few(spec: ModelSpec) -> None:
    shapes = []

    def look(windows: Tensor) -> Tensor:
        shapes.append(tuple(windows.shape))
        return see(windows)

    found = sized(cones((40, 90, 150), 6), spec, look)
    assert all(shape[1:] == (1, *ROI) for shape in shapes)
    assert sum(shape[0] for shape in shapes) == found.windows <= 22


def test_only_planes_of_windows_are_read_one_at_a_time(spec: ModelSpec) -> None:
    pixels = cones((400, 40, 48), 20)
    reads: list[tuple[int, int]] = []

    def read(z0: int, z1: int) -> NDArray[Any]:
        reads.append((z0, z1))
        return pixels[None, z0:z1]

    volume = Volume((1, *pixels.shape), pixels.dtype, read)
    found = DiameterEstimator(NormalisedImage(volume, [IntensityScaling(0, 1)]), (1, 1, 1), spec, see).estimate()
    assert found.diameter is not None
    assert all(z1 - z0 == 1 for z0, z1 in reads)
    assert len({z0 for z0, _ in reads}) < 400


def test_windows_go_where_the_signal_is() -> None:
    pixels = np.zeros((32, 96, 128), np.float32)
    pixels[10:20, 60:70, 100:110] = 1
    z, y, x = signals(image_of(pixels), ROI)[0]
    assert 0 <= z - 10 < 10
    assert abs(y - 65) <= 16
    assert abs(x - 105) <= 16


def test_objects_are_as_flat_as_the_voxel_size_says_within_reason() -> None:
    def of(*voxel_size: float, base: tuple[float, float, float] = (1, 1, 1)) -> float:
        size = VoxelSize(*voxel_size) if voxel_size else None
        return expect_flatness(size, base)

    assert of() == 1
    assert of(1.2, 0.4, 0.4) == pytest.approx(3 / DEEPER)
    assert of(1.2, 0.4, 0.4, base=(3, 1, 1)) == 1
    assert (of(100, 1, 1), of(0.1, 1, 1)) == (6 / DEEPER, 1)


def by_width(spec: ModelSpec) -> ModelSpec:
    """Let the confidence be one half at the width that the model wants, less the further objects are from that."""
    calibration = Calibration(intercept=0, certainty=0, peak=0, size=-6, giants=0, threshold=0.4)
    return spec.model_copy(update={"confidence": calibration})


def test_where_the_model_doubts_what_it_sees_the_width_is_taken_that_it_doubts_least(spec: ModelSpec) -> None:
    pixels = cones((48, 72, 80), 5)
    assert sized(pixels, spec, unsure).diameter is None
    found = sized(pixels, by_width(spec), unsure)
    assert found.diameter is not None
    assert found.trial is not None
    assert found.diameter.lengths[0] == pytest.approx(5, rel=0.25)
    assert found.trial.confidence > 0.3 > 0.1 > found.trial.before
    assert f"{found.diameter} wide, chosen by a trial of {found.trial.widths} widths" in found.note
    assert f"confidence {found.trial.confidence:.2g} against {found.trial.before:.2g}" in found.note
    low = found._replace(trial=found.trial._replace(confidence=0.0141, before=0.0042)).note
    assert "confidence 0.014 against 0.0042;" in low
    assert "diameter=none" in found.note
    narrowest = found._replace(trial=found.trial._replace(narrowest=True)).note
    assert "where that is wrong (none narrower was tried), or" in narrowest
    assert ("narrower" in found.note) == found.trial.narrowest


def test_a_few_objects_larger_than_a_window_are_seen_where_it_shows_more(spec: ModelSpec) -> None:
    found = sized(np.pad(cones((70, 70, 70), 58), 45), by_width(spec), unsure)
    assert found.diameter is not None
    assert found.diameter.lengths[-1] == pytest.approx(50, rel=0.2)
    assert found.objects < 5
    # Enlarged, as few would tell nothing: grain has some that look like them.
    assert sized(np.pad(cones((12, 12, 6), 5), 30), by_width(spec), unsure).diameter is None


def test_a_trial_costs_nothing_where_the_first_confidence_is_good(spec: ModelSpec) -> None:
    """And the same image gives the same width again."""
    noisy = cones((40, 48, 48), 9) + np.random.default_rng(0).normal(0, 0.02, (40, 48, 48)).astype(np.float32)
    fitting = cones((48, 72, 80), 11)
    for pixels, look in ((fitting, see), (fitting, unsure), (cones((80,) * 3, 14), see)):
        assert sized(pixels, by_width(spec), look) == sized(pixels, spec, look)
    assert sized(noisy, spec) == sized(noisy, spec)


def test_a_trial_that_is_hardly_better_changes_nothing(spec: ModelSpec) -> None:
    pixels = cones((48, 72, 80), 5)
    picky = DiameterEstimator(image_of(pixels), (1, 1, 1), by_width(spec), unsure, margin=50.0)
    assert picky.estimate() == sized(pixels, spec, unsure)
