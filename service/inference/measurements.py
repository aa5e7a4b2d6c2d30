"""Measurements of the objects of a label volume, under the names of scikit-image."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from service.core.errors import BadParameter
from service.core.quantities import Size, VoxelSize
from service.core.types import Array, Objects, Segmentation, Volume
from service.inference.types import Table

# Number of voxels that are measured together. With fewer, the cost per object dominates. With more, NumPy would hold
# the global interpreter lock for too long.
SLAB_VOXELS = 2**20


def measure(segmentation: Segmentation, volume: Volume) -> Table:
    """Measure size, position and intensity of every object of a label volume, in one pass over its planes.

    The columns are those of `skimage.measure.regionprops_table(labels, intensities, spacing=voxel_size)`:

    label                     number of the object
    num_pixels                number of voxels
    area                      volume
    equivalent_diameter_area  diameter of a sphere of that volume
    centroid-0, -1, -2        mean z, y, x; the center of the first voxel is 0
    bbox-0 to -5              first z, y, x, then one after the last; in voxels
    intensity_mean, _max      of the volume's only channel; if there are several, intensity_mean-0, -1, ...

    and three others:

    confidence                mean foreground probability of its voxels, if the decoder provides it
    touching_border           whether the object touches a face of the volume and may be cut; 1-voxel axes do not count
    unit                      of area, diameter and centroid: "um", or "voxel" if the voxel size is not known

    The labels [Z, Y, X] are numbered from 1; numbers without voxels get no row. The volume [C, Z, Y, X] is on the same
    grid and may have additional channels. Raises BadParameter if the segmentation has no labels, or if the shapes
    differ.
    """
    if segmentation.kind != "labels":
        raise BadParameter(f"The output is {segmentation.kind}, but only labels can be measured. Use output=labels.")
    labels = segmentation.pixels
    if labels.shape != volume.shape[1:]:
        raise BadParameter(
            f"The labels have the shape {labels.shape}, but the volume has the shape {volume.shape[1:]}. Measure the"
            " volume that was segmented."
        )
    sums = ObjectSums.zeros(int(labels.max(initial=0)) + 1, volume.shape[0], volume.dtype)
    sums.add(labels, volume.read)
    _, *size = volume.shape
    return tabulate(sums, (size[0], size[1], size[2]), segmentation.voxel_size, segmentation.objects)


def measure_box(labels: Array, intensities: Array, origin: Size) -> tuple[NDArray[np.int64], ObjectSums]:
    """Return the numbers [N] of the objects in a box of a label volume, and their sums after an entry for background.

    labels       [z, y, x]; the first voxel lies at `origin`
    intensities  [C, z, y, x] of the same voxels
    """
    is_present = np.zeros(int(labels.max(initial=0)) + 1, np.bool_)
    is_present[labels] = True
    is_present[0] = False
    numbers = np.flatnonzero(is_present)
    sums = ObjectSums.zeros(len(numbers) + 1, len(intensities), intensities.dtype)
    index_of = np.where(is_present, is_present.cumsum(), 0).astype(np.uint32)
    sums.add(index_of[labels], lambda first, end: intensities[:, first:end], origin)
    return numbers, sums


def write_csv(table: Table, path: Path) -> None:
    """Write a table as comma-separated values with a header line. Numbers have nine significant digits."""
    columns = [
        [f"{value:.9g}" for value in column.tolist()] if column.dtype.kind == "f" else column.tolist()
        for column in table.values()
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*columns, strict=True))


class ObjectSums(NamedTuple):
    """Running sums per object. The last axis of each array is the label; entry 0, the background, stays empty."""

    voxels: NDArray[np.int64]  # [N]: number of voxels
    places: NDArray[np.float64]  # [3, N]: sums of coordinates
    lowest: NDArray[np.int64]  # [3, N]: smallest coordinates
    highest: NDArray[np.int64]  # [3, N]: largest coordinates
    total: NDArray[np.float64]  # [C, N]: sums of intensities
    brightest: Array  # [C, N]: largest intensity, dtype of the volume

    @classmethod
    def zeros(cls, labels: int, channels: int, dtype: np.dtype[Any]) -> Self:
        return cls(
            np.zeros(labels, np.int64),
            np.zeros((3, labels)),
            np.full((3, labels), np.iinfo(np.int64).max),
            np.full((3, labels), -1, np.int64),
            np.zeros((channels, labels)),
            np.full((channels, labels), _lowest(dtype), dtype),
        )

    def add(self, labels: Array, read: Callable[[int, int], Array], origin: Size = (0, 0, 0)) -> None:
        """Add labels [z, y, x] whose first voxel lies at `origin`. `read` returns their planes [C, z, y, x]."""
        planes = max(1, max(SLAB_VOXELS, 4 * len(self.voxels)) // max(1, math.prod(labels.shape[1:])))
        for first in range(0, len(labels), planes):
            end = min(first + planes, len(labels))
            _add(self, (origin[0] + first, *origin[1:]), labels[first:end], read(first, end))

    def add_objects(self, numbers: NDArray[np.int64], part: Self) -> None:
        """Add the sums of a box, as returned by `measure_box`."""
        self.voxels[numbers] += part.voxels[1:]
        self.places[:, numbers] += part.places[:, 1:]
        self.lowest[:, numbers] = np.minimum(self.lowest[:, numbers], part.lowest[:, 1:])
        self.highest[:, numbers] = np.maximum(self.highest[:, numbers], part.highest[:, 1:])
        self.total[:, numbers] += part.total[:, 1:]
        self.brightest[:, numbers] = np.maximum(self.brightest[:, numbers], part.brightest[:, 1:])


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).min
    return -np.inf if dtype.kind == "f" else False


def _add(sums: ObjectSums, origin: Size, labels: Array, intensities: Array) -> None:
    """Add a box at `origin`: labels [z, y, x] and intensities [C, z, y, x]."""
    foreground = labels.nonzero()
    owner = labels[foreground].astype(np.intp)
    count = len(sums.voxels)
    sums.voxels[:] += np.bincount(owner, minlength=count)
    for axis, (first, indices) in enumerate(zip(origin, foreground, strict=True)):
        positions = indices + first
        sums.places[axis] += np.bincount(owner, positions, count)
        np.minimum.at(sums.lowest[axis], owner, positions)
        np.maximum.at(sums.highest[axis], owner, positions)
    for channel, pixels in enumerate(intensities):
        values = pixels[foreground]
        sums.total[channel] += np.bincount(owner, values, count)
        # Propagate NaN to the mean and the maximum.
        with np.errstate(invalid="ignore"):
            np.maximum.at(sums.brightest[channel], owner, values)


def tabulate(sums: ObjectSums, shape: Size, voxel_size: VoxelSize | None, objects: Objects | None) -> Table:
    """Return the table of `measure` for all labels of a volume of this shape (z, y, x)."""
    label = np.flatnonzero(sums.voxels)
    voxels = sums.voxels[label]
    edges = tuple(voxel_size or (1.0, 1.0, 1.0))
    volume = voxels * math.prod(edges)
    lowest, beyond = sums.lowest[:, label], sums.highest[:, label] + 1
    size = np.array(shape)[:, None]
    table: Table = {
        "label": label,
        "num_pixels": voxels,
        "area": volume,
        "equivalent_diameter_area": np.cbrt(6 * volume / np.pi),
    }
    table |= {f"centroid-{axis}": sums.places[axis, label] / voxels * edge for axis, edge in enumerate(edges)}
    table |= {f"bbox-{number}": limit for number, limit in enumerate((*lowest, *beyond))}
    suffixes = [""] if len(sums.total) == 1 else [f"-{channel}" for channel in range(len(sums.total))]
    table |= {f"intensity_mean{end}": row[label] / voxels for end, row in zip(suffixes, sums.total, strict=True)}
    table |= {f"intensity_max{end}": row[label] for end, row in zip(suffixes, sums.brightest, strict=True)}
    table["touching_border"] = (((lowest == 0) | (beyond == size)) & (size > 1)).any(axis=0)
    table["unit"] = np.full(len(label), "voxel" if voxel_size is None else "um")
    if objects is not None:
        table["confidence"] = objects.confidence[label - 1]
    return table
