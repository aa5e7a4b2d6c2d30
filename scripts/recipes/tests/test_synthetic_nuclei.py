from __future__ import annotations

from dataclasses import replace

import edt
import numpy as np
import pytest

from scripts.recipes.synthetic_nuclei import Scene, synthesize, synthesize_varied

SHAPE = (20, 40, 44)


def scene(**changes: float) -> Scene:
    """Return a simple scene of sharp, bright, round nuclei 14 voxels wide without stray light."""
    plain = Scene(
        diameter=14,
        anisotropy=1,
        fill=0.15,
        clustering=0.2,
        contact=1,
        spread=0.1,
        texture=0,
        margin=1,
        blur=0.4,
        elongation=1,
        haze=0,
        floor=0.05,
        glow=0,
        ghosts=0,
        shading=0,
        attenuation=0,
        photons=400,
        read_noise=0.2,
        bits=16,
        saturation=0,
        debris=0,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("seed", range(6))
def test_random_scenes_give_images_and_labels(seed: int) -> None:
    image, labels = synthesize(np.random.default_rng(seed), SHAPE)
    assert image.shape == labels.shape == SHAPE
    assert image.dtype in (np.uint8, np.uint16)
    assert labels.dtype == np.uint16
    assert 0 < np.count_nonzero(labels) < labels.size
    assert image.std() > 0


def test_same_seed_gives_the_same_stack() -> None:
    first, second, other = (synthesize(np.random.default_rng(seed), SHAPE) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_nuclei_are_brighter_than_the_background() -> None:
    image, labels = synthesize(np.random.default_rng(0), SHAPE, scene())
    assert np.median(image[labels > 0]) > 4 * np.median(image[labels == 0])


def test_nuclei_have_the_diameter_and_anisotropy_of_the_scene() -> None:
    wide = (40, 90, 90)
    _, labels = synthesize(np.random.default_rng(1), wide, scene(fill=0.3, anisotropy=2, diameter=20))
    inner = [n for n in np.unique(labels)[1:] if not _touches_border(labels == n)]
    volumes = [np.count_nonzero(labels == n) for n in inner]
    assert len(volumes) >= 5
    assert np.median(volumes) == pytest.approx(np.pi / 6 * 20**3 / 2, rel=0.35)


@pytest.mark.parametrize("extra", [{"ghosts": 8}, {"glow": 0.4}, {"debris": 8}, {"haze": 0.4}])
def test_stray_light_changes_the_image_but_not_the_labels(extra: dict[str, float]) -> None:
    dark = np.random.default_rng(2)
    lit = np.random.default_rng(2)
    (plain, labels), (image, same) = (synthesize(r, SHAPE, s) for r, s in ((dark, scene()), (lit, scene(**extra))))
    assert np.array_equal(labels, same)
    assert not np.array_equal(plain, image)


def test_bit_depth_limits_the_gray_values() -> None:
    image, _ = synthesize(np.random.default_rng(3), SHAPE, scene(bits=8, saturation=0.02))
    assert image.dtype == np.uint8
    assert image.max() == 255
    assert np.count_nonzero(image == 255) > 0.01 * image.size


def test_envelopes_are_brighter_than_the_interior_of_nuclei() -> None:
    image, labels = synthesize(np.random.default_rng(0), (32, 48, 48), scene(envelope=0.08, diameter=24, fill=0.1))
    inside = edt.edt(labels > 0)
    assert image[(inside > 0) & (inside < 4)].mean() > 1.5 * image[inside > 7].mean()


def test_tissue_brightens_the_background_unevenly() -> None:
    images = [
        synthesize(np.random.default_rng(1), SHAPE, scene(tissue=tissue, fill=0.02))[0].astype(float)
        for tissue in (0.0, 0.8)
    ]
    assert images[1].std() / images[1].max() > images[0].std() / images[0].max()


def test_outlines_follow_the_blur_only_along_z() -> None:
    blurred = scene(blur=0.6, elongation=6, fill=0.03, spread=0)
    shape = (40, 48, 48)
    (image, sharp), (same, deep) = (
        synthesize(np.random.default_rng(4), shape, replace(blurred, rim_level=level)) for level in (0.0, 0.2)
    )
    assert np.array_equal(image, same)
    assert np.array_equal(deep[sharp > 0], sharp[sharp > 0])
    depths = [np.count_nonzero((labels > 0).any(axis=(1, 2))) for labels in (sharp, deep)]
    assert depths[0] + 2 <= depths[1] <= depths[0] + 10
    footprints = [(labels > 0).any(axis=0) for labels in (sharp, deep)]
    assert np.array_equal(*footprints)


def test_outlines_of_sharp_nuclei_are_not_extended() -> None:
    sharp, same = (
        synthesize(np.random.default_rng(4), SHAPE, scene(blur=0.2, rim_level=level))[1] for level in (0.0, 0.5)
    )
    assert np.count_nonzero(sharp != same) < 0.02 * np.count_nonzero(sharp)


@pytest.mark.parametrize("seed", range(4))
def test_empty_scenes_have_noise_and_no_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    image, labels = synthesize(rng, SHAPE, Scene.draw_empty(rng))
    assert not labels.any()
    assert image.std() > 0


@pytest.mark.parametrize("seed", range(8))
def test_blurred_scenes_have_blur_along_z_in_proportion_to_the_diameter(seed: int) -> None:
    drawn = Scene.draw_blurred(np.random.default_rng(seed))
    assert drawn.rim_level > 0
    assert 0.1 <= drawn.blur * drawn.elongation * drawn.anisotropy / drawn.diameter <= 0.33


@pytest.mark.parametrize("seed", range(8))
def test_varied_and_hard_scenes_are_valid(seed: int) -> None:
    image, labels = synthesize_varied(np.random.default_rng(seed), SHAPE)
    assert image.shape == labels.shape == SHAPE
    hard = Scene.draw_hard(np.random.default_rng(seed))
    assert 3 <= hard.diameter <= 44


def _touches_border(inside: np.ndarray) -> bool:
    return any(inside.take(edge, axis).any() for axis in range(3) for edge in (0, -1))
