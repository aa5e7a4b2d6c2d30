"""Labels of objects from the basins of a watershed, and from those of other labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.types import Objects, Segmentation, label_dtype
from service.engine.cuda.events import mark_end
from service.inference.decoding.basin_merging import Persistence, merge_shallow_basins
from service.inference.decoding.watershed_kernel import PROBABILITY_ONE, ObjectFilter, keep_all, number_objects

if TYPE_CHECKING:
    from service.inference.decoding.watershed import Basins

# Voxels that get their labels at once: few calls for a small volume, little memory for a large one.
LOOKUP_VOXELS = 2**20

# Largest labels, in bytes, that are returned in the pinned memory to which a GPU copies them.
PINNED_BYTES = 2**28


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
    group, peaks = merge(basins, persistence), persistence.distance(basins.peaks).cpu().numpy()
    objects = gather_objects(group, basins.voxels.numpy(), basins.foreground.numpy(), peaks)
    kept = objects.voxels >= max(minimum_size, 1)
    if drop_border:
        kept[group[_at_faces(basins).numpy()]] = False
    objects = objects.select(kept)
    chosen = keep(objects)
    kept[kept] = chosen
    objects = objects.select(chosen)
    # The background has basin -1, so its label is the last one.
    label_of_basin = np.append(number_objects(kept)[1:][group], 0).astype(label_dtype(len(objects)))
    return look_up_labels(basins.pieces, label_of_basin[basins.basin_of.numpy()]), objects


def gather_objects(
    group: NDArray[np.int64], voxels: NDArray[np.int64], foreground: NDArray[np.int64], peaks: NDArray[np.float64]
) -> Objects:
    """Return the objects that basins are merged to.

    group                      object of every basin, int64 [R], from 0
    voxels, foreground, peaks  of every basin: as of `Basins`, and the distance at its maximum
    """
    found = int(group.max(initial=-1)) + 1
    sums, highest = np.zeros((2, found), np.int64), np.full(found, -np.inf)
    np.add.at(sums[0], group, voxels)
    np.add.at(sums[1], group, foreground)
    np.fmax.at(highest, group, peaks)
    return Objects.from_sums(sums[0], sums[1] / PROBABILITY_ONE, highest)


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


def keep_objects(segmentation: Segmentation, kept: NDArray[np.bool_]) -> Segmentation:
    """Return labels of only the objects for which `kept` [N] is true, numbered without gaps."""
    count = int(np.count_nonzero(kept))
    numbers = number_objects(kept).astype(label_dtype(count))
    objects = None if segmentation.objects is None else segmentation.objects.select(kept)
    return replace(segmentation, pixels=numbers[segmentation.pixels], count=count, objects=objects)
