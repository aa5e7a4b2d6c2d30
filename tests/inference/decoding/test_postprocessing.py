"""Post-processing options of a request, applied to a model's decoding."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import BadParameter
from service.core.quantities import ObjectVolume, VoxelSize
from service.core.types import OutputKind, PostprocessingOptions, Segmentation, Volume
from service.inference.decoding.postprocessing import apply_postprocessing, check_postprocessing, compute_min_voxels
from service.inference.preprocessing.resample import resample_segmentation
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries, Instances

VOLUME = Volume.from_array(np.zeros((1, 20, 40, 40), np.uint8), VoxelSize(2, 0.5, 0.5))
VOLUME_WITHOUT_VOXEL_SIZE = Volume.from_array(np.zeros((1, 20, 40, 40), np.uint8))


def decoding_of(
    spec: ModelSpec, postprocessing: PostprocessingOptions, size: tuple[int, int, int] = (20, 40, 40)
) -> Instances:
    decoding = apply_postprocessing(spec, postprocessing, VOLUME, size).decoding
    assert isinstance(decoding, Instances)
    return decoding


def with_fraction(spec: ModelSpec, fraction: float) -> ModelSpec:
    decoding = spec.decoding.model_copy(update={"minimum_fraction": fraction, "minimum_size": 16})
    return spec.model_copy(update={"decoding": decoding})


def test_options_replace_only_their_part_of_the_decoding(random_nuclei: ModelSpec, bands: ModelSpec) -> None:
    assert decoding_of(random_nuclei, PostprocessingOptions()) == random_nuclei.decoding
    assert apply_postprocessing(bands, PostprocessingOptions(), VOLUME, (20, 40, 40)) == bands
    postprocessing = PostprocessingOptions(0.8, ObjectVolume(7, "px"), "drop", fill_holes=True, min_confidence=0.9)
    changes = {
        "threshold": 0.8,
        "minimum_size": 7,
        "minimum_fraction": 0.0,
        "border": "drop",
        "holes": "fill",
        "min_confidence": 0.9,
        "min_relative_odds": 0.0,
    }
    assert decoding_of(random_nuclei, postprocessing) == random_nuclei.decoding.model_copy(update=changes)


def test_a_minimum_confidence_replaces_the_criteria_of_the_model(random_nuclei: ModelSpec) -> None:
    assert isinstance(random_nuclei.decoding, Instances)
    strict_decoding = random_nuclei.decoding.model_copy(update={"min_confidence": 0.8, "min_relative_odds": 0.5})
    spec = random_nuclei.model_copy(update={"decoding": strict_decoding})
    assert decoding_of(spec, PostprocessingOptions(threshold=0.3)).min_relative_odds == 0.5
    decoding = decoding_of(spec, PostprocessingOptions(min_confidence=0.0))
    assert (decoding.min_confidence, decoding.min_relative_odds) == (0.0, 0.0)


@pytest.mark.parametrize(("size", "voxels"), [((20, 40, 40), 60), ((40, 80, 80), 60), ((10, 20, 40), 15)])
@pytest.mark.parametrize("minimum", [ObjectVolume(60, "px"), ObjectVolume(30, "um3")], ids=str)
def test_the_minimum_size_is_converted_to_the_resampled_grid(random_nuclei, size, voxels, minimum) -> None:
    postprocessing = PostprocessingOptions(minimum_size=minimum)
    assert compute_min_voxels(postprocessing, VOLUME) == 60
    decoding = decoding_of(with_fraction(random_nuclei, 0.5), postprocessing, size)
    assert (decoding.minimum_size, decoding.minimum_fraction) == (voxels, 0)


def test_a_minimum_size_may_be_zero_or_exceed_the_volume(random_nuclei: ModelSpec) -> None:
    with pytest.raises(BadParameter, match=r"minimum_size: .*voxel_size=Z,Y,X"):
        compute_min_voxels(PostprocessingOptions(minimum_size=ObjectVolume(12, "um3")), VOLUME_WITHOUT_VOXEL_SIZE)
    for minimum, voxels in ((ObjectVolume(0, "px"), 0), (ObjectVolume(1e18, "um3"), 20 * 40 * 40 + 1)):
        assert (
            decoding_of(random_nuclei, PostprocessingOptions(minimum_size=minimum), (80, 160, 160)).minimum_size
            == voxels
        )


SIZES = st.tuples(*[st.integers(1, 9)] * 3)


@given(SIZES, SIZES, st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_objects_that_are_large_enough_in_the_stack_are_kept_on_the_grid(
    random_nuclei, grid, stack, minimum_size, seed
) -> None:
    mask = (np.random.default_rng(seed).random(grid) < 0.5).astype(np.uint16)
    volume = Volume.from_array(np.zeros((1, *stack), np.uint8))
    decoding = apply_postprocessing(
        random_nuclei, PostprocessingOptions(minimum_size=ObjectVolume(minimum_size, "px")), volume, grid
    ).decoding
    assert isinstance(decoding, Instances)
    result = resample_segmentation(Segmentation(mask, "labels", None, 1), stack, minimum_size)
    if grid != stack and result.count:
        assert mask.sum() >= decoding.minimum_size


@given(st.integers(1, 30_000), st.tuples(*[st.sampled_from(["0.1", "0.15", "0.2", "0.3", "0.4", "1.1"])] * 3))
def test_cubic_micrometers_are_converted_to_voxels_without_rounding_errors(
    voxels: int, edges: tuple[str, str, str]
) -> None:
    amount = float(voxels * math.prod(map(Decimal, edges)))
    volume = Volume.from_array(VOLUME.read_all(), VoxelSize(*map(float, edges)))
    assert compute_min_voxels(PostprocessingOptions(minimum_size=ObjectVolume(amount, "um3")), volume) == voxels


@pytest.mark.parametrize(
    ("output", "postprocessing", "message"),
    [
        ("classes", PostprocessingOptions(border="drop"), "border: this option has no effect on output=classes"),
        (
            "probabilities",
            PostprocessingOptions(threshold=0.4),
            "threshold: this option has no effect on output=probabilities",
        ),
        ("probabilities", PostprocessingOptions(fill_holes=False), "fill_holes: this option has no effect"),
        ("classes", PostprocessingOptions(min_confidence=0.0), "min_confidence: this option has no effect"),
    ],
)
def test_options_without_effect_are_rejected(random_nuclei, bands, output: OutputKind, postprocessing, message) -> None:
    with pytest.raises(BadParameter, match=message):
        check_postprocessing(random_nuclei, output, postprocessing)
    with pytest.raises(BadParameter, match=r"bands assigns a class to each voxel"):
        check_postprocessing(bands, "classes", postprocessing)
    check_postprocessing(random_nuclei, "labels", postprocessing)
    check_postprocessing(random_nuclei, "classes", PostprocessingOptions(threshold=0.4))


def test_models_of_boundaries_support_the_minimum_size_and_border_only(random_nuclei: ModelSpec) -> None:
    decoding = Boundaries(kind="boundaries", boundary="foreground")
    spec = random_nuclei.model_copy(update={"decoding": decoding})
    for postprocessing in (PostprocessingOptions(threshold=0.4), PostprocessingOptions(fill_holes=True)):
        with pytest.raises(BadParameter, match="predicts boundaries, and supports only minimum_size and border"):
            check_postprocessing(spec, "labels", postprocessing)
    postprocessing = PostprocessingOptions(minimum_size=ObjectVolume(60, "px"), border="drop")
    check_postprocessing(spec, "labels", postprocessing)
    changed = apply_postprocessing(spec, postprocessing, VOLUME, (10, 20, 40)).decoding
    assert changed == decoding.model_copy(update={"minimum_size": 15, "border": "drop"})
