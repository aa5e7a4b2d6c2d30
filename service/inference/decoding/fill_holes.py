"""Filling of holes: background that one object encloses.

Background is processed as runs along x, which are far fewer than voxels; touching runs are joined by union-find over
all of them at once (run-based connected components: He, Chao and Suzuki 2008).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[Any]
Indices = NDArray[np.intp]


class Runs(NamedTuple):
    """Runs of background, each within one row, in ascending order of row and start.

    row    z * Y + y
    start  first voxel along x; `end` is the one after the last
    """

    row: Indices
    start: Indices
    end: Indices


def fill_holes(labels: Labels) -> None:
    """Give every hole to the object around it, in place.

    labels  unsigned [Z, Y, X], 0 for the background

    A hole is background, connected through the faces of its voxels, that reaches no face of the volume and touches only
    one object; background between two objects stays. An axis of one voxel has no faces.
    """
    runs = _background(labels)
    component = _components(runs, labels.shape)
    outside = np.zeros(len(component), bool)
    outside[component[_at_faces(runs, labels.shape)]] = True
    closed = ~outside[component]
    runs, component = Runs(*(column[closed] for column in runs)), component[closed]
    least, most = _neighbours(labels, runs, component)
    flat = labels.reshape(-1, labels.shape[2])
    for row, start, end, low, high in zip(*runs, least, most, strict=True):
        if low == high:
            flat[row, start:end] = low


def _background(labels: Labels) -> Runs:
    """Return the runs of zeros."""
    rows, starts, ends = [], [], []
    height, width = labels.shape[1:]
    edges = np.zeros((height, width + 2), np.int8)
    for z, plane in enumerate(labels):
        edges[:, 1:-1] = plane == 0
        steps = np.diff(edges, axis=1)
        row, start = np.nonzero(steps == 1)
        rows.append(row + z * height)
        starts.append(start)
        ends.append(np.nonzero(steps == -1)[1])
    return Runs(np.concatenate(rows), np.concatenate(starts), np.concatenate(ends))


def _components(runs: Runs, shape: tuple[int, ...]) -> Indices:
    """Return for each run the number of the first run that it is connected with."""
    height = shape[1]
    inner = runs.row % height < height - 1
    pairs = [_touching(runs, inner, 1), _touching(runs, np.ones(len(runs.row), bool), height)]
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    parent = np.arange(len(runs.row))
    while len(first):
        lower, upper = np.minimum(parent[first], parent[second]), np.maximum(parent[first], parent[second])
        np.minimum.at(parent, upper, lower)
        while not np.array_equal(further := parent[parent], parent):
            parent = further
        apart = parent[first] != parent[second]
        first, second = first[apart], second[apart]
    return parent


def _touching(runs: Runs, among: NDArray[np.bool_], rows_on: int) -> tuple[Indices, Indices]:
    """Return pairs of runs that share an x, the second one `rows_on` rows after the first."""
    width = int(np.max(runs.end, initial=0)) + 1
    which = np.flatnonzero(among)
    base = (runs.row[which] + rows_on) * width
    first = np.searchsorted(runs.row * width + runs.end, base + runs.start[which], side="right")
    last = np.searchsorted(runs.row * width + runs.start, base + runs.end[which], side="left")
    count = last - first
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(which, count), np.repeat(first, count) + within


def _at_faces(runs: Runs, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return whether each run has a voxel at a face of the volume."""
    depth, height, width = shape
    z, y = np.divmod(runs.row, height)
    touching = np.zeros(len(runs.row), bool)
    for length, first, last in ((depth, z, z), (height, y, y), (width, runs.start, runs.end - 1)):
        if length > 1:
            touching |= (first == 0) | (last == length - 1)
    return touching


def _neighbours(labels: Labels, runs: Runs, component: Indices) -> tuple[Labels, Labels]:
    """Return the least and the greatest label around the component of each run; no run may be at a face."""
    depth, height, width = labels.shape
    lengths = runs.end - runs.start
    of = np.repeat(np.arange(len(lengths)), lengths)
    x = np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths - runs.start, lengths)
    place = runs.row[of] * width + x
    flat = labels.reshape(-1)
    least = np.full(int(np.max(component, initial=-1)) + 1, np.iinfo(labels.dtype).max, labels.dtype)
    most = np.zeros_like(least)
    for length, step in ((depth, height * width), (height, width), (width, 1)):
        for there in (place - step, place + step) if length > 1 else ():
            label = flat[there]
            owner, label = component[of[label > 0]], label[label > 0]
            np.minimum.at(least, owner, label)
            np.maximum.at(most, owner, label)
    return least[component], most[component]
