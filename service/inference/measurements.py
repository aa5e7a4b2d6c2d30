"""Measurements of the objects of a label volume, with the column names of scikit-image."""

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

# Number of voxels that are measured together. With fewer voxels, the cost per object dominates. With more, NumPy would
# hold the global interpreter lock for too long.
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
    intensity_mean, _max      of the volume's only channel; with several channels, intensity_mean-0, -1, ...

    and three additional columns:

    confidence                mean foreground probability of its voxels, if the decoder provides it
    touching_border           whether the object touches a face of the volume and may be cut off; not along an axis of
                              one voxel
    unit                      unit of area, diameter and centroid: "um", or "voxel" if the voxel size is not known

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
    sums = ObjectStatistics.zeros(int(labels.max(initial=0)) + 1, volume.shape[0], volume.dtype)
    sums.add(labels, volume.read)
    _, *size = volume.shape
    return tabulate(sums, (size[0], size[1], size[2]), segmentation.voxel_size, segmentation.objects)


def measure_box(labels: Array, intensities: Array, origin: Size) -> tuple[NDArray[np.int64], ObjectStatistics]:
    """Return the numbers [N] of the objects in a box of a label volume, and their statistics [N + 1].

    labels       [z, y, x]; the first voxel lies at `origin`
    intensities  [C, z, y, x] of the same voxels

    The first entry of the statistics is the background.
    """
    is_present = np.zeros(int(labels.max(initial=0)) + 1, np.bool_)
    is_present[labels] = True
    is_present[0] = False
    numbers = np.flatnonzero(is_present)
    sums = ObjectStatistics.zeros(len(numbers) + 1, len(intensities), intensities.dtype)
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


class ObjectStatistics(NamedTuple):
    """Running statistics per object. The last axis of each array is indexed by label; entry 0, the background, is 0."""

    voxel_counts: NDArray[np.int64]  # [N]: number of voxels
    coordinate_sums: NDArray[np.float64]  # [3, N]: sums of the voxels' coordinates
    min_coordinates: NDArray[np.int64]  # [3, N]: lowest coordinates
    max_coordinates: NDArray[np.int64]  # [3, N]: highest coordinates
    intensity_sums: NDArray[np.float64]  # [C, N]: sums of intensities
    max_intensities: Array  # [C, N]: highest intensities, with the dtype of the volume

    @classmethod
    def zeros(cls, label_count: int, channel_count: int, dtype: np.dtype[Any]) -> Self:
        return cls(
            np.zeros(label_count, np.int64),
            np.zeros((3, label_count)),
            np.full((3, label_count), np.iinfo(np.int64).max),
            np.full((3, label_count), -1, np.int64),
            np.zeros((channel_count, label_count)),
            np.full((channel_count, label_count), _find_minimum(dtype), dtype),
        )

    def add(self, labels: Array, read_planes: Callable[[int, int], Array], origin: Size = (0, 0, 0)) -> None:
        """Add labels [z, y, x] whose first voxel lies at `origin`.

        `read_planes(first, end)` returns the intensities [C, z, y, x] of these planes of the labels.
        """
        step = max(1, max(SLAB_VOXELS, 4 * len(self.voxel_counts)) // max(1, math.prod(labels.shape[1:])))
        for first in range(0, len(labels), step):
            end = min(first + step, len(labels))
            _add_box(self, (origin[0] + first, *origin[1:]), labels[first:end], read_planes(first, end))

    def add_objects(self, numbers: NDArray[np.int64], part: Self) -> None:
        """Add the statistics of the objects in a box, as returned by `measure_box`."""
        self.voxel_counts[numbers] += part.voxel_counts[1:]
        self.coordinate_sums[:, numbers] += part.coordinate_sums[:, 1:]
        self.min_coordinates[:, numbers] = np.minimum(self.min_coordinates[:, numbers], part.min_coordinates[:, 1:])
        self.max_coordinates[:, numbers] = np.maximum(self.max_coordinates[:, numbers], part.max_coordinates[:, 1:])
        self.intensity_sums[:, numbers] += part.intensity_sums[:, 1:]
        self.max_intensities[:, numbers] = np.maximum(self.max_intensities[:, numbers], part.max_intensities[:, 1:])


def _find_minimum(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).min
    return -np.inf if dtype.kind == "f" else False


def _add_box(sums: ObjectStatistics, origin: Size, labels: Array, intensities: Array) -> None:
    """Add the voxels of a box at `origin`: labels [z, y, x] and intensities [C, z, y, x]."""
    foreground = labels.nonzero()
    voxel_labels = labels[foreground].astype(np.intp)
    label_count = len(sums.voxel_counts)
    sums.voxel_counts[:] += np.bincount(voxel_labels, minlength=label_count)
    for axis, (first, indices) in enumerate(zip(origin, foreground, strict=True)):
        positions = indices + first
        sums.coordinate_sums[axis] += np.bincount(voxel_labels, positions, label_count)
        np.minimum.at(sums.min_coordinates[axis], voxel_labels, positions)
        np.maximum.at(sums.max_coordinates[axis], voxel_labels, positions)
    for channel, pixels in enumerate(intensities):
        values = pixels[foreground]
        sums.intensity_sums[channel] += np.bincount(voxel_labels, values, label_count)
        # Propagate NaN to the mean and the maximum.
        with np.errstate(invalid="ignore"):
            np.maximum.at(sums.max_intensities[channel], voxel_labels, values)


def tabulate(sums: ObjectStatistics, shape: Size, voxel_size: VoxelSize | None, objects: Objects | None) -> Table:
    """Return the table of `measure` for all labels of a volume with this shape (z, y, x)."""
    label = np.flatnonzero(sums.voxel_counts)
    voxels = sums.voxel_counts[label]
    edges = tuple(voxel_size or (1.0, 1.0, 1.0))
    volume = voxels * math.prod(edges)
    lowest, ends = sums.min_coordinates[:, label], sums.max_coordinates[:, label] + 1
    size = np.array(shape)[:, None]
    table: Table = {
        "label": label,
        "num_pixels": voxels,
        "area": volume,
        "equivalent_diameter_area": np.cbrt(6 * volume / np.pi),
    }
    table |= {f"centroid-{axis}": sums.coordinate_sums[axis, label] / voxels * edge for axis, edge in enumerate(edges)}
    table |= {f"bbox-{number}": limit for number, limit in enumerate((*lowest, *ends))}
    suffixes = [""] if len(sums.intensity_sums) == 1 else [f"-{channel}" for channel in range(len(sums.intensity_sums))]
    table |= {
        f"intensity_mean{suffix}": row[label] / voxels
        for suffix, row in zip(suffixes, sums.intensity_sums, strict=True)
    }
    table |= {f"intensity_max{suffix}": row[label] for suffix, row in zip(suffixes, sums.max_intensities, strict=True)}
    table["touching_border"] = (((lowest == 0) | (ends == size)) & (size > 1)).any(axis=0)
    table["unit"] = np.full(len(label), "voxel" if voxel_size is None else "um")
    if objects is not None:
        table["confidence"] = objects.confidence[label - 1]
    return table
