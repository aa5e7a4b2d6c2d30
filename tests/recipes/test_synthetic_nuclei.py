from __future__ import annotations

from dataclasses import replace

import edt
import numpy as np
import pytest

from scripts.recipes.synthetic_nuclei import Scene, synthesise, synthesise_varied

SHAPE = (20, 40, 44)


def scene(**changes: float) -> Scene:
    """A plain scene: sharp, bright, round nuclei of 14 voxels without anything in their way."""
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
def test_every_scene_gives_a_stack_and_its_labels(seed: int) -> None:
    image, labels = synthesise(np.random.default_rng(seed), SHAPE)
    assert image.shape == labels.shape == SHAPE
    assert image.dtype in (np.uint8, np.uint16)
    assert labels.dtype == np.uint16
    assert 0 < np.count_nonzero(labels) < labels.size
    assert image.std() > 0


def test_the_same_seed_gives_the_same_stack() -> None:
    first, second, other = (synthesise(np.random.default_rng(seed), SHAPE) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_nuclei_are_brighter_than_what_surrounds_them() -> None:
    image, labels = synthesise(np.random.default_rng(0), SHAPE, scene())
    assert np.median(image[labels > 0]) > 4 * np.median(image[labels == 0])


def test_the_diameter_and_its_flatness_are_those_of_the_scene() -> None:
    wide = (40, 90, 90)
    _, labels = synthesise(np.random.default_rng(1), wide, scene(fill=0.3, anisotropy=2, diameter=20))
    inner = [n for n in np.unique(labels)[1:] if not _touches_border(labels == n)]
    volumes = [np.count_nonzero(labels == n) for n in inner]
    assert len(volumes) >= 5
    assert np.median(volumes) == pytest.approx(np.pi / 6 * 20**3 / 2, rel=0.35)


@pytest.mark.parametrize("extra", [{"ghosts": 8}, {"glow": 0.4}, {"debris": 8}, {"haze": 0.4}])
def test_stray_light_is_seen_but_not_labelled(extra: dict[str, float]) -> None:
    dark = np.random.default_rng(2)
    lit = np.random.default_rng(2)
    (plain, labels), (image, same) = (synthesise(r, SHAPE, s) for r, s in ((dark, scene()), (lit, scene(**extra))))
    assert np.array_equal(labels, same)
    assert not np.array_equal(plain, image)


def test_bits_bound_the_camera() -> None:
    image, _ = synthesise(np.random.default_rng(3), SHAPE, scene(bits=8, saturation=0.02))
    assert image.dtype == np.uint8
    assert image.max() == 255
    assert np.count_nonzero(image == 255) > 0.01 * image.size


def test_an_envelope_is_brighter_than_what_it_encloses() -> None:
    image, labels = synthesise(np.random.default_rng(0), (32, 48, 48), scene(envelope=0.08, diameter=24, fill=0.1))
    inside = edt.edt(labels > 0)
    assert image[(inside > 0) & (inside < 4)].mean() > 1.5 * image[inside > 7].mean()


def test_tissue_brightens_the_background_unevenly() -> None:
    shade = [
        synthesise(np.random.default_rng(1), SHAPE, scene(tissue=tissue, fill=0.02))[0].astype(float)
        for tissue in (0.0, 0.8)
    ]
    assert shade[1].std() / shade[1].max() > shade[0].std() / shade[0].max()


@pytest.mark.parametrize("seed", range(8))
def test_hard_scenes_are_stacks_with_labels_too(seed: int) -> None:
    image, labels = synthesise_varied(np.random.default_rng(seed), SHAPE)
    assert image.shape == labels.shape == SHAPE
    hard = Scene.draw_hard(np.random.default_rng(seed))
    assert 3 <= hard.diameter <= 44


def _touches_border(inside: np.ndarray) -> bool:
    return any(inside.take(edge, axis).any() for axis in range(3) for edge in (0, -1))
