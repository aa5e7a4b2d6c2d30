"""Landscapes for tests of decoding, and the whole way from heights to labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor

from service.inference.decoding.instances import Landscape, Persistence, TorchLandscape
from service.inference.decoding.watershed import Basins, Watershed
from service.inference.decoding.watershed_kernel import BLOCK, Terms, WatershedKernel

Array = NDArray[Any]
Size = tuple[int, int, int]

CPU = torch.device("cpu")


def parts(heights: Array, cuts: tuple[int, ...], *, across: bool) -> Iterator[Tensor]:
    """Parts of heights [Z, Y, X] that begin at 0 and at `cuts`, along z or y."""
    landscape = torch.from_numpy(heights.astype(np.float32))
    for low, high in itertools.pairwise([0, *cuts, heights.shape[across]]):
        yield landscape.narrow(int(across), low, high - low)


def basins_of(
    heights: Array, persistence: Persistence, cuts: tuple[int, ...] = (), block: int = BLOCK, *, across: bool = False
) -> Basins:
    """Basins of heights [Z, Y, X] with -inf as background, handed over in parts."""
    watershed = Watershed(size_of(heights), persistence.floor, CPU, block, across=across)
    for part in parts(heights, cuts, across=across):
        watershed.add(part, part > -torch.inf)
    return watershed.finish()


def decode(
    heights: Array,
    persistence: float = 0.0,
    minimum_size: int = 0,
    cuts: tuple[int, ...] = (),
    block: int = BLOCK,
    kernel: WatershedKernel | None = None,
    *,
    across: bool = False,
    logits: bool = False,
    whole: bool = False,
) -> tuple[Array, int]:
    """Labels of heights [Z, Y, X] with -inf as background, and their number; by torch, unless a kernel is given."""
    persistence = Persistence(persistence, logits)
    size, threshold = size_of(heights), -np.inf
    made: Landscape
    if kernel is None:
        made = TorchLandscape(size, threshold, persistence, CPU, block, across=across)
    else:
        made = kernel.landscape(size, Terms(threshold, persistence.depth, logits), across=across, block=block)
    for part in parts(heights, cuts, across=across):
        made.add(part, part)
    return made.labels(minimum_size, whole=whole)


def size_of(heights: Array) -> Size:
    depth, height, width = heights.shape
    return depth, height, width


def hills(seed: int, size: Size, sigma: float = 2.0) -> Array:
    """Smooth random heights of standard deviation 1, -inf where they are below 0: touching objects of all shapes."""
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(size), sigma, mode="nearest")
    noise /= noise.std()
    return np.where(noise > 0, noise, -np.inf).astype(np.float32)
