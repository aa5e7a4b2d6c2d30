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
from service.core.files.atomic_files import name_full_disk
from service.core.quantities import Size, VoxelSize
from service.core.types import Array, Objects, Segmentation, Volume
from service.inference.types import Table

# Number of voxels that are measured together. With fewer voxels, the cost per object dominates. With more, NumPy would
# hold the global interpreter lock for too long.
SLAB_VOXELS = 2**20


def measure_objects(segmentation: Segmentation, volume: Volume) -> Table:
    """Measure size, position and intensity of every object of a label volume, in one pass over its planes.

    The columns are those of `skimage.measure.regionprops_table(labels, intensities, spacing=voxel_size)`:

    label                     label of the object
    num_pixels                number of voxels
    area                      volume
    equivalent_diameter_area  diameter of a sphere of that volume
    centroid-0, -1, -2        mean z, y, x; the center of the first voxel is 0
    bbox-0 to -5              first z, y, x of the bounding box, and its end (one after the last z, y, x), in voxels
    intensity_mean, _max      mean and maximum intensity; if the volume has several channels, one column for each
                              channel: intensity_mean-0, -1, ...

    and four additional columns:

    mean_probability          mean foreground probability of the object's voxels, if the decoder provides it
    confidence                probability that the object matches a true one; the mean foreground probability if the
                              model is not calibrated
    touching_border           whether the object touches a face of the volume and may be cut off; faces along axes that
                              are only one voxel long do not count
    unit                      unit of area, diameter and centroid: "um", or "voxel" if the voxel size is not known

    The labels [Z, Y, X] are numbered from 1; labels without voxels get no row. The volume [C, Z, Y, X] is on the same
    grid and may have additional channels. Raises BadParameter if the segmentation does not consist of labels, or
    if the shapes differ.
    """
    if segmentation.kind != "labels":
        raise BadParameter(f"The output is {segmentation.kind}, but only labels can be measured. Use output=labels.")
    labels = segmentation.pixels
    if labels.shape != volume.shape[1:]:
        raise BadParameter(
            f"The labels have the shape {labels.shape}, but the volume has the shape {volume.shape[1:]}. Measure the"
            " volume that was segmented."
        )
    statistics = ObjectStatistics.zeros(int(labels.max(initial=0)) + 1, volume.shape[0], volume.dtype)
    statistics.add(labels, volume.read)
    _, *size = volume.shape
    return tabulate(statistics, (size[0], size[1], size[2]), segmentation.voxel_size, segmentation.objects)


def measure_box(labels: Array, intensities: Array, origin: Size) -> tuple[NDArray[np.int64], ObjectStatistics]:
    """Return the labels [N] of the objects in a box of a label volume, and their statistics [N + 1].

    labels       [z, y, x]; the first voxel lies at `origin`
    intensities  [C, z, y, x] of the same voxels

    The first entry of the statistics is the background.
    """
    is_present = np.zeros(int(labels.max(initial=0)) + 1, np.bool_)
    is_present[labels] = True
    is_present[0] = False
    object_labels = np.flatnonzero(is_present)
    statistics = ObjectStatistics.zeros(len(object_labels) + 1, len(intensities), intensities.dtype)
    index_of_label = np.where(is_present, is_present.cumsum(), 0).astype(np.uint32)
    statistics.add(index_of_label[labels], lambda first, end: intensities[:, first:end], origin)
    return object_labels, statistics


def write_csv(table: Table, path: Path) -> None:
    """Write a table as comma-separated values with a header line. Numbers have nine significant digits."""
    columns = [
        [f"{value:.9g}" for value in column.tolist()] if column.dtype.kind == "f" else column.tolist()
        for column in table.values()
    ]
    with name_full_disk(path), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*columns, strict=True))


class ObjectStatistics(NamedTuple):
    """Running statistics of each object. Arrays are indexed by label along their last axis. Label 0 is not used."""

    voxel_counts: NDArray[np.int64]  # [N]: number of voxels
    coordinate_sums: NDArray[np.float64]  # [3, N]: sums of the voxels' coordinates
    min_coordinates: NDArray[np.int64]  # [3, N]: lowest coordinates
    max_coordinates: NDArray[np.int64]  # [3, N]: highest coordinates
    intensity_sums: NDArray[np.float64]  # [C, N]: sums of intensities
    max_intensities: Array  # [C, N]: highest intensities, with the dtype of the volume

    @classmethod
    def zeros(cls, label_count: int, channel_count: int, dtype: np.dtype[Any]) -> Self:
        """Return the statistics of objects to which no voxels have been added yet."""
        return cls(
            np.zeros(label_count, np.int64),
            np.zeros((3, label_count)),
            np.full((3, label_count), np.iinfo(np.int64).max),
            np.full((3, label_count), -1, np.int64),
            np.zeros((channel_count, label_count)),
            np.full((channel_count, label_count), _get_lowest_value(dtype), dtype),
        )

    def add(self, labels: Array, read_planes: Callable[[int, int], Array], origin: Size = (0, 0, 0)) -> None:
        """Add labels [z, y, x] whose first voxel lies at `origin`.

        `read_planes(first, end)` returns the intensities [C, z, y, x] of the planes from `first` to `end` of the box.
        """
        num_planes = max(1, max(SLAB_VOXELS, 4 * len(self.voxel_counts)) // max(1, math.prod(labels.shape[1:])))
        for first in range(0, len(labels), num_planes):
            end = min(first + num_planes, len(labels))
            _add_box(self, (origin[0] + first, *origin[1:]), labels[first:end], read_planes(first, end))

    def add_objects(self, object_labels: NDArray[np.int64], box_statistics: Self) -> None:
        """Add the labels and statistics of the objects in a box, as returned by `measure_box`."""
        self.voxel_counts[object_labels] += box_statistics.voxel_counts[1:]
        self.coordinate_sums[:, object_labels] += box_statistics.coordinate_sums[:, 1:]
        self.min_coordinates[:, object_labels] = np.minimum(
            self.min_coordinates[:, object_labels], box_statistics.min_coordinates[:, 1:]
        )
        self.max_coordinates[:, object_labels] = np.maximum(
            self.max_coordinates[:, object_labels], box_statistics.max_coordinates[:, 1:]
        )
        self.intensity_sums[:, object_labels] += box_statistics.intensity_sums[:, 1:]
        self.max_intensities[:, object_labels] = np.maximum(
            self.max_intensities[:, object_labels], box_statistics.max_intensities[:, 1:]
        )


def _get_lowest_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).min
    return -np.inf if dtype.kind == "f" else False


def _add_box(statistics: ObjectStatistics, origin: Size, labels: Array, intensities: Array) -> None:
    """Add the voxels of a box at `origin`: labels [z, y, x] and intensities [C, z, y, x].

    Statistics are first computed for runs of equal labels along x, because there are far fewer runs than voxels.
    """
    is_first = np.ones(labels.shape, np.bool_)
    np.not_equal(labels[..., 1:], labels[..., :-1], out=is_first[..., 1:])
    starts = np.flatnonzero(is_first)
    run_labels, lengths = labels.ravel()[starts].astype(np.intp), np.diff(starts, append=labels.size)
    is_object, label_count = run_labels > 0, len(statistics.voxel_counts)
    run_labels, lengths = run_labels[is_object], lengths[is_object]
    z, y, x = np.unravel_index(starts[is_object], labels.shape)
    statistics.voxel_counts[:] += np.bincount(run_labels, lengths, label_count).astype(np.int64)
    for axis, (first, last) in enumerate(((z, z), (y, y), (x, x + lengths - 1))):
        first_position, last_position = first + origin[axis], last + origin[axis]
        sums = (first_position + last_position) * lengths / 2
        statistics.coordinate_sums[axis] += np.bincount(run_labels, sums, label_count)
        np.minimum.at(statistics.min_coordinates[axis], run_labels, first_position)
        np.maximum.at(statistics.max_coordinates[axis], run_labels, last_position)
    for channel, pixels in enumerate(intensities):
        values = pixels.ravel()
        sums = np.add.reduceat(values, starts, dtype=np.float64)[is_object]
        statistics.intensity_sums[channel] += np.bincount(run_labels, sums, label_count)
        # Propagate NaN to the mean and the maximum.
        with np.errstate(invalid="ignore"):
            maxima = np.maximum.reduceat(values, starts)[is_object]
            np.maximum.at(statistics.max_intensities[channel], run_labels, maxima)


def _list_suffixes(num_channels: int) -> list[str]:
    """Return the ends of the names of columns for each channel."""
    return [""] if num_channels == 1 else [f"-{channel}" for channel in range(num_channels)]


def tabulate(statistics: ObjectStatistics, shape: Size, voxel_size: VoxelSize | None, objects: Objects | None) -> Table:
    """Return the table of `measure_objects` for all labels of a volume with this shape (z, y, x)."""
    labels = np.flatnonzero(statistics.voxel_counts)
    voxel_counts = statistics.voxel_counts[labels]
    spacing = tuple(voxel_size or (1.0, 1.0, 1.0))
    volumes = voxel_counts * math.prod(spacing)
    starts, ends = statistics.min_coordinates[:, labels], statistics.max_coordinates[:, labels] + 1
    size = np.array(shape)[:, None]
    table: Table = {
        "label": labels,
        "num_pixels": voxel_counts,
        "area": volumes,
        "equivalent_diameter_area": np.cbrt(6 * volumes / np.pi),
    }
    table |= {
        f"centroid-{axis}": statistics.coordinate_sums[axis, labels] / voxel_counts * axis_spacing
        for axis, axis_spacing in enumerate(spacing)
    }
    table |= {f"bbox-{index}": bound for index, bound in enumerate((*starts, *ends))}
    suffixes = _list_suffixes(len(statistics.intensity_sums))
    table |= {
        f"intensity_mean{suffix}": row[labels] / voxel_counts
        for suffix, row in zip(suffixes, statistics.intensity_sums, strict=True)
    }
    table |= {
        f"intensity_max{suffix}": row[labels] for suffix, row in zip(suffixes, statistics.max_intensities, strict=True)
    }
    table["touching_border"] = (((starts == 0) | (ends == size)) & (size > 1)).any(axis=0)
    table["unit"] = np.full(len(labels), "voxel" if voxel_size is None else "um")
    if objects is not None:
        table["mean_probability"] = objects.confidence[labels - 1]
        match_probability = objects.match_probability
        table["confidence"] = (objects.confidence if match_probability is None else match_probability)[labels - 1]
    return table
