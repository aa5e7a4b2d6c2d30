from __future__ import annotations

import numpy as np
import pytest

from scripts.recipes.sources import (
    UNKNOWN_LABEL,
    AugmentedStacks,
    FlatStacks,
    PercentileNormalization,
    clear_unknown,
    enlarge_spots,
    mix_sources,
    resample_flat,
    resample_to_diameter,
)
from service.training.examples import Pair, StackSource, compute_median_extents


def test_percentiles_are_mapped_to_0_and_1() -> None:
    image = np.arange(1001, dtype=np.uint16).reshape(7, 11, 13)
    scaled = PercentileNormalization(10, 90)(image)
    assert scaled.dtype == np.float32
    assert (scaled.ravel()[100], scaled.ravel()[900]) == pytest.approx((0, 1))
    assert not PercentileNormalization()(np.full((2, 3, 4), 7)).any()


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 1)])
def test_mix_draws_from_the_second_source_with_the_given_probability(share: float, expected: int) -> None:
    def constant(value: int) -> StackSource:
        return lambda _rng: (np.full((1, 1, 1), value), np.full((1, 1, 1), value))

    image, _ = mix_sources(constant(0), constant(1), share)(np.random.default_rng(0))
    assert image.item() == expected


def box(widths: tuple[int, int, int], shape: tuple[int, int, int] = (60, 60, 60)) -> Pair:
    """Return an image and labels with eight boxes of these widths that do not touch the border."""
    labels = np.zeros(shape, np.uint16)
    for number in range(8):
        low = [2 + (number >> axis & 1) * (length // 2) for axis, length in enumerate(shape)]
        labels[tuple(slice(start, start + width) for start, width in zip(low, widths, strict=True))] = number + 1
    return (100 * (labels > 0)).astype(np.uint16), labels


def test_objects_are_resampled_to_the_diameter_of_the_model() -> None:
    widths = []
    for seed in range(6):
        image, labels = resample_to_diameter(lambda _: box((5, 9, 13)), 20, 1.0)(np.random.default_rng(seed))
        assert image.shape == labels.shape
        assert np.corrcoef(image.ravel(), labels.ravel() > 0)[0, 1] > 0.8
        widths.append(compute_median_extents(labels))
    per_axis, isotropic = (
        np.array([w for w in widths if (w.max() / w.min() < 1.5) == is_cubic]) for is_cubic in (True, False)
    )
    assert per_axis == pytest.approx(20, rel=0.2)
    assert np.cbrt(isotropic.prod(axis=1)) == pytest.approx(20, rel=0.2)
    assert len(per_axis) > 0 < len(isotropic)


def test_unselected_volumes_and_volumes_of_large_objects_are_unchanged() -> None:
    for widths, share in (((5, 9, 13), 0.0), ((28, 28, 28), 1.0)):
        pair = box(widths)
        image, labels = resample_to_diameter(lambda _, pair=pair: pair, 14, share)(np.random.default_rng(0))
        assert image is pair[0]
        assert labels is pair[1]


def test_most_stacks_of_spots_keep_their_resolution() -> None:
    pair = box((4, 5, 5))
    draw = resample_to_diameter(lambda _: pair, 20, 1.0)
    is_unchanged = [draw(np.random.default_rng(seed))[0] is pair[0] for seed in range(20)]
    assert 10 <= sum(is_unchanged) < 20


def test_recorded_stacks_are_rotated_together_with_their_labels() -> None:
    pair = box((8, 20, 12), (40, 60, 60))
    shapes = set()
    for seed in range(6):
        image, labels = AugmentedStacks([pair])(np.random.default_rng(seed))
        assert image.shape == labels.shape
        assert np.corrcoef(image.ravel(), labels.ravel() > 0)[0, 1] > 0.8
        shapes.add(image.shape[1] < 0.85 * image.shape[0] * 60 / 40)
    assert shapes == {True, False}


def test_flat_nuclei_become_round_enough_for_the_network() -> None:
    extents = np.array(
        [
            compute_median_extents(resample_flat(lambda _: box((2, 12, 12)), 20)(np.random.default_rng(seed))[1])
            for seed in range(8)
        ]
    )
    assert extents[:, 1:] == pytest.approx(20, rel=0.4)
    assert 9 < extents[:, 0].min() < extents[:, 0].max() < 25


def test_most_spots_are_enlarged() -> None:
    extents = [
        compute_median_extents(enlarge_spots(lambda _: box((4, 4, 4)), 20)(np.random.default_rng(seed))[1])
        for seed in range(20)
    ]
    assert 5 < sum(size[0] > 8 for size in extents if size is not None) < 20


def test_recorded_organoids_are_normalized_by_their_stack_and_keep_unknown_voxels() -> None:
    image, labels = box((3, 12, 12))
    labels[:, 55:] = UNKNOWN_LABEL
    source = FlatStacks([(image, labels)], 20)
    draws = [source(np.random.default_rng(seed)) for seed in range(12)]
    assert all(pixels.shape == numbers.shape for pixels, numbers in draws)
    assert any((numbers == UNKNOWN_LABEL).any() for _, numbers in draws)
    for pixels, numbers in draws:
        known = clear_unknown(numbers)
        assert not (known == UNKNOWN_LABEL).any()
        assert np.corrcoef(pixels.ravel(), known.ravel() > 0)[0, 1] > 0.7
        assert 0 <= pixels.min() < pixels.max() == pytest.approx(1, abs=0.01)
