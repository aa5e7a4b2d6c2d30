"""Landscapes for tests of decoding, and the whole way from heights to labels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from service.ascent import Ascent
from service.postprocess import Relief, label_basins
from service.repository import Instances
from service.watershed import BLOCK, Basins, Watershed

Array = NDArray[Any]


def basins_of(
    heights: Array,
    relief: Relief,
    cuts: tuple[int, ...] = (),
    block: int = BLOCK,
    kernel: Ascent | None = None,
    *,
    across: bool = False,
) -> Basins:
    """Basins of heights [Z, Y, X] with -inf as background, handed over in parts that begin at `cuts`.

    By torch, unless a prepared kernel is given. Across, parts are cut along y.
    """
    depth, height, width = heights.shape
    size = (depth, height, width)
    watershed = Watershed(size, relief.floor, torch.device("cpu"), block, kernel or Ascent(), across=across)
    landscape = torch.from_numpy(heights.astype(np.float32))
    for low, high in itertools.pairwise([0, *cuts, height if across else depth]):
        part = landscape.narrow(int(across), low, high - low)
        watershed.add(part, part > -torch.inf)
    return watershed.finish()


def decode(
    heights: Array, persistence: float = 0.0, minimum_size: int = 0, kernel: Ascent | None = None, **how: Any
) -> tuple[Array, int]:
    """Labels of heights [Z, Y, X] that are distances, and their number; `how` as in `basins_of`."""
    relief = Relief(persistence, squashed=False)
    decoding = Instances(kind="instances", minimum_size=minimum_size)
    return label_basins(basins_of(heights, relief, kernel=kernel, **how), relief, decoding, kernel or Ascent())


def hills(seed: int, size: tuple[int, int, int], sigma: float = 2.0) -> Array:
    """Smooth random heights of standard deviation 1, -inf where they are below 0: touching objects of all shapes."""
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(size), sigma, mode="nearest")
    noise /= noise.std()
    return np.where(noise > 0, noise, -np.inf).astype(np.float32)
