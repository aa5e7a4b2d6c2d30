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
Mask = NDArray[np.bool_]

# Number of runs whose voxels are examined together.
RUNS_PER_STEP = 2**15


class Background(NamedTuple):
    """Runs of background voxels along x, in the order of their positions, and the components that they form.

    start      flat index of the first voxel of each run, [N]
    end        flat index after the last voxel of each run, [N]
    component  face-connected component of each run, numbered from 0, [N]
    """

    start: Indices
    end: Indices
    component: Indices

    @property
    def num_components(self) -> int:
        """Number of components."""
        return int(self.component.max(initial=-1)) + 1

    def select(self, mask: Mask) -> Background:
        """Return the runs whose entry in `mask` is true."""
        return Background(*(column[mask] for column in self))

    def find_components(self, voxels: Indices) -> Indices:
        """Return the component of each voxel, given its flat index; -1 if it belongs to an object."""
        if not len(self.start):
            return np.full(voxels.shape, -1)
        run = np.searchsorted(self.start, voxels, side="right") - 1
        return np.where((run >= 0) & (voxels < self.end[run]), self.component[run], -1)


def fill_holes(labels: Labels) -> None:
    """Fill every hole with the label of the object around it, in place.

    labels  unsigned integers [Z, Y, X] in contiguous memory, 0 for the background

    A hole is a face-connected component of the background that does not touch a face of the volume and touches only one
    object. Background between two objects is not filled. Axes that are only one voxel long have no faces.
    """
    background = find_background(labels)
    is_open = find_open_components(background, labels.shape, list_faces(labels.shape))
    holes = background.select(~is_open[background.component])
    lowest, highest = find_neighbor_labels(labels, holes, len(is_open))
    fill_components(labels, holes, np.where(lowest == highest, lowest, 0))


def list_faces(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the faces of a volume: the axis, and 0 for the first or -1 for the last layer along the axis."""
    return [(axis, side) for axis, length in enumerate(shape) if length > 1 for side in (0, -1)]


def find_background(labels: Labels) -> Background:
    """Return the components of the background of a volume [Z, Y, X]."""
    start, end = _find_background_runs(labels)
    height, width = labels.shape[1:]
    has_next_row = start // width % height < height - 1
    pairs = [
        _find_adjacent_runs(start, end, has_next_row, width),
        _find_adjacent_runs(start, end, np.ones(len(start), bool), height * width),
    ]
    return Background(start, end, label_groups(len(start), *map(np.concatenate, zip(*pairs, strict=True))))


def _find_background_runs(labels: Labels) -> tuple[Indices, Indices]:
    """Return the flat indices of the first voxel of each run of zeros, and of the voxel after its last one."""
    starts, ends = list[Indices](), list[Indices]()
    height, width = labels.shape[1:]
    is_background = np.zeros((height, width + 2), np.int8)
    for z, plane in enumerate(labels):
        is_background[:, 1:-1] = plane == 0
        steps = np.diff(is_background, axis=1)
        for edges, step in ((starts, 1), (ends, -1)):
            row, x = np.nonzero(steps == step)
            edges.append((row + z * height) * width + x)
    return np.concatenate(starts), np.concatenate(ends)


def _find_adjacent_runs(start: Indices, end: Indices, mask: Mask, step: int) -> tuple[Indices, Indices]:
    """Return pairs of runs with neighboring voxels. The second run is in the row `step` voxels after the first.

    Only runs for which `mask` is true can be the first run of a pair.
    """
    runs = np.flatnonzero(mask)
    first = np.searchsorted(end, start[runs] + step, side="right")
    counts = np.searchsorted(start, end[runs] + step, side="left") - first
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(runs, counts), np.repeat(first, counts) + offsets


def label_groups(count: int, first: Indices, second: Indices) -> Indices:
    """Return the groups that pairs of nodes form: the group of each of `count` nodes, numbered from 0 by first node."""
    parent = np.arange(count)
    while len(first):
        lower, upper = np.minimum(parent[first], parent[second]), np.maximum(parent[first], parent[second])
        np.minimum.at(parent, upper, lower)
        while not np.array_equal(grandparent := parent[parent], parent):
            parent = grandparent
        is_separate = parent[first] != parent[second]
        first, second = first[is_separate], second[is_separate]
    numbers: Indices = (parent == np.arange(count)).cumsum() - 1
    return numbers[parent]


def find_open_components(background: Background, shape: tuple[int, ...], faces: list[tuple[int, int]]) -> Mask:
    """Return for each component whether it has a voxel in one of the faces, given as by `list_faces`."""
    (_, height, width), row = shape, background.start // shape[2]
    first = (row // height, row % height, background.start % width)
    last = (*first[:2], (background.end - 1) % width)
    is_open = np.zeros(background.num_components, bool)
    for axis, side in faces:
        touches_face = last[axis] == shape[axis] - 1 if side else first[axis] == 0
        is_open[background.component[touches_face]] = True
    return is_open


def find_neighbor_labels(labels: Labels, background: Background, num_components: int) -> tuple[Labels, Labels]:
    """Return the lowest and the highest label in the volume that touch each component, [C] each.

    If no label touches a component, the lowest label is the maximum of the data type, and the highest label is 0. If
    the two labels differ, they are those of any two objects that touch the component.
    """
    lowest, highest = (
        np.full(num_components, np.iinfo(labels.dtype).max, labels.dtype),
        np.zeros(num_components, labels.dtype),
    )
    flat_labels, (height, width) = labels.reshape(-1), labels.shape[1:]
    has_previous, has_next = background.start % width > 0, background.end % width > 0
    for voxels, mask in ((background.start - 1, has_previous), (background.end, has_next)):
        add_contacts(lowest, highest, background.component[mask], flat_labels[voxels[mask]])
    # Most components touch several objects along x, so only few voxels remain.
    background = background.select((lowest >= highest)[background.component])
    for first_run in range(0, len(background.start), RUNS_PER_STEP):
        start, end, component = (column[first_run : first_run + RUNS_PER_STEP] for column in background)
        lengths = end - start
        voxels = np.arange(lengths.sum()) + np.repeat(start + lengths - np.cumsum(lengths), lengths)
        y, components = voxels // width % height, np.repeat(component, lengths)
        for neighbors, mask in (
            (voxels - width, y > 0),
            (voxels + width, y < height - 1),
            (voxels - height * width, voxels >= height * width),
            (voxels + height * width, voxels < labels.size - height * width),
        ):
            add_contacts(lowest, highest, components[mask], flat_labels[neighbors[mask]])
    return lowest, highest


def add_contacts(lowest: Labels, highest: Labels, components: Indices, labels: Labels) -> None:
    """Update the lowest and highest labels [C] with the labels [N] that touch components [N]; 0 is no label."""
    is_object = labels > 0
    components, labels = components[is_object], labels[is_object]
    np.minimum.at(lowest, components, labels)
    np.maximum.at(highest, components, labels)


def fill_components(labels: Labels, background: Background, label_of_component: Labels) -> None:
    """Fill components of the background in place with their labels [C]; 0 means that a component is not filled."""
    flat_labels = labels.reshape(-1)
    run_labels = label_of_component[background.component]
    filled_runs = np.flatnonzero(run_labels)
    for start, end, label in zip(
        background.start[filled_runs], background.end[filled_runs], run_labels[filled_runs], strict=True
    ):
        flat_labels[start:end] = label
