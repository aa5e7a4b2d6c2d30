"""Functions that merge watershed basins into labeled objects, and select labeled objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.types import Objects, Segmentation, choose_label_dtype
from service.engine.cuda.events import record_end
from service.inference.decoding.basin_merging import MergeFunction, Persistence, merge_shallow_basins
from service.inference.decoding.watershed_kernel import PROBABILITY_ONE, ObjectFilter, keep_all_objects, number_objects

if TYPE_CHECKING:
    from service.inference.decoding.watershed import Basins

# Number of voxels whose labels are looked up together. It is large enough that small volumes need few calls, and small
# enough that large volumes need little memory.
LOOKUP_VOXELS = 2**20

# Maximum size of labels from a GPU that are returned in the pinned memory to which they were copied.
MAX_PINNED_BYTES = 2**28


def label_basins(  # noqa: PLR0913
    basins: Basins,
    persistence: Persistence,
    minimum_size: int,
    *,
    drop_border: bool = False,
    object_filter: ObjectFilter = keep_all_objects,
    merge: MergeFunction = merge_shallow_basins,
) -> tuple[NDArray[np.unsignedinteger], Objects]:
    """Merge basins into objects; return labels [Z, Y, X], uint16 or uint32, numbered from 1, and the objects.

    minimum_size   minimum number of voxels of an object
    drop_border    whether to remove objects that touch a face of the volume; axes that are only one voxel long have no
                   faces
    object_filter  selects which of the remaining objects get a label
    merge          returns the object of every basin
    """
    # NumPy is much faster than PyTorch for such small arrays.
    object_of_basin, peaks = (
        merge(basins, persistence),
        persistence.to_distances(basins.peaks).cpu().numpy(),
    )
    objects = gather_objects(object_of_basin, basins.voxels.numpy(), basins.foreground.numpy(), peaks)
    is_kept = objects.voxel_counts >= max(minimum_size, 1)
    if drop_border:
        is_kept[object_of_basin[_find_basins_at_faces(basins).numpy()]] = False
    objects = objects.select(is_kept)
    is_selected = object_filter(objects)
    is_kept[is_kept] = is_selected
    objects = objects.select(is_selected)
    # The background has basin -1, which indexes the last entry.
    label_of_basin = np.append(number_objects(is_kept)[1:][object_of_basin], 0).astype(choose_label_dtype(len(objects)))
    return look_up_labels(basins.pieces, label_of_basin[basins.basin_of_piece.numpy()]), objects


def gather_objects(
    object_of_basin: NDArray[np.int64],
    voxels: NDArray[np.int64],
    foreground: NDArray[np.int64],
    peaks: NDArray[np.float64],
) -> Objects:
    """Return the objects that basins are merged into.

    object_of_basin     object of every basin, int64 [R], numbered from 0
    voxels, foreground  values of every basin, as in `Basins`
    peaks               distance at the maximum of every basin
    """
    object_count = int(object_of_basin.max(initial=-1)) + 1
    sums, max_peaks = np.zeros((2, object_count), np.int64), np.full(object_count, -np.inf)
    np.add.at(sums[0], object_of_basin, voxels)
    np.add.at(sums[1], object_of_basin, foreground)
    np.fmax.at(max_peaks, object_of_basin, peaks)
    return Objects.from_sums(sums[0], sums[1] / PROBABILITY_ONE, max_peaks)


def look_up_labels(pieces: Tensor, label_of_piece: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the label of each voxel's piece, [Z, Y, X], from the labels of all pieces, `label_of_piece` [P].

    The result has the dtype of `label_of_piece`. PyTorch supports few operations on unsigned integers, so the device
    looks up signed integers with the same bits.
    """
    signed_labels = torch.from_numpy(label_of_piece.view(f"i{label_of_piece.itemsize}")).to(pieces.device)
    if pieces.is_cuda and pieces.numel() * label_of_piece.itemsize <= MAX_PINNED_BYTES:
        # PyTorch reuses pinned memory for the next labels. The operating system would first clear every page of new
        # memory.
        return _look_up_and_download(signed_labels, pieces).numpy().view(label_of_piece.dtype)
    labels = np.empty(pieces.shape, label_of_piece.dtype)
    step = max(LOOKUP_VOXELS // max(pieces[0].numel(), 1), 1)
    for z0 in range(0, len(labels), step):
        labels[z0 : z0 + step] = _look_up_and_download(signed_labels, pieces[z0 : z0 + step]).numpy().view(labels.dtype)
    return labels


def _look_up_and_download(label_of_piece: Tensor, pieces: Tensor) -> Tensor:
    """Return the label of each voxel's piece on the host, in pinned memory if it comes from a GPU."""
    labels = label_of_piece.index_select(0, pieces.flatten()).view(pieces.shape)
    if not labels.is_cuda:
        return labels
    host_labels = torch.empty(labels.shape, dtype=labels.dtype, pin_memory=True)
    host_labels.copy_(labels, non_blocking=True)
    record_end(labels.device)()
    return host_labels


def _find_basins_at_faces(basins: Basins) -> Tensor:
    """Return the basins that touch a face of the volume, int64 [N] on the CPU.

    Axes that are only one voxel long have no faces.
    """
    faces = [
        basins.pieces.select(axis, end).flatten()
        for axis, length in enumerate(basins.pieces.shape)
        for end in (0, -1)
        if length > 1
    ]
    basins_at_faces = (
        basins.basin_of_piece[torch.unique(torch.cat(faces)).cpu().long()] if faces else basins.basin_of_piece[:0]
    )
    return basins_at_faces[basins_at_faces >= 0]


def keep_objects(segmentation: Segmentation, is_kept: NDArray[np.bool_]) -> Segmentation:
    """Return a segmentation with only the objects whose entry in `is_kept` [N] is true, numbered without gaps."""
    num_objects = int(np.count_nonzero(is_kept))
    new_labels = number_objects(is_kept).astype(choose_label_dtype(num_objects))
    objects = None if segmentation.objects is None else segmentation.objects.select(is_kept)
    return replace(segmentation, pixels=new_labels[segmentation.pixels], count=num_objects, objects=objects)
