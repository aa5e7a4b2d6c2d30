"""Layers of cells around a cavity: the shape of tubes and cysts, such as glands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray


@dataclass(frozen=True)
class Layer:
    """One layer of cells around the cavity of a tube or a cyst; lengths in voxels along y and x.

    middle        a place in the cavity, [3]
    axis          unit vector along a tube, [3]; 0 for a cyst
    inner, outer  distances at which cells begin and end
    """

    middle: NDArray[np.float64]
    axis: NDArray[np.float64]
    inner: float
    outer: float

    @classmethod
    def draw(cls, rng: Generator, extent: NDArray[Any], size: float, lumen: float) -> Self:
        """Draw a tube, in two of three cases, or a cyst in a volume of this extent [3].

        `size` is its width relative to the volume's, `lumen` the inner radius relative to the outer one.
        """
        axis = np.zeros(3)
        if rng.random() < 2 / 3:
            axis = rng.normal(size=3) * (0.3, 1, 1)
            axis /= np.linalg.norm(axis)
        outer = 0.5 * size * float(extent[1:].min())
        return cls(extent * rng.uniform(0.3, 0.7, 3), axis, lumen * outer, outer)

    @property
    def radius(self) -> float:
        """Half way between the cavity and the outside."""
        return (self.inner + self.outer) / 2

    def holds(self, places: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which places [N, 3] are in the layer, bool [N]."""
        distance = np.linalg.norm(self._away(places), axis=-1)
        return np.asarray((distance > self.inner) & (distance < self.outer))

    def onto_surface(self, places: NDArray[Any]) -> NDArray[Any]:
        """Return the points of the layer's middle that are nearest to places [N, 3]."""
        away = self._away(places)
        distance = np.maximum(np.linalg.norm(away, axis=-1, keepdims=True), 1e-6)
        return np.asarray(places + away * (self.radius / distance - 1), places.dtype)

    def area(self, extent: NDArray[Any]) -> float:
        """Return the area of the layer's middle, of a tube as long as points are drawn on it."""
        if self.axis.any():
            return 2 * math.pi * self.radius * _tube_length(extent)
        return 4 * math.pi * self.radius**2

    def draw_points(self, rng: Generator, extent: NDArray[Any], count: int) -> NDArray[np.float64]:
        """Draw points [count, 3] on the layer's middle."""
        points = self.middle + rng.normal(size=(count, 3))
        if self.axis.any():
            along = (points - self.middle) @ self.axis
            points += np.outer(_tube_length(extent) * rng.uniform(-0.5, 0.5, count) - along, self.axis)
        return np.asarray(self.onto_surface(points), np.float64)

    def _away(self, places: NDArray[Any]) -> NDArray[Any]:
        """Return vectors [N, 3] from the middle, or from the axis, to places."""
        away = places - self.middle.astype(places.dtype)
        axis = self.axis.astype(places.dtype)
        return np.asarray(away - (away @ axis)[:, None] * axis)


def _tube_length(extent: NDArray[Any]) -> float:
    """Return twice the diagonal of a volume of this extent [3], which a tube crosses wherever its middle is."""
    return float(2 * np.linalg.norm(extent))
