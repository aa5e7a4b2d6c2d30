"""Decoder of flows, which collects the scores of the whole volume before it moves the voxels along the flow."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size, VoxelSize
from service.core.types import CancellationCheck, Objects, Segmentation, choose_label_dtype, never_cancelled
from service.inference.decoding.external.flows.dynamics import Indices, follow_flow, group_targets
from service.inference.decoding.filters.fill_holes import fill_holes
from service.inference.decoding.labels import keep_objects
from service.inference.decoding.pieces import logit
from service.models.spec_parts import Flows

# Factor by which the network's flows are multiplied in training.
FLOW_SCALE = 5.0

Labels = NDArray[np.uint32]


class FlowDecoder:
    """Decoder of objects whose voxels move to the same place, numbered from 1 in the order of their first voxels.

    Every voxel may move through the whole volume, so no object is final before all slabs have arrived. Scores on a GPU
    are copied to the host.

    size       (Z, Y, X) of the volume
    cancelled  returns whether the request was canceled; called while the voxels are moved
    """

    def __init__(
        self,
        decoding: Flows,
        size: Size,
        voxel_size: VoxelSize | None,
        cancelled: CancellationCheck = never_cancelled,
    ) -> None:
        self._decoding, self._size, self._voxel_size, self._cancelled = decoding, size, voxel_size, cancelled
        self._min_logit = logit(decoding.threshold)
        self._logits = torch.zeros(size)
        # Along (x, y, z).
        self._flow = torch.zeros((3, *size))

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        """Add raw scores [1, 4, z, y, X], as in `Decoder.add`."""
        depth, num_rows = scores.shape[2:4]
        box = (slice(z0, z0 + depth), slice(y0, y0 + num_rows))
        logits, *flow = scores[0].float().cpu()
        self._logits[box] = logits
        is_foreground = logits > self._min_logit
        for component, values in zip(self._flow, reversed(flow), strict=True):
            component[box] = values * is_foreground / FLOW_SCALE

    def finish(self) -> Segmentation:
        """Return the labels [Z, Y, X]. Raises Cancelled."""
        foreground = torch.nonzero(self._logits.view(-1) > self._min_logit)[:, 0].numpy()
        labels = np.zeros(self._size, np.uint32)
        if len(foreground):
            targets = follow_flow(self._flow, foreground, self._decoding.steps, self._cancelled)
            self._flow = torch.empty(0)
            labels.reshape(-1)[foreground] = group_targets(targets, self._size)
            del targets
            self._clean(labels, foreground)
        segmentation = self._describe(labels)
        is_kept = self._select_objects(segmentation)
        return segmentation if is_kept.all() else keep_objects(segmentation, is_kept)

    def _clean(self, labels: Labels, foreground: Indices) -> None:
        """Remove objects that are too large or too small, and fill holes, in place."""
        decoding, flat_labels = self._decoding, labels.reshape(-1)
        counts = np.bincount(flat_labels[foreground], minlength=1)
        is_kept = (counts >= decoding.minimum_size) & (counts <= decoding.maximum_fraction * labels.size)
        _renumber(flat_labels, foreground, is_kept)
        if decoding.holes == "fill":
            _fill_objects(labels, foreground)
            foreground = np.flatnonzero(flat_labels)
            counts = np.bincount(flat_labels[foreground], minlength=1)
            _renumber(flat_labels, foreground, counts >= decoding.minimum_size)

    def _describe(self, labels: Labels) -> Segmentation:
        """Return a segmentation with the statistics of its objects."""
        foreground = np.flatnonzero(labels)
        object_labels = labels.reshape(-1)[foreground].astype(np.int64) - 1
        probabilities = torch.sigmoid(self._logits.view(-1)[torch.from_numpy(foreground)]).numpy()
        voxel_counts = np.bincount(object_labels)
        peaks = np.zeros(len(voxel_counts), np.float32)
        np.maximum.at(peaks, object_labels, probabilities)
        objects = Objects.from_sums(voxel_counts, np.bincount(object_labels, weights=probabilities), peaks)
        count = len(voxel_counts)
        return Segmentation(
            labels.astype(choose_label_dtype(count)), "labels", self._voxel_size, count, objects=objects
        )

    def _select_objects(self, segmentation: Segmentation) -> NDArray[np.bool_]:
        """Return which objects the parameters of the decoding do not exclude."""
        labels, objects = segmentation.pixels, segmentation.objects
        is_kept = np.ones(segmentation.count or 0, np.bool_)
        if objects is not None:
            is_kept &= objects.confidence >= self._decoding.min_confidence
        if self._decoding.border == "drop":
            for axis, length in enumerate(labels.shape):
                faces = labels.take((0, -1), axis) if length > 1 else labels[:0]
                is_kept[faces[faces > 0].astype(np.int64) - 1] = False
        return is_kept


def _renumber(flat_labels: Labels, foreground: Indices, is_kept: NDArray[np.bool_]) -> None:
    """Number the objects from 1 in the order of their first voxels, in place. Objects that are not kept become 0.

    foreground  indices of all labeled voxels, in ascending order
    is_kept     whether the object with each label is kept; the first entry is ignored
    """
    old_labels = flat_labels[foreground]
    first = np.full(len(is_kept), len(foreground))
    np.minimum.at(first, old_labels, np.arange(len(foreground)))
    first[0], first[~is_kept] = len(foreground), len(foreground)
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(foreground))]
    new_labels = np.zeros(len(is_kept), np.uint32)
    new_labels[order] = np.arange(1, len(order) + 1)
    flat_labels[foreground] = new_labels[old_labels]


def _fill_objects(labels: Labels, foreground: Indices) -> None:
    """Fill everything that an object encloses in its bounding box with its label, in the order of the labels."""
    object_labels = labels.reshape(-1)[foreground]
    count = int(object_labels.max(initial=0))
    bounds = []
    for coordinates, length in zip(np.unravel_index(foreground, labels.shape), labels.shape, strict=True):
        low, high = np.full(count + 1, length), np.zeros(count + 1, np.int64)
        np.minimum.at(low, object_labels, coordinates)
        np.maximum.at(high, object_labels, coordinates)
        bounds.append((low, high + 1))
    for label in range(1, count + 1):
        box = labels[tuple(slice(int(low[label]), int(high[label])) for low, high in bounds)]
        # Without a plane on either side, objects that are one voxel thick have no outside.
        mask = np.pad((box == label).view(np.uint8), 1)
        fill_holes(mask)
        box[mask[1:-1, 1:-1, 1:-1] > 0] = label
