from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import label, maximum_filter, minimum_filter

from scripts.recipes.synthetic_tissue import Tissue, synthesize_tissue, synthesize_varied

SHAPE = (24, 40, 44)


def tissue(**changes: Any) -> Tissue:
    """Return a simple tissue that fills the stack: similar cells 16 voxels wide with thin bright membranes."""
    plain = Tissue(
        diameter=16,
        flatness=1,
        min_spacing=0.8,
        bend=0,
        body_size=2,
        holes=0,
        thickness=0.7,
        unevenness=0,
        gaps=0,
        rim=1,
        cytoplasm=0,
        grain=0,
        nucleus=0,
        coat=0,
        specks=0,
        blur=0.4,
        elongation=1,
        haze=0,
        floor=0.05,
        shading=0,
        attenuation=0,
        photons=400,
        read_noise=0.2,
        bits=16,
        saturation=0,
        zeroed_background=0,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("seed", range(6))
def test_random_tissues_give_images_and_labels(seed: int) -> None:
    image, labels = synthesize_tissue(np.random.default_rng(seed), SHAPE)
    assert image.shape == labels.shape == SHAPE
    assert image.dtype in (np.uint8, np.uint16)
    assert labels.dtype == np.uint16
    assert len(np.unique(labels)) > 1
    assert image.std() > 0


def test_the_same_seed_gives_the_same_stack() -> None:
    first, second, other = (synthesize_tissue(np.random.default_rng(seed), SHAPE) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_light_is_where_cells_meet() -> None:
    image, labels = synthesize_tissue(np.random.default_rng(0), SHAPE, tissue())
    at_faces = minimum_filter(labels, 3) != labels
    deep = (minimum_filter(labels, 7) == labels) & (minimum_filter(-labels.astype(int), 7) == -labels.astype(int))
    assert labels.all()
    assert deep.any()
    assert np.median(image[at_faces]) > 4 * np.median(image[deep])


def test_body_is_surrounded_by_background_and_has_the_requested_surface_brightness() -> None:
    bright, dim = (
        synthesize_tissue(np.random.default_rng(3), SHAPE, tissue(body_size=0.7, rim=rim, floor=0.01))
        for rim in (1.0, 0.1)
    )
    assert np.array_equal(bright[1], dim[1])
    outside = bright[1] == 0
    assert 0.2 < outside.mean() < 0.95
    surface = (minimum_filter(bright[1], 3) == 0) & ~outside
    assert dim[0][surface].mean() < 0.5 * bright[0][surface].mean()


@pytest.mark.parametrize("flatness", [1, 2])
def test_cells_have_the_diameter_and_flatness_of_the_tissue(flatness: float) -> None:
    _, labels = synthesize_tissue(np.random.default_rng(1), (48, 72, 72), tissue(flatness=flatness))
    border = set(np.concatenate([labels[[0, -1]].ravel(), labels[:, [0, -1]].ravel(), labels[..., [0, -1]].ravel()]))
    volumes = [np.count_nonzero(labels == n) for n in set(np.unique(labels)) - border]
    assert len(volumes) >= 5
    assert np.mean(volumes) == pytest.approx(np.pi / 6 * 16**3 / flatness, rel=0.35)


@pytest.mark.parametrize(
    "extra", [{"gaps": 0.3}, {"unevenness": 0.5}, {"cytoplasm": 0.5}, {"cytoplasm": 0.4, "grain": 0.8}, {"specks": 5}]
)
def test_stain_changes_the_image_but_not_the_labels(extra: dict[str, float]) -> None:
    (plain, labels), (image, same) = (
        synthesize_tissue(np.random.default_rng(2), SHAPE, stained) for stained in (tissue(), tissue(**extra))
    )
    assert np.array_equal(labels, same)
    assert not np.array_equal(plain, image)


def test_cells_at_the_surface_are_not_slivers() -> None:
    _, labels = synthesize_tissue(np.random.default_rng(5), (48, 64, 64), tissue(body_size=0.9))
    border = set(np.concatenate([labels[[0, -1]].ravel(), labels[:, [0, -1]].ravel(), labels[..., [0, -1]].ravel()]))
    volumes = [np.count_nonzero(labels == n) for n in set(np.unique(labels)) - border]
    assert len(volumes) > 10
    assert np.mean(np.asarray(volumes) < 0.2 * np.pi / 6 * 16**3) < 0.1


def test_nuclei_are_darker_than_the_cytoplasm() -> None:
    filled, hollow = (
        synthesize_tissue(np.random.default_rng(2), SHAPE, tissue(cytoplasm=0.5, nucleus=nucleus))
        for nucleus in (0, 0.2)
    )
    assert np.array_equal(filled[1], hollow[1])
    deep = minimum_filter(filled[1], 9) == maximum_filter(filled[1], 9)
    assert deep.any()
    assert np.median(hollow[0][deep]) < 0.6 * np.median(filled[0][deep])


def test_coat_is_bright_but_labeled_as_background() -> None:
    bare, coated = (
        synthesize_tissue(np.random.default_rng(3), SHAPE, tissue(body_size=0.7, rim=0.1, coat=coat))
        for coat in (0, 2.0)
    )
    assert np.array_equal(bare[1], coated[1])
    outside = bare[1] == 0
    shares = [np.mean(image[outside] > 0.5 * image.max()) for image, _ in (bare, coated)]
    assert shares[1] > 0.02 > 2 * shares[0]


def test_background_subtraction_sets_most_of_the_background_to_zero() -> None:
    image, labels = synthesize_tissue(
        np.random.default_rng(3), SHAPE, tissue(body_size=0.7, cytoplasm=0.3, zeroed_background=0.9)
    )
    assert np.mean(image[labels == 0] == 0) == pytest.approx(0.9, abs=0.02)
    assert np.mean(image[labels > 0] == 0) < 0.9
    full, _ = synthesize_tissue(np.random.default_rng(3), SHAPE, tissue(zeroed_background=0.9))
    assert full.any()


def test_cavities_are_labeled_as_background() -> None:
    _, labels = synthesize_tissue(np.random.default_rng(4), SHAPE, tissue(holes=0.3))
    assert 0.1 < (labels == 0).mean() < 0.6


def test_patchiness_increases_the_differences_in_brightness_between_cells() -> None:
    variations = []
    for patchiness in (0.0, 0.8):
        image, labels = synthesize_tissue(np.random.default_rng(3), SHAPE, tissue(patchiness=patchiness))
        means = [image[labels == n].mean() for n in np.unique(labels)[1:]]
        variations.append(np.std(means) / np.mean(means))
    assert variations[1] > 1.5 * variations[0]


def test_size_variation_increases_the_differences_in_volume_between_cells() -> None:
    variations = []
    for size_variation in (0.0, 0.6):
        _, labels = synthesize_tissue(np.random.default_rng(1), (48, 64, 64), tissue(size_variation=size_variation))
        faces = np.concatenate([labels[[0, -1]].ravel(), labels[:, [0, -1]].ravel(), labels[..., [0, -1]].ravel()])
        volumes = [np.count_nonzero(labels == n) for n in np.setdiff1d(labels, faces)]
        variations.append(np.std(volumes) / np.mean(volumes))
    assert variations[1] > 1.5 * variations[0]


@pytest.mark.parametrize("seed", range(3))
def test_embryo_does_not_fill_the_corners_of_the_stack(seed: int) -> None:
    _, labels = synthesize_tissue(np.random.default_rng(seed), SHAPE, tissue(body_size=0.8, is_ellipsoid=True))
    corners = labels[:: SHAPE[0] - 1, :: SHAPE[1] - 1, :: SHAPE[2] - 1]
    assert not corners.any()
    assert labels.any()
    assert Tissue.draw_embryo(np.random.default_rng(seed)).is_ellipsoid


@pytest.mark.parametrize("seed", range(4))
def test_varied_tissues_and_walls_are_valid(seed: int) -> None:
    image, labels = synthesize_varied(np.random.default_rng(seed), SHAPE)
    assert image.shape == labels.shape == SHAPE
    assert Tissue.draw_walls(np.random.default_rng(seed)).patchiness > 0


def test_cells_of_a_cyst_extend_from_the_cavity_to_the_outside() -> None:
    image, labels = synthesize_tissue(
        np.random.default_rng(4), (48, 96, 96), tissue(body_size=0.8, lumen=0.4, diameter=12)
    )
    regions, count = label(labels == 0)
    assert count == 2
    border = np.pad(np.zeros(np.array(labels.shape) - 2, bool), 1, constant_values=True)
    cells = set(np.unique(labels)) - {0, *np.unique(labels[border])}
    touched = [set(np.unique(labels[maximum_filter(regions == number, 3)])) for number in (1, 2)]
    assert len(cells) > 10
    assert cells <= touched[0] & touched[1]
    assert image[labels > 0].mean() > 2 * image[labels == 0].mean()


def test_separated_cells_are_smaller_and_have_background_between_them() -> None:
    (_, touching), (image, separated) = (
        synthesize_tissue(np.random.default_rng(3), (32, 64, 64), tissue(separation=width)) for width in (0.0, 0.4)
    )
    assert touching.all()
    assert 0.1 < np.mean(separated == 0) < 0.8
    assert np.array_equal(separated[separated > 0], touching[separated > 0])
    edge = (minimum_filter(separated, 3) == 0) & (separated > 0)
    assert image[edge].mean() > 2 * image[maximum_filter(separated, 5) == 0].mean()
