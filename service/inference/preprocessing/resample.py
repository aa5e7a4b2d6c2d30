"""Resampling of an image to the model's grid, and of its segmentation back to the grid of the volume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.errors import BadFile, BadParameter
from service.core.hardware.host import run_in_threads
from service.core.quantities import Diameter, Size, VoxelSize
from service.core.types import Extent, Segmentation, Volume
from service.inference.decoding.labels import keep_objects
from service.inference.preprocessing.normalize import NormalizedImage, normalize_volume
from service.inference.windows.grid import Box, as_size
from service.inference.windows.sliding_window import Image
from service.models.spec import ModelSpec

# Limit of the ratio of the voxel sizes of volume and model. Beyond it, one of them must be wrong.
MAX_RESAMPLING = 64.0
# Limit of the ratio of the object diameters of request and model. Objects beyond it are not visible in the stack.
MAX_DIAMETER_RATIO = 16.0
# Number of planes that a thread resamples at a time when it creates a whole image.
PLANES_PER_TASK = 8

Spans = tuple[range, range, range]
"""Ranges of voxels along (z, y, x) that define a box."""


@dataclass(frozen=True)
class Resampling:
    """Linear interpolation from a grid of `before` voxels (Z, Y, X) to the centers of `after` voxels.

    The result is identical for every division of the grid into boxes: weights depend on the position in the whole grid,
    and each arithmetic step is rounded separately.
    """

    before: Size
    after: Size

    @cached_property
    def _axes(self) -> list[_Axis]:
        return [_Axis.between(old, new) for old, new in zip(self.before, self.after, strict=True)]

    @cached_property
    def _order(self) -> list[int]:
        """Axes in the fastest order: shrinking axes first, and x, which is contiguous, first among the growing axes."""
        factors = [new / old for old, new in zip(self.before, self.after, strict=True)]
        return sorted(range(3), key=lambda axis: (factors[axis], axis if factors[axis] < 1 else -axis))

    def source(self, box: Spans) -> Spans:
        """Return the box of the `before` grid that a box of the `after` grid is interpolated from."""
        z, y, x = (
            range(int(axis.low[span[0]]), int(axis.high[span[-1]]) + 1)
            for axis, span in zip(self._axes, box, strict=True)
        )
        return z, y, x

    def interpolate(self, pixels: NDArray[np.float32], box: Spans) -> NDArray[np.float32]:
        """Interpolate a box of the `after` grid, [C, z, y, x], from the pixels of `source(box)`."""
        source = self.source(box)
        for axis_index in self._order:
            if self.before[axis_index] == self.after[axis_index]:
                continue
            axis, first, span = self._axes[axis_index], source[axis_index].start, box[axis_index]
            inside = slice(span.start, span.stop)
            below = pixels.take(axis.low[inside] - first, axis_index + 1)
            pixels = pixels.take(axis.high[inside] - first, axis_index + 1)
            pixels -= below
            pixels *= axis.weight[inside].reshape([-1 if each == axis_index else 1 for each in range(3)])
            pixels += below
        return pixels


class _Axis(NamedTuple):
    """Interpolation along one axis: for each voxel, its two source voxels and the weight of the upper one, float32."""

    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: NDArray[np.float32]

    @classmethod
    def between(cls, before: int, after: int) -> _Axis:
        """Interpolate between voxel centers, like `torch.nn.functional.interpolate` with `align_corners=False`."""
        if before == after:
            same = np.arange(before)
            return cls(same, same, np.zeros(before, np.float32))
        positions = ((np.arange(after) + 0.5) * before / after - 0.5).clip(0, before - 1)
        low = positions.astype(np.intp)
        return cls(low, np.minimum(low + 1, before - 1), (positions - low).astype(np.float32))


class ResampledImage:
    """An image on another grid, interpolated when it is read.

    Index it with (0, channels, z, y, x), where all but the first are slices, like a float32 tensor [1, C, Z, Y, X]. It
    is thread-safe if its source is.

    source      image of all voxels before resampling; if there is a box, of the voxels of `resampling.source(box)`
    resampling  of the whole image
    box         part of the resampled grid that the image covers; None: all of it
    """

    def __init__(self, source: Image, resampling: Resampling, box: Spans | None = None) -> None:
        self._source, self._resampling = source, resampling
        self._box = box or _whole(resampling.after)
        self._source_box = _whole(resampling.before) if box is None else resampling.source(box)
        self.shape = (1, source.shape[1], *map(len, self._box))

    def __getitem__(self, box: Box) -> Tensor:
        _, channels, *spans = box
        z, y, x = (whole[span] for whole, span in zip(self._box, spans, strict=True))
        read = self._resampling.source((z, y, x))
        planes, rows, columns = (
            slice(span.start - source_span.start, span.stop - source_span.start)
            for span, source_span in zip(read, self._source_box, strict=True)
        )
        pixels = self._source[0, channels, planes, rows, columns].numpy()
        return torch.from_numpy(self._resampling.interpolate(pixels, (z, y, x)))

    def tensor(self) -> Tensor:
        """Return the whole image, float32 [1, C, Z, Y, X]."""
        # Worker threads are not in the inference mode of the caller and must not write to its tensors.
        whole = np.empty(self.shape, np.float32)

        def fill(first: int) -> None:
            planes = slice(first, min(first + PLANES_PER_TASK, self.shape[2]))
            whole[0, :, planes] = self[0, slice(None), planes, slice(None), slice(None)].numpy()

        run_in_threads(fill, range(0, self.shape[2], PLANES_PER_TASK), whole.nbytes)
        return torch.from_numpy(whole)


def _whole(size: Size) -> Spans:
    z, y, x = map(range, size)
    return z, y, x


class PreparedImage(NamedTuple):
    """Input of the network and notes for the user about the changes. `image` acts as float32 [1, C, Z, Y, X]."""

    image: NormalizedImage | ResampledImage
    notes: tuple[str, ...]


def prepare(volume: Volume, spec: ModelSpec, diameter: Diameter | None = None) -> PreparedImage:
    """Normalize each channel over the whole volume, and resample it to `working_size`.

    Raises the errors of `normalize_volume` and `working_size`.
    """
    image, notes = normalize_volume(volume, spec)
    resampled, more = resample_image(image, volume, spec, diameter)
    return PreparedImage(resampled, notes + more)


def prepare_tensor(volume: Volume, spec: ModelSpec) -> Tensor:
    """Return the prepared image as one tensor, float32 [1, C, z, y, x]. Raises the errors of `prepare`."""
    return prepare(volume, spec).image.tensor()


def resample_image(image: NormalizedImage, volume: Volume, spec: ModelSpec, diameter: Diameter | None) -> PreparedImage:
    """Resample a volume's image trilinearly to `working_size`. Raises the errors of `working_size`."""
    before, after = as_size(volume.shape[1:]), working_size(volume, spec, diameter)
    notes = describe_resampling(before, after, spec, diameter)
    return PreparedImage(ResampledImage(image, Resampling(before, after)) if notes else image, notes)


def describe_resampling(before: Size, after: Size, spec: ModelSpec, diameter: Diameter | None) -> tuple[str, ...]:
    """Return a note for the user, or no note if the sizes are equal."""
    if before == after:
        return ()
    reason = "the model's voxel size" if diameter is None else f"an object diameter of {spec.input.diameter:g} voxels"
    have, want = (" x ".join(map(str, size)) for size in (before, after))
    return (f"Resampled from {have} to {want} voxels for {reason}.",)


def resample_segmentation(segmentation: Segmentation, size: Size, minimum_size: int = 0) -> Segmentation:
    """Resample a segmentation to `size` (Z, Y, X): labels and classes to the nearest voxel, probabilities trilinearly.

    Objects that are too small for the grid, or have less than `minimum_size` voxels afterwards, are removed. The
    remaining objects are renumbered without gaps. A segmentation of that size is returned unchanged.
    """
    pixels = segmentation.pixels
    if pixels.shape[-3:] == size:
        return segmentation
    if segmentation.kind == "probabilities":
        scores = ResampledImage(torch.from_numpy(pixels)[None], Resampling(as_size(pixels.shape[1:]), size))
        return replace(segmentation, pixels=scores.tensor()[0].numpy())
    nearest = pixels[np.ix_(*nearest_voxels(as_size(pixels.shape), size))]
    if segmentation.kind == "classes":
        return replace(segmentation, pixels=nearest)
    voxels = np.bincount(nearest.ravel(), minlength=(segmentation.count or 0) + 1)
    return keep_objects(replace(segmentation, pixels=nearest), voxels[1:] >= max(minimum_size, 1))


def nearest_voxels(before: Size, after: Size) -> list[NDArray[np.intp]]:
    """Return for each axis the `before` voxel that contains the center of each `after` voxel."""
    return [((np.arange(new) + 0.5) * old / new).astype(np.intp) for old, new in zip(before, after, strict=True)]


def working_size(volume: Extent, spec: ModelSpec, diameter: Diameter | None = None) -> Size:
    """Return the size (Z, Y, X) of the grid that the network works on.

    With a `diameter`, the volume is resampled so that objects have the model's diameter, but no axis becomes shorter
    than the window, because padding affects the network more than large objects do. Without a diameter it is the grid
    of the volume, unless the voxel sizes of both the model and the volume are known. Raises BadParameter for a diameter
    or voxel size that does not fit, and BadFile for a column of single pixels, whose windows would be almost all
    padding.
    """
    _, z, y, x = volume.shape
    if z > 1 and y == x == 1:
        raise BadFile(
            f"The {z} planes of the stack are single pixels, so there is nothing to segment. If the axes are wrong,"
            " set axes=, slowest axis first.",
            parameter="axes",
        )
    if diameter is not None:
        scales = zip(_object_scale(volume, spec, diameter), spec.input.roi_size, (z, y, x), strict=True)
        return _scale_size((z, y, x), [max(scale, min(edge / length, 1)) for scale, edge, length in scales])
    if spec.input.voxel_size is None or volume.voxel_size is None:
        return z, y, x
    return resampled_size((z, y, x), volume.voxel_size, VoxelSize(*spec.input.voxel_size))


def base_factors(volume: Extent, spec: ModelSpec) -> tuple[float, float, float]:
    """Return the scale factors along (z, y, x) by which the volume is resampled without a diameter."""
    z, y, x = (n / edge for n, edge in zip(working_size(volume, spec), volume.shape[1:], strict=True))
    return z, y, x


def used_diameter(volume: Extent, spec: ModelSpec, used: Diameter | None) -> tuple[float, ...] | None:
    """Return the object diameter along (z, y, x) that was used, in voxels; None if the model has no object diameter."""
    if spec.input.diameter is None:
        return None
    diameter_lengths = used and used.in_voxels(volume.voxel_size)
    return diameter_lengths or tuple(spec.input.diameter / factor for factor in base_factors(volume, spec))


def resampled_size(size: Size, have: VoxelSize, want: VoxelSize) -> Size:
    """Return the number of voxels of size `want` that cover `size` voxels of size `have`. `_scale_size` rounds it.

    Raises BadParameter if the voxel sizes differ so much that one of them must be wrong.
    """
    factors = [h / w for h, w in zip(have, want, strict=True)]
    if not all(1 / MAX_RESAMPLING <= factor <= MAX_RESAMPLING for factor in factors):
        volume_size, model_size = (", ".join(f"{edge:g}" for edge in edges) for edges in (have, want))
        raise BadParameter(
            f"The voxel size is {volume_size} um, but the model needs about {model_size} um. "
            "If the voxel size is wrong, set voxel_size=Z,Y,X in micrometers.",
            parameter="voxel_size",
        )
    return _scale_size(size, factors)


def _scale_size(size: Size, factors: Sequence[float]) -> Size:
    """Scale the number of voxels along each axis, to at least one. Factors within 1 % of 1 are ignored."""
    pairs = zip(size, factors, strict=True)
    return as_size([n if abs(factor - 1) < 0.01 else max(1, round(n * factor)) for n, factor in pairs])


def _object_scale(volume: Extent, spec: ModelSpec, diameter: Diameter) -> list[float]:
    """Return the factors along (z, y, x) that scale objects of this diameter to the model's diameter."""
    model_diameter = spec.input.diameter
    if model_diameter is None:
        raise BadParameter(
            f"The model {spec.name} has no object diameter to resample to. Remove diameter.", parameter="diameter"
        )
    have = diameter.in_voxels(volume.voxel_size)
    if have is None:
        raise BadParameter(
            "The file does not specify a voxel size, which is needed for a diameter in um. Add voxel_size=Z,Y,X, or "
            "set the diameter in voxels, such as 15px.",
            parameter="diameter",
        )
    factors = [model_diameter / length for length in have]
    if not all(1 / MAX_DIAMETER_RATIO <= factor <= MAX_DIAMETER_RATIO for factor in factors):
        lengths = " x ".join(f"{length:.3g}" for length in have)
        raise BadParameter(
            f"The object diameter of {lengths} voxels differs too much from the {model_diameter:g} voxels of the model "
            f"{spec.name}. Correct the diameter, or the voxel size if the diameter is in um.",
            parameter="diameter",
        )
    return factors
