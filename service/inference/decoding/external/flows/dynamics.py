"""Movement of voxels along a flow, and grouping of the voxels that end at the same place, as in Cellpose 3.

Algorithm: Stringer et al., "Cellpose: a generalist algorithm for cellular segmentation", Nature Methods 2021. The
operations and their order are those of `steps_interp` and `get_masks_torch`, so that rounding is the same. Memory is
limited: voxels move independently, so they are moved in groups, and maxima are searched only where voxels have arrived.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.core.errors import Cancelled
from service.core.quantities import Size
from service.core.types import CancellationCheck

Indices = NDArray[np.int64]

# Number of voxels that a thread moves at a time.
VOXELS_PER_THREAD = 2**17
# Half of the edge length of the box in which the voxels around a maximum are collected, and number of steps.
REACH = 5
# Half of the edge length of the box in which a maximum must be the highest.
PEAK_RADIUS = 2
# A place where more voxels end is a maximum, and a place where more voxels end belongs to a maximum next to it.
MIN_PEAK_COUNT = 10
MIN_COUNT = 2
# Number of maxima whose surroundings are processed at a time.
PEAKS_PER_STEP = 256


def follow_flow(flow: Tensor, start: Indices, steps: int, cancelled: CancellationCheck) -> NDArray[np.int32]:
    """Move voxels along a flow, with linear interpolation, and return the voxels in which they end, int32 [N, 3].

    flow   length of a step along (x, y, z) in voxels, float32 [3, Z, Y, X]; it is overwritten
    start  flat indices of the voxels, [N]

    Raises Cancelled.
    """
    size = flow.shape[1:]
    # Positions are relative: -1 and 1 are the centers of the first and the last voxel. As in Cellpose, they are
    # interpolated as if these were the faces of the volume.
    lengths = [float(max(length - 1, 1)) for length in reversed(size)]
    for component, length in zip(flow, lengths, strict=True):
        component.mul_(2.0 / length)
    targets = np.empty((len(start), 3), np.int32)
    num_threads = torch.get_num_threads()
    # PyTorch distributes the images of a batch over its threads, but not the positions in an image.
    batch = flow[None].expand(num_threads, -1, -1, -1, -1)
    group_size = num_threads * VOXELS_PER_THREAD
    for first in range(0, len(start), group_size):
        indices = start[first : first + group_size]
        z, y, x = np.unravel_index(indices, size)
        positions = torch.zeros((-(-len(indices) // num_threads) * num_threads, 3))
        for axis, (coordinates, length) in enumerate(zip((x, y, z), lengths, strict=True)):
            positions[: len(indices), axis] = torch.from_numpy(coordinates).float().div_(length)
        positions.mul_(2).sub_(1)
        grid = positions.view(num_threads, 1, 1, -1, 3)
        for _ in range(steps):
            if cancelled():
                raise Cancelled("The request was canceled while its objects were being decoded.")
            grid.add_(functional.grid_sample(batch, grid, align_corners=False).permute(0, 2, 3, 4, 1)).clamp_(-1, 1)
        positions.add_(1).mul_(0.5)
        for axis, length in enumerate(lengths):
            positions[:, axis].mul_(length)
        targets[first : first + group_size] = positions[: len(indices)].flip(1).int().numpy()
    return targets


def group_targets(targets: NDArray[np.int32], size: Size) -> NDArray[np.int64]:
    """Return the number of the maximum to which the target of each voxel belongs, from 1, or 0 if there is none, [N].

    targets  voxels in which voxels end, int32 [N, 3]

    A maximum collects the places around it that are connected to it. If several maxima reach a place, the one at which
    the most voxels end gets it.
    """
    padded_size = tuple(length + 2 * REACH for length in size)
    places = np.ravel_multi_index(tuple(targets[:, axis] + REACH for axis in range(3)), padded_size)
    counts = np.bincount(places, minlength=int(np.prod(padded_size))).astype(np.int32)
    peaks = _find_peaks(counts, padded_size)
    # Maxima with more voxels come later and overwrite the others. Among equal numbers, the order is that of PyTorch's
    # default sort, as in Cellpose.
    peaks = peaks[torch.from_numpy(counts[peaks]).argsort().numpy()]
    owners = np.zeros(len(counts), np.int32)
    box = _list_offsets(REACH, padded_size)
    edge = 2 * REACH + 1
    for first in range(0, len(peaks), PEAKS_PER_STEP):
        boxes = peaks[first : first + PEAKS_PER_STEP, None] + box
        is_dense = torch.from_numpy((counts[boxes] > MIN_COUNT).astype(np.float32)).view(-1, 1, edge, edge, edge)
        is_reached = torch.zeros_like(is_dense)
        is_reached[..., REACH, REACH, REACH] = 1
        for _ in range(REACH):
            is_reached = functional.max_pool3d(is_reached, 3, 1, 1).mul_(is_dense)
        number, offset = np.nonzero(is_reached.view(len(boxes), -1).numpy())
        np.maximum.at(owners, boxes[number, offset], (number + first + 1).astype(np.int32))
    return owners[places].astype(np.int64)


def _find_peaks(counts: NDArray[np.int32], size: tuple[int, ...]) -> Indices:
    """Return the flat indices of the places at which most voxels end among those around them."""
    candidates = np.flatnonzero(counts > MIN_PEAK_COUNT)
    box = _list_offsets(PEAK_RADIUS, size)
    is_peak = np.ones(len(candidates), np.bool_)
    for offset in box:
        is_peak &= counts[candidates] >= counts[candidates + offset]
    return candidates[is_peak]


def _list_offsets(radius: int, size: tuple[int, ...]) -> Indices:
    """Return the differences of the flat indices of the voxels of a box from that of its center."""
    shifts = np.indices((2 * radius + 1,) * 3).reshape(3, -1) - radius
    offsets: Indices = (shifts[0] * size[1] + shifts[1]) * size[2] + shifts[2]
    return offsets
