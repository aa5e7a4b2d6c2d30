from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.recipes.epithelium import Layer

EXTENT = np.array([60.0, 80.0, 80.0])
CYST = Layer(EXTENT / 2, np.zeros(3), 10.0, 20.0)
TUBE = Layer(EXTENT / 2, np.array([0.0, 0.6, 0.8]), 10.0, 20.0)


@pytest.mark.parametrize("layer", [CYST, TUBE])
def test_points_lie_half_way_between_the_cavity_and_the_outside(layer: Layer) -> None:
    points = layer.draw_points(np.random.default_rng(0), EXTENT, 500)
    assert points.shape == (500, 3)
    assert layer.holds(points).all()
    assert layer.onto_surface(points) == pytest.approx(points)


@pytest.mark.parametrize("layer", [CYST, TUBE])
def test_places_move_by_their_distance_from_the_middle_of_the_layer(layer: Layer) -> None:
    places = np.random.default_rng(1).uniform(0, EXTENT, (500, 3))
    moved = layer.onto_surface(places)
    away = layer.middle + np.array([1.0, 0.0, 0.0]) * np.array([[5.0], [10.5], [19.5], [20.5]])
    assert list(layer.holds(away)) == [False, True, True, False]
    assert layer.holds(moved).all()
    within = layer.holds(places)
    assert within.any()
    assert np.linalg.norm(moved - places, axis=1)[within].max() <= 5


def test_a_tube_goes_on_along_its_axis_and_a_cyst_is_closed() -> None:
    far = TUBE.middle + 100 * TUBE.axis + [15, 0, 0]
    assert TUBE.holds(far[None]).all()
    assert not CYST.holds(far[None]).any()
    assert CYST.area(EXTENT) == pytest.approx(4 * math.pi * 15**2)
    assert TUBE.area(EXTENT) > CYST.area(EXTENT)


def test_layers_are_tubes_and_cysts_of_the_stated_size() -> None:
    layers = [Layer.draw(np.random.default_rng(seed), EXTENT, 0.8, 0.5) for seed in range(20)]
    assert {bool(layer.axis.any()) for layer in layers} == {True, False}
    assert {(layer.inner, layer.outer) for layer in layers} == {(16.0, 32.0)}
