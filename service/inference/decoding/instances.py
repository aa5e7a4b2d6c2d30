"""Instance decoder, which applies a watershed to smoothed distances and merges shallow maxima into higher maxima.

If a stack has no more planes than a window, scores arrive in rows that contain all planes. Each row is then decoded
along y while later rows are computed. Ties are broken by the same positions as along z, so the basins are identical.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size, VoxelSize
from service.core.types import Objects, Segmentation, choose_label_dtype
from service.inference.decoding.filters.fill_holes import fill_holes
from service.inference.decoding.filters.smoothing import Smoother
from service.inference.decoding.pieces import WatershedParameters
from service.inference.decoding.streaming import (
    StreamingWatershed,
    TorchWatershed,
    label_objects,
    select_foreground_logits,
)
from service.inference.decoding.watershed_kernel import WatershedKernel, WatershedOptions, watershed_kernel
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

# Maximum confidence that `min_relative_odds` can require of an object.
MAX_REQUIRED_CONFIDENCE = 0.9


class InstanceDecoder:
    """Decoder of objects, which are numbered from 1 in the order of the positions of their peaks.

    It stores one int32 per voxel, and the distances of incomplete planes.

    kernel   the C++ kernel, which is used if it supports the volume and the device of the scores, otherwise PyTorch
    threads  maximum number of threads of the C++ kernel
    """

    def __init__(  # noqa: PLR0913
        self,
        spec: ModelSpec,
        decoding: Instances,
        size: Size,
        voxel_size: VoxelSize | None,
        kernel: WatershedKernel = watershed_kernel,
        *,
        threads: int = 1,
    ) -> None:
        self._kernel, self._threads = kernel, threads
        self._spec, self._decoding, self._voxel_size, self._size = spec, decoding, voxel_size, size
        self._distance_channel = spec.outputs.index(decoding.distance)
        self._parameters = WatershedParameters.of_model(spec, decoding)
        self._diameter = spec.input.diameter or math.inf
        self._smoother = Smoother(decoding.smoothing)
        self._watershed: StreamingWatershed | None = None
        # Values of planes whose rows have not all arrived.
        self._distances: Tensor
        self._foreground_scores: Tensor

    def add(self, _z0: int, y0: int, scores: Tensor, /) -> None:
        """Add raw scores [1, K, z, y, X] of the next planes and of the rows from `y0`, as in `Decoder.add`."""
        num_planes, num_rows = scores.shape[2:4]
        distances = scores[0, self._distance_channel]
        foreground = select_foreground_logits(self._spec, self._decoding, scores[0])
        if not self._decoding.smoothing and num_rows == self._size[1]:
            self._get_watershed(distances.device, along_y=False).add(distances, foreground)
        elif not self._decoding.smoothing and num_planes == self._size[0]:
            # Windows as deep as the volume deliver all planes, so decoding does not have to wait for the last row.
            self._get_watershed(distances.device, along_y=True).add(distances, foreground)
        else:
            self._collect_rows(y0, distances.float(), foreground)

    def _collect_rows(self, y0: int, distances: Tensor, foreground: Tensor) -> None:
        """Collect rows [z, y, X] of some planes, distances as float32, and process planes once they are complete."""
        num_planes, num_rows, width = distances.shape
        if num_rows < self._size[1]:
            if y0 == 0:
                shape = (num_planes, self._size[1], width)
                self._distances, self._foreground_scores = distances.new_empty(shape), foreground.new_empty(shape)
            self._distances[:, y0 : y0 + num_rows], self._foreground_scores[:, y0 : y0 + num_rows] = (
                distances,
                foreground,
            )
            distances, foreground = self._distances, self._foreground_scores
        if y0 + num_rows == self._size[1]:
            self._add_planes(self._smoother.add(distances, foreground))

    def _add_planes(self, planes: Iterator[tuple[Tensor, Tensor]]) -> None:
        for heights, foreground in planes:
            self._get_watershed(heights.device, along_y=False).add(heights, foreground)

    def _get_watershed(self, device: torch.device, *, along_y: bool) -> StreamingWatershed:
        if self._watershed is None:
            if self._kernel.supports(device, self._size):
                options = WatershedOptions(along_y, threads=self._threads)
                self._watershed = self._kernel.start(self._size, self._parameters, options)
            else:
                self._watershed = TorchWatershed(self._size, device, self._parameters, along_y=along_y)
        return self._watershed

    def finish(self) -> Segmentation:
        self._add_planes(self._smoother.finish())
        if self._watershed is None:
            no_objects = Objects.from_sums(*np.zeros((3, 0)))
            return Segmentation(
                np.zeros(self._size, choose_label_dtype(0)), "labels", self._voxel_size, 0, objects=no_objects
            )
        labels, objects = label_objects(
            self._watershed,
            self._parameters,
            lambda objects, touches_face: choose_objects(
                self._decoding, objects, touches_face, self._diameter, self._size
            ),
        )
        # Free the pieces before holes are filled.
        self._watershed = None
        if self._decoding.holes == "fill":
            fill_holes(labels)
        return Segmentation(labels, "labels", self._voxel_size, len(objects), objects=objects)


def choose_objects(
    decoding: Instances, objects: Objects, touches_face: NDArray[np.bool_], diameter: float, size: Size
) -> NDArray[np.bool_]:
    """Return a mask of the objects that the decoder keeps: those that are neither fragments nor background.

    touches_face  whether each object touches a face of the volume
    diameter      object diameter that the model expects
    size          (Z, Y, X) of the volume
    """
    is_kept: NDArray[np.bool_] = objects.voxel_counts >= max(decoding.minimum_size, 1)
    if decoding.border == "drop":
        is_kept &= ~touches_face
    candidates = objects.select(is_kept)
    is_kept &= objects.confidence >= compute_min_object_confidence(decoding, candidates)
    is_kept &= objects.voxel_counts >= compute_min_object_voxels(diameter, decoding, candidates, size)
    return is_kept


def compute_min_object_voxels(diameter: float, decoding: Instances, objects: Objects, size: Size) -> float:
    """Return the minimum number of voxels of an object that is not a fragment.

    It is a fraction of the volume of a sphere with the model's object diameter, or of the object that contains the
    median voxel, whichever is smaller, so that small objects are kept if most other objects are also small.
    """
    if not decoding.minimum_fraction or not len(objects):
        return 0.0
    sphere_voxels = math.pi / 6 * math.prod(min(diameter, length) for length in size)
    return decoding.minimum_fraction * min(sphere_voxels, objects.median_size)


def compute_min_object_confidence(decoding: Instances, objects: Objects) -> float:
    """Return the minimum mean foreground probability of an object that is not background.

    It is the model's minimum confidence, or a value derived from the object that contains the median voxel, whichever
    is higher: background in some stacks gets higher probabilities than objects in other stacks. The derived value is at
    most `MAX_REQUIRED_CONFIDENCE`.
    """
    if not decoding.min_relative_odds or not len(objects):
        return decoding.min_confidence
    typical_confidence = objects.median_confidence
    odds = decoding.min_relative_odds * typical_confidence
    return max(decoding.min_confidence, min(odds / (odds + 1 - typical_confidence), MAX_REQUIRED_CONFIDENCE))
