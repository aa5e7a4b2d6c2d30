"""Functions that number labels, look up labels, and select labeled objects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.types import Segmentation, choose_label_dtype
from service.engine.cuda.events import record_end

# Number of voxels whose labels are looked up together. It is large enough that small volumes need few calls, and small
# enough that large volumes need little memory.
LOOKUP_VOXELS = 2**20

# Maximum size of labels from a GPU that are returned in the pinned memory to which they were copied.
MAX_PINNED_BYTES = 2**28


def number_objects(is_kept: NDArray[np.bool_]) -> NDArray[np.unsignedinteger]:
    """Return the new number of each label, uint16 or uint32 [N + 1]; 0 for the background and for removed objects.

    Objects whose entry in `is_kept` [N] is true are numbered from 1 in order.
    """
    numbers = np.append(0, np.where(is_kept, is_kept.cumsum(), 0))
    return numbers.astype(choose_label_dtype(int(np.count_nonzero(is_kept))))


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


def keep_objects(segmentation: Segmentation, is_kept: NDArray[np.bool_]) -> Segmentation:
    """Return a segmentation with only the objects whose entry in `is_kept` [N] is true, numbered without gaps."""
    pixels, count = number_objects(is_kept)[segmentation.pixels], int(np.count_nonzero(is_kept))
    objects = None if segmentation.objects is None else segmentation.objects.select(is_kept)
    return replace(segmentation, pixels=pixels, count=count, objects=objects)
