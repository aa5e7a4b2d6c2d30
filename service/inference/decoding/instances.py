"""Decoding of instances: the watershed of smoothed distances, with shallow maxima merged into higher ones.

A stack no higher than a window arrives in rows that hold all of z. Each row is decoded as planes along y while later
rows are computed; ties are broken by the same places as along z, so the basins are equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size, VoxelSize
from service.core.types import Objects, Segmentation, label_dtype
from service.inference.decoding.basin_merging import Persistence
from service.inference.decoding.fill_holes import fill_holes
from service.inference.decoding.smoothing import Smoother
from service.inference.decoding.streaming import StreamingWatershed, TorchWatershed, logit
from service.inference.decoding.watershed import Planes
from service.inference.decoding.watershed_kernel import WatershedKernel, WatershedParameters, watershed_kernel
from service.models.spec import Instances, ModelSpec

# Mean probability of foreground that no object has to exceed for the sake of others that are more certain.
CERTAIN = 0.9

StartWatershed = Callable[[Planes, float, Persistence], StreamingWatershed]
"""Begins a watershed of some planes, with the least score of the foreground and the persistence of objects."""


class InstanceDecoder:
    """Decoder of objects, numbered from 1 in the order of the places of their peaks.

    It keeps one int32 per voxel, and the distances of planes that are not complete.

    start  begins the watershed; None: the kernel does, or torch where that cannot
    """

    def __init__(  # noqa: PLR0913
        self,
        spec: ModelSpec,
        decoding: Instances,
        size: Size,
        voxel_size: VoxelSize | None,
        kernel: WatershedKernel = watershed_kernel,
        *,
        start: StartWatershed | None = None,
    ) -> None:
        self._start = start
        self._decoding, self._voxel_size, self._size = decoding, voxel_size, size
        self._foreground = spec.outputs.index(decoding.foreground)
        self._distance = spec.outputs.index(decoding.distance)
        self._threshold = logit(decoding.threshold)
        self._persistence = Persistence(decoding.persistence, logits=spec.activation == "sigmoid")
        self._diameter = spec.input.diameter or math.inf
        self._smoother = Smoother(decoding.smoothing)
        self._kernel = kernel
        self._watershed: StreamingWatershed | None = None
        # Planes whose rows have not all arrived.
        self._distances: Tensor
        self._inside: Tensor

    def add(self, _z0: int, y0: int, scores: Tensor, /) -> None:
        """Add raw scores [1, K, z, y, X] of the next planes and of the rows from `y0` on, like `Decoder.add`."""
        planes, rows = scores.shape[2:4]
        distances, foreground = scores[0, self._distance], scores[0, self._foreground]
        if not self._decoding.smoothing and rows == self._size[1]:
            self._get_watershed(distances.device, along_y=False).add(distances, foreground)
        elif not self._decoding.smoothing and planes == self._size[0]:
            # Windows as high as the volume give all of z at once, so that nothing has to wait for the last row.
            self._get_watershed(distances.device, along_y=True).add(distances, foreground)
        else:
            self._gather(y0, distances.float(), foreground)

    def _gather(self, y0: int, distances: Tensor, inside: Tensor) -> None:
        """Collect rows of some planes, float32 and any [z, y, X], and process the planes once they are complete."""
        planes, rows, width = distances.shape
        if rows < self._size[1]:
            if y0 == 0:
                shape = (planes, self._size[1], width)
                self._distances, self._inside = distances.new_empty(shape), inside.new_empty(shape)
            self._distances[:, y0 : y0 + rows], self._inside[:, y0 : y0 + rows] = distances, inside
            distances, inside = self._distances, self._inside
        if y0 + rows == self._size[1]:
            self._add_planes(self._smoother.add(distances, inside))

    def _add_planes(self, planes: Iterator[tuple[Tensor, Tensor]]) -> None:
        for heights, inside in planes:
            self._get_watershed(heights.device, along_y=False).add(heights, inside)

    def _get_watershed(self, device: torch.device, *, along_y: bool) -> StreamingWatershed:
        if self._watershed is None:
            planes = Planes(self._size, device, along_y)
            if self._start is not None:
                self._watershed = self._start(planes, self._threshold, self._persistence)
            elif self._kernel.supports(device, self._size):
                parameters = WatershedParameters(self._threshold, self._persistence.depth, self._persistence.logits)
                self._watershed = self._kernel.start(self._size, parameters, along_y=along_y)
            else:
                self._watershed = TorchWatershed(planes, self._threshold, self._persistence)
        return self._watershed

    def finish(self) -> Segmentation:
        self._add_planes(self._smoother.finish())
        if self._watershed is None:
            none = Objects.from_sums(*np.zeros((3, 0)))
            return Segmentation(np.zeros(self._size, label_dtype(0)), "labels", self._voxel_size, 0, objects=none)
        decoding = self._decoding
        labels, objects = self._watershed.labels(
            decoding.minimum_size, drop_border=decoding.border == "drop", keep=self._find_kept
        )
        # Free the pieces before holes are filled.
        self._watershed = None
        if decoding.holes == "fill":
            fill_holes(labels)
        return Segmentation(labels, "labels", self._voxel_size, len(objects), objects=objects)

    def _find_kept(self, objects: Objects) -> NDArray[np.bool_]:
        """Return which objects are neither fragments nor part of the background."""
        confident = objects.confidence >= least_confidence(self._decoding, objects)
        return confident & (objects.voxels >= least_voxels(self._diameter, self._decoding, objects, self._size))


def least_voxels(diameter: float, decoding: Instances, objects: Objects, size: Size) -> float:
    """Return the voxels below which an object is a fragment, by those of a whole one.

    That is a ball of the diameter that the model wants, or the object that the median voxel belongs to, whichever is
    smaller: objects of another width than wanted are not fragments.
    """
    if not decoding.minimum_fraction or not len(objects):
        return 0.0
    ball = math.pi / 6 * math.prod(min(diameter, edge) for edge in size)
    return decoding.minimum_fraction * min(ball, objects.typical_size)


def least_confidence(decoding: Instances, objects: Objects) -> float:
    """Return the mean probability below which an object is rather part of the background.

    That is the one that a model states, or one by the object that the median voxel belongs to, whichever is higher: a
    network is surer of what is no object in some stacks than of objects in others. Where objects are very certain,
    `CERTAIN` is enough.
    """
    if not decoding.min_relative_odds or not len(objects):
        return decoding.min_confidence
    typical = objects.typical_confidence
    odds = decoding.min_relative_odds * typical
    return max(decoding.min_confidence, min(odds / (odds + 1 - typical), CERTAIN))
