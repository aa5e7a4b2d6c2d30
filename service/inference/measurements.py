"""Labels and intensities -> one row of measurements per object, under scikit-image's names."""

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

# Planes are taken together until they hold so many voxels: enough that sums per object do not dominate, and few enough
# that other threads get the interpreter's lock soon, which NumPy holds for a whole slab.
SLAB_VOXELS = 2**20


def measure(segmentation: Segmentation, volume: Volume) -> Table:
    """Measure size, place and intensity of every object of a label volume, in one pass over its planes.

    The columns are those of `skimage.measure.regionprops_table(labels, intensities, spacing=voxel_size)`:

    label                     number of the object
    num_pixels                voxels
    area                      volume
    equivalent_diameter_area  diameter of a sphere of that volume
    centroid-0, -1, -2        mean z, y, x; the centre of the first voxel is 0
    bbox-0 to -5              smallest z, y, x, then one beyond the largest; voxels
    intensity_mean, _max      of the volume's only channel; of several channels intensity_mean-0, -1, ...

    and three of our own:

    confidence                mean probability over its voxels that they are foreground; where decoding knows it
    touching_border           whether the object reaches an end of an axis of more than one voxel: it may be cut
    unit                      of area, diameter and centroid: "um", or "voxel" where the voxel size is not known

    The labels are numbered from 1, [Z, Y, X]; a number that no voxel has gets no row. The volume [C, Z, Y, X] is the
    one that was segmented, or more of its channels. Raises BadParameter where there are no labels, or another grid.
    """
    if segmentation.kind != "labels":
        raise BadParameter(f"Only labels can be measured, not {segmentation.kind}.")
    labels = segmentation.pixels
    if labels.shape != volume.shape[1:]:
        raise BadParameter(f"Labels of {labels.shape} voxels cannot be measured in a volume of {volume.shape[1:]}.")
    sums = ObjectSums.zeros(int(labels.max(initial=0)) + 1, volume.shape[0], volume.dtype)
    sums.add(labels, volume.read)
    _, *size = volume.shape
    return tabulate(sums, (size[0], size[1], size[2]), segmentation.voxel_size, segmentation.objects)


def measure_box(labels: Array, intensities: Array, origin: Size) -> tuple[NDArray[np.int64], ObjectSums]:
    """Return the numbers [N] of the objects in a box of a label volume, and the sums of these, behind those of 0.

    labels       [z, y, x], of which the first voxel lies at `origin`
    intensities  [C, z, y, x] of the same voxels
    """
    is_there = np.zeros(int(labels.max(initial=0)) + 1, np.bool_)
    is_there[labels] = True
    is_there[0] = False
    numbers = np.flatnonzero(is_there)
    sums = ObjectSums.zeros(len(numbers) + 1, len(intensities), intensities.dtype)
    among = np.where(is_there, is_there.cumsum(), 0).astype(np.uint32)
    sums.add(among[labels], lambda first, end: intensities[:, first:end], origin)
    return numbers, sums


def write_csv(table: Table, path: Path) -> None:
    """Write a table as comma-separated values with a line of names; numbers keep nine digits."""
    columns = [
        [f"{value:.9g}" for value in column.tolist()] if column.dtype.kind == "f" else column.tolist()
        for column in table.values()
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*columns, strict=True))


class ObjectSums(NamedTuple):
    """Running sums; the last axis of each is the label, 0 being background and left empty."""

    voxels: NDArray[np.int64]  # [N]
    places: NDArray[np.float64]  # [3, N]
    lowest: NDArray[np.int64]  # [3, N]
    highest: NDArray[np.int64]  # [3, N]
    total: NDArray[np.float64]  # [C, N]
    brightest: Array  # [C, N], dtype of the volume

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
        """Take in labels [z, y, x] whose first voxel lies at `origin`; `read` returns planes [C, z, y, x] of these."""
        planes = max(1, max(SLAB_VOXELS, 4 * len(self.voxels)) // max(1, math.prod(labels.shape[1:])))
        for first in range(0, len(labels), planes):
            end = min(first + planes, len(labels))
            _add(self, (origin[0] + first, *origin[1:]), labels[first:end], read(first, end))

    def add_objects(self, numbers: NDArray[np.int64], part: Self) -> None:
        """Take in what `measure_box` has returned."""
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
    """Take in a box from `origin` on: labels [z, y, x], intensities [C, z, y, x]."""
    inside = labels.nonzero()
    owner = labels[inside].astype(np.intp)
    count = len(sums.voxels)
    sums.voxels[:] += np.bincount(owner, minlength=count)
    for axis, (first, here) in enumerate(zip(origin, inside, strict=True)):
        places = here + first
        sums.places[axis] += np.bincount(owner, places, count)
        np.minimum.at(sums.lowest[axis], owner, places)
        np.maximum.at(sums.highest[axis], owner, places)
    for channel, pixels in enumerate(intensities):
        values = pixels[inside]
        sums.total[channel] += np.bincount(owner, values, count)
        # NaN is the brightest, and the mean.
        with np.errstate(invalid="ignore"):
            np.maximum.at(sums.brightest[channel], owner, values)


def tabulate(sums: ObjectSums, shape: Size, voxel_size: VoxelSize | None, objects: Objects | None) -> Table:
    """Return the table that `measure` returns, of all labels of a volume of a shape (z, y, x)."""
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
    endings = [""] if len(sums.total) == 1 else [f"-{channel}" for channel in range(len(sums.total))]
    table |= {f"intensity_mean{end}": row[label] / voxels for end, row in zip(endings, sums.total, strict=True)}
    table |= {f"intensity_max{end}": row[label] for end, row in zip(endings, sums.brightest, strict=True)}
    table["touching_border"] = (((lowest == 0) | (beyond == size)) & (size > 1)).any(axis=0)
    table["unit"] = np.full(len(label), "voxel" if voxel_size is None else "um")
    if objects is not None:
        table["confidence"] = objects.confidence[label - 1]
    return table
