"""What a request changes in a model's decoding."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import BadParameter
from service.core.quantities import ObjectVolume, VoxelSize
from service.core.types import OutputKind, Segmentation, Steering, Volume
from service.inference.decoding.steering import check_steering, minimum_voxels, steer
from service.inference.preprocessing.resample import resample_segmentation
from service.models.spec import Instances, ModelSpec

VOLUME = Volume.from_array(np.zeros((1, 20, 40, 40), np.uint8), VoxelSize(2, 0.5, 0.5))
UNSIZED = Volume.from_array(np.zeros((1, 20, 40, 40), np.uint8))


def decoding_of(spec: ModelSpec, steering: Steering, size: tuple[int, int, int] = (20, 40, 40)) -> Instances:
    decoding = steer(spec, steering, VOLUME, size).decoding
    assert isinstance(decoding, Instances)
    return decoding


def with_fraction(spec: ModelSpec, fraction: float) -> ModelSpec:
    decoding = spec.decoding.model_copy(update={"minimum_fraction": fraction, "minimum_size": 16})
    return spec.model_copy(update={"decoding": decoding})


def test_what_is_not_stated_stays_as_the_model_has_it(random_nuclei: ModelSpec, bands: ModelSpec) -> None:
    assert decoding_of(random_nuclei, Steering()) == random_nuclei.decoding
    assert steer(bands, Steering(), VOLUME, (20, 40, 40)) == bands
    steering = Steering(0.8, ObjectVolume(7, "px"), "drop", fill_holes=True, min_confidence=0.9)
    changes = {
        "threshold": 0.8,
        "minimum_size": 7,
        "minimum_fraction": 0.0,
        "border": "drop",
        "holes": "fill",
        "min_confidence": 0.9,
        "min_relative_odds": 0.0,
    }
    assert decoding_of(random_nuclei, steering) == random_nuclei.decoding.model_copy(update=changes)


def test_a_stated_confidence_is_the_only_one_that_holds(random_nuclei: ModelSpec) -> None:
    assert isinstance(random_nuclei.decoding, Instances)
    strict = random_nuclei.decoding.model_copy(update={"min_confidence": 0.8, "min_relative_odds": 0.5})
    spec = random_nuclei.model_copy(update={"decoding": strict})
    assert decoding_of(spec, Steering(threshold=0.3)).min_relative_odds == 0.5
    steered = decoding_of(spec, Steering(min_confidence=0.0))
    assert (steered.min_confidence, steered.min_relative_odds) == (0.0, 0.0)


@pytest.mark.parametrize(("size", "voxels"), [((20, 40, 40), 60), ((40, 80, 80), 60), ((10, 20, 40), 15)])
@pytest.mark.parametrize("stated", [ObjectVolume(60, "px"), ObjectVolume(30, "um3")], ids=str)
def test_a_stated_minimum_is_in_the_stack_whatever_that_is_resampled_to(random_nuclei, size, voxels, stated) -> None:
    steering = Steering(minimum_size=stated)
    assert minimum_voxels(steering, VOLUME) == 60
    decoding = decoding_of(with_fraction(random_nuclei, 0.5), steering, size)
    assert (decoding.minimum_size, decoding.minimum_fraction) == (voxels, 0)


def test_a_minimum_may_be_nothing_and_none_is_too_large_for_the_kernel(random_nuclei: ModelSpec) -> None:
    with pytest.raises(BadParameter, match=r"minimum_size: .*voxel_size=Z,Y,X"):
        minimum_voxels(Steering(minimum_size=ObjectVolume(12, "um3")), UNSIZED)
    for stated, voxels in ((ObjectVolume(0, "px"), 0), (ObjectVolume(1e18, "um3"), 20 * 40 * 40 + 1)):
        assert decoding_of(random_nuclei, Steering(minimum_size=stated), (80, 160, 160)).minimum_size == voxels


SIZES = st.tuples(*[st.integers(1, 9)] * 3)


@given(SIZES, SIZES, st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_the_grid_of_the_network_keeps_what_is_large_enough_in_the_stack(
    random_nuclei, grid, stack, least, seed
) -> None:
    inside = (np.random.default_rng(seed).random(grid) < 0.5).astype(np.uint16)
    volume = Volume.from_array(np.zeros((1, *stack), np.uint8))
    decoding = steer(random_nuclei, Steering(minimum_size=ObjectVolume(least, "px")), volume, grid).decoding
    assert isinstance(decoding, Instances)
    found = resample_segmentation(Segmentation(inside, "labels", None, 1), stack, least)
    if grid != stack and found.count:
        assert inside.sum() >= decoding.minimum_size


@given(st.integers(1, 30_000), st.tuples(*[st.sampled_from(["0.1", "0.15", "0.2", "0.3", "0.4", "1.1"])] * 3))
def test_micrometres_are_as_many_voxels_as_they_would_be_on_paper(voxels: int, edges: tuple[str, str, str]) -> None:
    amount = float(voxels * math.prod(map(Decimal, edges)))
    volume = Volume.from_array(VOLUME.array(), VoxelSize(*map(float, edges)))
    assert minimum_voxels(Steering(minimum_size=ObjectVolume(amount, "um3")), volume) == voxels


@pytest.mark.parametrize(
    ("output", "steering", "words"),
    [
        ("classes", Steering(border="drop"), "border: there are no objects in classes"),
        ("probabilities", Steering(threshold=0.4), "threshold: there are no objects in probabilities"),
        ("probabilities", Steering(fill_holes=False), "fill_holes: there are no objects"),
        ("classes", Steering(min_confidence=0.0), "min_confidence: there are no objects"),
    ],
)
def test_steering_that_changes_nothing_is_refused(random_nuclei, bands, output: OutputKind, steering, words) -> None:
    with pytest.raises(BadParameter, match=words):
        check_steering(random_nuclei, output, steering)
    with pytest.raises(BadParameter, match=r"bands gives each voxel the class"):
        check_steering(bands, "classes", steering)
    check_steering(random_nuclei, "labels", steering)
    check_steering(random_nuclei, "classes", Steering(threshold=0.4))
