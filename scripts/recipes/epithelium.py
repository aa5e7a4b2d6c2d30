"""Geometry of epithelia: a single layer of cells around the cavity of a tube or a cyst, as in glands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray


@dataclass(frozen=True)
class Layer:
    """One layer of cells around the cavity of a tube or a cyst. Lengths are in units of the pixel size in y and x.

    center         a point in the cavity, [3]; for a tube, on its axis
    axis           unit vector along a tube, [3]; zeros for a cyst
    inner_radius   distance of the inner surface from the center or the axis
    outer_radius   distance of the outer surface from the center or the axis
    """

    center: NDArray[np.float64]
    axis: NDArray[np.float64]
    inner_radius: float
    outer_radius: float

    @classmethod
    def draw(cls, rng: Generator, extent: NDArray[Any], size: float, lumen: float) -> Self:
        """Draw a tube (with probability 2/3) or a cyst in a volume of this extent [3].

        `size` is the outer diameter relative to the smaller lateral edge of the volume. `lumen` is the inner radius
        relative to the outer one.
        """
        axis = np.zeros(3)
        if rng.random() < 2 / 3:
            axis = rng.normal(size=3) * (0.3, 1, 1)
            axis /= np.linalg.norm(axis)
        outer = 0.5 * size * float(extent[1:].min())
        return cls(extent * rng.uniform(0.3, 0.7, 3), axis, lumen * outer, outer)

    @property
    def radius(self) -> float:
        """Radius of the midsurface, halfway between the inner and the outer surface."""
        return (self.inner_radius + self.outer_radius) / 2

    def contains(self, points: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of the points [N, 3] are in the layer, bool [N]."""
        distance = np.linalg.norm(self._offsets(points), axis=-1)
        return np.asarray((distance > self.inner_radius) & (distance < self.outer_radius))

    def project(self, points: NDArray[Any]) -> NDArray[Any]:
        """Return the nearest points [N, 3] on the midsurface."""
        offsets = self._offsets(points)
        distance = np.maximum(np.linalg.norm(offsets, axis=-1, keepdims=True), 1e-6)
        return np.asarray(points + offsets * (self.radius / distance - 1), points.dtype)

    def area(self, extent: NDArray[Any]) -> float:
        """Return the area of the midsurface. The length of a tube is the one that `draw_points` uses."""
        if self.axis.any():
            return 2 * math.pi * self.radius * _tube_length(extent)
        return 4 * math.pi * self.radius**2

    def draw_points(self, rng: Generator, extent: NDArray[Any], count: int) -> NDArray[np.float64]:
        """Draw random points [count, 3] on the midsurface."""
        points = self.center + rng.normal(size=(count, 3))
        if self.axis.any():
            position = (points - self.center) @ self.axis
            points += np.outer(_tube_length(extent) * rng.uniform(-0.5, 0.5, count) - position, self.axis)
        return np.asarray(self.project(points), np.float64)

    def _offsets(self, points: NDArray[Any]) -> NDArray[Any]:
        """Return vectors [N, 3] from the center of a cyst, or from the axis of a tube, to points [N, 3]."""
        offsets = points - self.center.astype(points.dtype)
        axis = self.axis.astype(points.dtype)
        return np.asarray(offsets - (offsets @ axis)[:, None] * axis)


def _tube_length(extent: NDArray[Any]) -> float:
    """Return twice the diagonal of a volume of this extent [3], so that a tube always crosses the whole volume."""
    return float(2 * np.linalg.norm(extent))
