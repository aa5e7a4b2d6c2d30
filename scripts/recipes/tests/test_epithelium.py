from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.recipes.epithelium import Layer

EXTENT = np.array([60.0, 80.0, 80.0])
CYST = Layer(EXTENT / 2, np.zeros(3), 10.0, 20.0)
TUBE = Layer(EXTENT / 2, np.array([0.0, 0.6, 0.8]), 10.0, 20.0)


@pytest.mark.parametrize("layer", [CYST, TUBE])
def test_points_are_drawn_on_the_midsurface(layer: Layer) -> None:
    points = layer.draw_points(np.random.default_rng(0), EXTENT, 500)
    assert points.shape == (500, 3)
    assert layer.contains(points).all()
    assert layer.project(points) == pytest.approx(points)


@pytest.mark.parametrize("layer", [CYST, TUBE])
def test_points_are_projected_to_the_nearest_point_of_the_midsurface(layer: Layer) -> None:
    points = np.random.default_rng(1).uniform(0, EXTENT, (500, 3))
    projected = layer.project(points)
    probes = layer.center + np.array([1.0, 0.0, 0.0]) * np.array([[5.0], [10.5], [19.5], [20.5]])
    assert list(layer.contains(probes)) == [False, True, True, False]
    assert layer.contains(projected).all()
    inside = layer.contains(points)
    assert inside.any()
    assert np.linalg.norm(projected - points, axis=1)[inside].max() <= 5


def test_tubes_extend_along_their_axis_and_cysts_are_closed() -> None:
    far = TUBE.center + 100 * TUBE.axis + [15, 0, 0]
    assert TUBE.contains(far[None]).all()
    assert not CYST.contains(far[None]).any()
    assert CYST.area(EXTENT) == pytest.approx(4 * math.pi * 15**2)
    assert TUBE.area(EXTENT) > CYST.area(EXTENT)


def test_random_layers_are_tubes_and_cysts_of_the_requested_size() -> None:
    layers = [Layer.draw(np.random.default_rng(seed), EXTENT, 0.8, 0.5) for seed in range(20)]
    assert {bool(layer.axis.any()) for layer in layers} == {True, False}
    assert {(layer.inner_radius, layer.outer_radius) for layer in layers} == {(16.0, 32.0)}
