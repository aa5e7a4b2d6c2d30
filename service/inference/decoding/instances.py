"""Decoding of instances: the watershed of smoothed distances, with shallow maxima merged into higher ones.

A stack no higher than a window arrives in rows that hold all of z. Each row is decoded as planes along y while later
rows are computed; ties are broken by the same places as along z, so the basins are equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size, VoxelSize
from service.core.types import Objects, Segmentation, label_dtype
from service.engine.cuda.events import mark_end
from service.inference.decoding.basin_joining import merge_basins_on_device
from service.inference.decoding.basin_merging import Persistence, merge_shallow_basins
from service.inference.decoding.fill_holes import fill_holes
from service.inference.decoding.watershed import PROBABILITY_ONE, Basins, Watershed, foreground_codes
from service.inference.decoding.watershed_kernel import (
    ObjectFilter,
    WatershedKernel,
    WatershedParameters,
    keep_all,
    number_objects,
    watershed_kernel,
)
from service.models.spec import Instances, ModelSpec

# Voxels that get their labels at once: few calls for a small volume, little memory for a large one.
LOOKUP_VOXELS = 2**20

# Largest labels, in bytes, that are returned in the pinned memory to which a GPU copies them.
PINNED_BYTES = 2**28

# Mean probability of foreground that no object has to exceed for the sake of others that are more certain.
CERTAIN = 0.9

# Voxels, with the rims of their planes, that a device with memory of its own processes as one block; 36 bytes each.
WHOLE_VOXELS = 2**26

# Voxels whose neighbours such a device inspects in one operation.
WHOLE_NEIGHBOURS = 2**18


class InstanceDecoder:
    """Decoder of objects, numbered from 1 in the order of the places of their peaks.

    It keeps one int32 per voxel, and the distances of planes that are not complete.

    whole  decodes once all scores are there, by torch on the device of these, without waiting for it before
    """

    def __init__(  # noqa: PLR0913
        self,
        spec: ModelSpec,
        decoding: Instances,
        size: Size,
        voxel_size: VoxelSize | None,
        kernel: WatershedKernel = watershed_kernel,
        *,
        whole: bool = False,
    ) -> None:
        self._whole = whole
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

    def add(self, z0: int, y0: int, scores: Tensor) -> None:  # noqa: ARG002
        """Add raw scores [1, K, z, y, X] of the planes from `z0` and the rows from `y0` on, like `Decoder.add`."""
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
            if self._whole:
                self._watershed = WholeWatershed(
                    self._size, self._threshold, self._persistence, device, along_y=along_y
                )
            elif self._kernel.supports(device, self._size):
                parameters = WatershedParameters(self._threshold, self._persistence.depth, self._persistence.logits)
                self._watershed = self._kernel.start(self._size, parameters, along_y=along_y)
            else:
                self._watershed = TorchWatershed(
                    self._size, self._threshold, self._persistence, device, along_y=along_y
                )
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


class StreamingWatershed(Protocol):
    """Watershed of a height map that arrives in planes, computed by the C++ kernel or by torch."""

    def add(self, heights: Tensor, inside: Tensor) -> None:
        """Add the next planes; `KernelWatershed.add` states shapes and dtypes."""

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        """Return labels [Z, Y, X] and the objects; `KernelWatershed.labels` documents dtypes and parameters."""


class TorchWatershed:
    """A `StreamingWatershed` on any device, computed by torch."""

    def __init__(  # noqa: PLR0913
        self,
        size: Size,
        threshold: float,
        persistence: Persistence,
        device: torch.device,
        block: int | None = None,
        *,
        along_y: bool = False,
    ) -> None:
        self._threshold, self._persistence = threshold, persistence
        self._watershed = Watershed(size, persistence.floor, device, block, along_y=along_y)

    def add(self, heights: Tensor, inside: Tensor) -> None:
        self._watershed.add(heights.float(), threshold_mask(inside, self._threshold), foreground_codes(inside))

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        basins = self._watershed.finish()
        return label_basins(basins, self._persistence, minimum_size, drop_border=drop_border, keep=keep)


class WholeWatershed:
    """A `StreamingWatershed` that gathers all planes on their device, and then works on up to `WHOLE_VOXELS` at once.

    The host waits for the device a few times for each block, however many parts the planes came in, and while basins
    are joined there.
    """

    def __init__(  # noqa: PLR0913
        self,
        size: Size,
        threshold: float,
        persistence: Persistence,
        device: torch.device,
        block: int = WHOLE_VOXELS,
        *,
        along_y: bool = False,
    ) -> None:
        self._threshold, self._persistence, self._device = threshold, persistence, device
        self._block, self._axis, self._end = block, int(along_y), 0
        self._size = size
        self._heights = torch.empty(size, device=device)
        self._inside = torch.empty(size, dtype=torch.bool, device=device)
        self._codes = torch.empty(size, dtype=torch.uint8, device=device)

    def add(self, heights: Tensor, inside: Tensor) -> None:
        planes = heights.shape[self._axis]
        parts = (
            (self._heights, heights),
            (self._inside, threshold_mask(inside, self._threshold)),
            (self._codes, foreground_codes(inside)),
        )
        for whole, part in parts:
            whole.narrow(self._axis, self._end, planes).copy_(part)
        self._end += planes

    def labels(
        self, minimum_size: int, *, drop_border: bool, keep: ObjectFilter = keep_all
    ) -> tuple[NDArray[np.unsignedinteger], Objects]:
        watershed = Watershed(
            self._size, self._persistence.floor, self._device, self._block, neighbours=WHOLE_NEIGHBOURS
        )
        watershed.add(self._heights, self._inside, self._codes)
        basins = watershed.finish()
        del watershed, self._heights, self._inside, self._codes
        merge = merge_basins_on_device
        return label_basins(basins, self._persistence, minimum_size, drop_border=drop_border, keep=keep, merge=merge)


class Smoother:
    """Binomial filter (weights 1, 2, 1 along each axis), applied `times` times to planes that arrive in parts.

    The outermost voxel is repeated beyond the faces of the volume. A plane leaves once the planes above that it needs
    have arrived, so the result does not depend on how the planes were cut.
    """

    def __init__(self, times: int) -> None:
        self._times = times
        self._planes: Tensor | None = None
        self._masks: list[Tensor] = []

    def add(self, heights: Tensor, inside: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Add the next planes, float32 and any [planes, Y, X], and yield the finished ones."""
        if not self._times:
            yield heights, inside
            return
        first = heights[:1].expand(self._times, -1, -1) if self._planes is None else self._planes
        self._planes = torch.cat((first, heights))
        self._masks.append(inside)
        yield from self._pop_finished()

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the planes that waited for others above them."""
        if self._planes is not None:
            self._planes = torch.cat((self._planes, self._planes[-1:].expand(self._times, -1, -1)))
            yield from self._pop_finished()

    def _pop_finished(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._planes is None or (finished := len(self._planes) - 2 * self._times) < 1:
            return
        heights, masks = self._planes, torch.cat(self._masks)
        for _ in range(self._times):
            heights = (heights[:-2] + heights[2:]) * 0.25 + heights[1:-1] * 0.5
            for axis in (1, 2):
                heights = _smooth_axis(heights, axis)
        self._planes, self._masks = self._planes[finished:], [masks[finished:]]
        yield heights, masks[:finished]


def _smooth_axis(heights: Tensor, axis: int) -> Tensor:
    """Filter [z, y, x] with weights 1, 2, 1 along one axis, repeating the ends."""
    last = heights.shape[axis] - 1
    before = torch.cat((heights.narrow(axis, 0, 1), heights.narrow(axis, 0, last)), axis)
    after = torch.cat((heights.narrow(axis, 1, last), heights.narrow(axis, last, 1)), axis)
    return (before + after) * 0.25 + heights * 0.5


def label_basins(  # noqa: PLR0913
    basins: Basins,
    persistence: Persistence,
    minimum_size: int,
    *,
    drop_border: bool = False,
    keep: ObjectFilter = keep_all,
    merge: Callable[[Basins, Persistence], NDArray[np.int64]] = merge_shallow_basins,
) -> tuple[NDArray[np.unsignedinteger], Objects]:
    """Merge basins into objects; return labels [Z, Y, X], uint16 or uint32, from 1, and the objects.

    minimum_size  voxels that an object must have
    drop_border   and it must not touch a face of the volume, unless that is one voxel wide there
    keep          returns which of these objects get a label
    merge         returns the object of every basin
    """
    # NumPy takes a fraction of torch's time for so few numbers.
    group = merge(basins, persistence)
    found = int(np.max(group, initial=-1)) + 1
    voxels, foreground = np.zeros((2, found), np.int64)
    np.add.at(voxels, group, basins.voxels.numpy())
    np.add.at(foreground, group, basins.foreground.numpy())
    peaks = np.full(found, -np.inf)
    np.fmax.at(peaks, group, persistence.distance(basins.peaks).cpu().numpy())
    kept = voxels >= max(minimum_size, 1)
    if drop_border:
        kept[group[_at_faces(basins).numpy()]] = False
    objects = Objects.from_sums(voxels[kept], foreground[kept] / PROBABILITY_ONE, peaks[kept])
    chosen = keep(objects)
    kept[kept] = chosen
    objects = objects.select(chosen)
    # The background has basin -1, so its label is the last one.
    label_of_basin = np.append(number_objects(kept)[1:][group], 0).astype(label_dtype(len(objects)))
    return look_up_labels(basins.pieces, label_of_basin[basins.basin_of.numpy()]), objects


def keep_objects(segmentation: Segmentation, kept: NDArray[np.bool_]) -> Segmentation:
    """Return labels of only the objects for which `kept` [N] is true, numbered without gaps."""
    count = int(np.count_nonzero(kept))
    numbers = number_objects(kept).astype(label_dtype(count))
    objects = None if segmentation.objects is None else segmentation.objects.select(kept)
    return replace(segmentation, pixels=numbers[segmentation.pixels], count=count, objects=objects)


def look_up_labels(pieces: Tensor, label_of: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the label of each voxel's piece, [Z, Y, X] of the dtype of `label_of` [P], which has one for each piece.

    The device looks up signed integers with the same bits, because torch supports few operations on unsigned ones.
    """
    signed = torch.from_numpy(label_of.view(f"i{label_of.itemsize}")).to(pieces.device)
    if pieces.is_cuda and pieces.numel() * label_of.itemsize <= PINNED_BYTES:
        # Torch reuses pinned memory for the next labels; the kernel would first clear every page of new memory.
        return _download(signed, pieces).numpy().view(label_of.dtype)
    labels = np.empty(pieces.shape, label_of.dtype)
    step = max(LOOKUP_VOXELS // max(pieces[0].numel(), 1), 1)
    for z0 in range(0, len(labels), step):
        labels[z0 : z0 + step] = _download(signed, pieces[z0 : z0 + step]).numpy().view(labels.dtype)
    return labels


def _download(label_of: Tensor, pieces: Tensor) -> Tensor:
    """Return the label of each voxel's piece on the host, in pinned memory if it comes from a GPU."""
    labels = label_of.index_select(0, pieces.flatten()).view(pieces.shape)
    if not labels.is_cuda:
        return labels
    host = torch.empty(labels.shape, dtype=labels.dtype, pin_memory=True)
    host.copy_(labels, non_blocking=True)
    mark_end(labels.device)()
    return host


def threshold_mask(scores: Tensor, threshold: float) -> Tensor:
    """Return where scores exceed the threshold, bool of the same shape; a bool tensor is returned as it is."""
    if scores.dtype == torch.bool:
        return scores
    if scores.device.type != "cpu":
        return scores > threshold
    # NumPy takes a sixth of torch's time on one thread.
    return torch.from_numpy(scores.float().numpy() > np.float32(threshold))


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _at_faces(basins: Basins) -> Tensor:
    """Return the basins with a voxel in the first or last plane along an axis of several planes, a CPU int64 [N]."""
    faces = [
        basins.pieces.select(axis, end).flatten()
        for axis, edge in enumerate(basins.pieces.shape)
        for end in (0, -1)
        if edge > 1
    ]
    touching = basins.basin_of[torch.unique(torch.cat(faces)).cpu().long()] if faces else basins.basin_of[:0]
    return touching[touching >= 0]
