"""Fill holes, which are regions of background that are enclosed by one object.

The background is stored as runs along x, because there are far fewer runs than voxels. Touching runs are joined by
union-find, vectorized over all runs (run-based connected components: He, Chao and Suzuki 2008).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[Any]
Indices = NDArray[np.intp]


class Runs(NamedTuple):
    """Runs of background voxels along x, in ascending order of row and start.

    row    row number, z * Y + y
    start  first voxel along x
    end    one after the last voxel along x
    """

    row: Indices
    start: Indices
    end: Indices


def fill_holes(labels: Labels) -> None:
    """Fill every hole with the label of the object around it, in place.

    labels  unsigned integers [Z, Y, X], 0 for the background

    A hole is a face-connected component of the background that does not touch a face of the volume and touches only one
    object. Background between two objects is not filled. Axes that are only one voxel long have no faces.
    """
    runs = _find_background_runs(labels)
    components = _label_components(runs, labels.shape)
    is_outside = np.zeros(len(components), bool)
    is_outside[components[_find_face_contacts(runs, labels.shape)]] = True
    is_closed = ~is_outside[components]
    runs, components = Runs(*(column[is_closed] for column in runs)), components[is_closed]
    lowest_labels, highest_labels = _find_neighbor_labels(labels, runs, components)
    label_rows = labels.reshape(-1, labels.shape[2])
    for row, start, end, lowest, highest in zip(*runs, lowest_labels, highest_labels, strict=True):
        if lowest == highest:
            label_rows[row, start:end] = lowest


def _find_background_runs(labels: Labels) -> Runs:
    """Return the runs of voxels with label 0."""
    rows, starts, ends = [], [], []
    height, width = labels.shape[1:]
    is_background = np.zeros((height, width + 2), np.int8)
    for z, plane in enumerate(labels):
        is_background[:, 1:-1] = plane == 0
        steps = np.diff(is_background, axis=1)
        row, start = np.nonzero(steps == 1)
        rows.append(row + z * height)
        starts.append(start)
        ends.append(np.nonzero(steps == -1)[1])
    return Runs(np.concatenate(rows), np.concatenate(starts), np.concatenate(ends))


def _label_components(runs: Runs, shape: tuple[int, ...]) -> Indices:
    """Return for each run the index of the first run in its connected component."""
    height = shape[1]
    has_next_row = runs.row % height < height - 1
    pairs = [
        _find_adjacent_runs(runs, has_next_row, 1),
        _find_adjacent_runs(runs, np.ones(len(runs.row), bool), height),
    ]
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    parent = np.arange(len(runs.row))
    while len(first):
        lower, upper = np.minimum(parent[first], parent[second]), np.maximum(parent[first], parent[second])
        np.minimum.at(parent, upper, lower)
        while not np.array_equal(grandparent := parent[parent], parent):
            parent = grandparent
        is_separate = parent[first] != parent[second]
        first, second = first[is_separate], second[is_separate]
    return parent


def _find_adjacent_runs(runs: Runs, mask: NDArray[np.bool_], row_offset: int) -> tuple[Indices, Indices]:
    """Return pairs of runs that share an x coordinate. The second run is `row_offset` rows after the first.

    Only runs for which `mask` is true can be the first run of a pair.
    """
    width = int(np.max(runs.end, initial=0)) + 1
    indices = np.flatnonzero(mask)
    first_keys = (runs.row[indices] + row_offset) * width
    first = np.searchsorted(runs.row * width + runs.end, first_keys + runs.start[indices], side="right")
    last = np.searchsorted(runs.row * width + runs.start, first_keys + runs.end[indices], side="left")
    counts = last - first
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(indices, counts), np.repeat(first, counts) + offsets


def _find_face_contacts(runs: Runs, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return for each run whether it has a voxel at a face of the volume."""
    depth, height, width = shape
    z, y = np.divmod(runs.row, height)
    touches_face = np.zeros(len(runs.row), bool)
    for length, first, last in ((depth, z, z), (height, y, y), (width, runs.start, runs.end - 1)):
        if length > 1:
            touches_face |= (first == 0) | (last == length - 1)
    return touches_face


def _find_neighbor_labels(labels: Labels, runs: Runs, component: Indices) -> tuple[Labels, Labels]:
    """Return the lowest and the highest label around the component of each run. No run may touch a face."""
    depth, height, width = labels.shape
    lengths = runs.end - runs.start
    run_of_voxel = np.repeat(np.arange(len(lengths)), lengths)
    x = np.arange(len(run_of_voxel)) - np.repeat(np.cumsum(lengths) - lengths - runs.start, lengths)
    position = runs.row[run_of_voxel] * width + x
    flat_labels = labels.reshape(-1)
    lowest_labels = np.full(int(np.max(component, initial=-1)) + 1, np.iinfo(labels.dtype).max, labels.dtype)
    highest_labels = np.zeros_like(lowest_labels)
    for length, step in ((depth, height * width), (height, width), (width, 1)):
        for neighbor in (position - step, position + step) if length > 1 else ():
            neighbor_labels = flat_labels[neighbor]
            labeled_components, neighbor_labels = (
                component[run_of_voxel[neighbor_labels > 0]],
                neighbor_labels[neighbor_labels > 0],
            )
            np.minimum.at(lowest_labels, labeled_components, neighbor_labels)
            np.maximum.at(highest_labels, labeled_components, neighbor_labels)
    return lowest_labels[component], highest_labels[component]
