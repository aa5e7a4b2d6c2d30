"""Random blocks of annotated stacks as training examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, zoom
from torch.utils.data import Dataset

from service.training.examples import Example, Floats, TargetFunction, place_crop
from service.training.stacks.parts import StackPart, compute_part_targets
from service.training.targets.instances import compute_instance_targets

# Range of the random scale, and of the additional scale along z, as logarithms. Stacks differ in flatness more than in
# size, because the distance between planes is coarse.
MAX_LOG_SCALE = 0.2
MAX_LOG_FLATNESS = 0.25
# Probability that a block is blurred along z, and the largest standard deviation of the blur in voxels.
BLUR_PROBABILITY = 0.2
MAX_BLUR_SIGMA = 2.5
# Edge length of a block as a multiple of the edge length of the crops that are drawn from it.
BLOCK_EDGES = 2
# Maximum ratio of the numbers of object faces along two axes in a stack whose axes are interchangeable. Planes that are
# twice as far apart as pixels have twice as many faces.
MAX_FACE_RATIO = 1.5
# Order of the interpolation of foreground, distance and weights. Only the distance is continuous.
TARGET_ORDERS: tuple[Literal[0, 1], ...] = (0, 1, 0)


@dataclass(frozen=True)
class _Source:
    """The image and the targets [T, z, y, x] of a part, and the positions of its object voxels.

    is_isotropic  whether blocks may be rotated so that another axis becomes z
    """

    image: Floats
    targets: Floats
    object_voxels: NDArray[np.intp]
    is_isotropic: bool


class BlockDataset(Dataset[Example]):
    """Numbered random blocks of annotated stacks. Each block depends only on the seed and its number.

    Targets are computed once for each stack, so that objects at the faces of a block have the same targets as
    elsewhere. Blocks are zoomed by random factors and sometimes blurred along z.

    permutes_axes  whether the axes of blocks are permuted at random if the objects in a part are isotropic
    """

    def __init__(
        self,
        parts: Sequence[StackPart],
        edge: int,
        seed: int,
        compute_targets: TargetFunction = compute_instance_targets,
        *,
        permutes_axes: bool = False,
    ) -> None:
        self._edge, self._seed = edge, seed
        self._sources = [_make_source(part, compute_targets, permutes_axes=permutes_axes) for part in parts]
        weights = np.array([part.object_count for part in parts], np.float64)
        self._probabilities = weights / weights.sum()

    def __getitem__(self, number: int) -> Example:
        rng = np.random.default_rng([self._seed, 1, number])
        source = self._sources[int(rng.choice(len(self._sources), p=self._probabilities))]
        scale, flatness = rng.uniform(-MAX_LOG_SCALE, MAX_LOG_SCALE), rng.uniform(-MAX_LOG_FLATNESS, MAX_LOG_FLATNESS)
        variation = rng.uniform(-0.1, 0.1, 3)
        factors = np.exp(scale + variation + np.array([flatness, 0.0, 0.0]))
        edges = np.ceil(BLOCK_EDGES * self._edge / factors).astype(int)
        voxel = np.unravel_index(int(rng.choice(source.object_voxels)), source.image.shape)
        spans = tuple(
            place_crop((length,), int(edge), (position,), rng)[1][0]
            for length, edge, position in zip(source.image.shape, edges, voxel, strict=True)
        )
        image = _zoom(source.image[spans], factors, 1)
        targets = np.stack(
            [_zoom(target[spans], factors, order) for target, order in zip(source.targets, TARGET_ORDERS, strict=False)]
        )
        if rng.random() < BLUR_PROBABILITY:
            image = gaussian_filter(image, (rng.uniform(0, MAX_BLUR_SIGMA), 0, 0), truncate=2)
        if source.is_isotropic:
            axes = rng.permutation(3)
            image, targets = image.transpose(axes), targets.transpose(0, *(axes + 1))
        return Example(image, targets)


def _make_source(part: StackPart, compute_targets: TargetFunction, *, permutes_axes: bool) -> _Source:
    targets = compute_part_targets(part, compute_targets)
    is_isotropic = permutes_axes and has_isotropic_objects(part.labels)
    return _Source(part.image, targets, np.flatnonzero(targets[0]), is_isotropic)


def has_isotropic_objects(labels: NDArray[Any]) -> bool:
    """Return whether the objects in labels [z, y, x] have about as many faces along each axis.

    This is measured instead of compared with the voxel size, which many files do not contain.
    """
    face_fractions = []
    for axis in range(3):
        values = np.moveaxis(labels, axis, 0)
        face_count = int(np.count_nonzero(values[1:] != values[:-1]))
        face_fractions.append(face_count / max(values[1:].size, 1))
    return max(face_fractions) <= MAX_FACE_RATIO * min(face_fractions)


def _zoom(pixels: NDArray[Any], factors: NDArray[np.float64], order: Literal[0, 1]) -> Floats:
    """Resample pixels [z, y, x] by a factor along each axis."""
    return np.asarray(zoom(pixels, factors.tolist(), order=order, mode="nearest", grid_mode=True), np.float32)
