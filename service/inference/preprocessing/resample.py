"""Resampling of a volume's image to the grid a model works on, and of its segmentation back to the volume's grid."""

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
from service.inference.preprocessing.normalize import NormalisedImage, normalise_volume
from service.inference.windows.grid import Box, as_size
from service.inference.windows.sliding_window import Image
from service.models.spec import ModelSpec

# Voxels this many times larger or smaller than the model's mean that a wrong voxel size was stated.
MAX_RESAMPLING = 64.0
# Objects this many times wider or narrower than the model wants cannot be seen in the stack.
MAX_DIAMETER_RATIO = 16.0
# Planes that a thread resamples at a time where a whole image is made.
PLANES_AT_ONCE = 8

Spans = tuple[range, range, range]
"""Voxels of a box along (z, y, x)."""


@dataclass(frozen=True)
class Resampling:
    """Linear interpolation of a grid of `before` (Z, Y, X) voxels at the middles of `after` voxels.

    Every voxel has the bits that it has however the grid is cut: weights follow from its place in the whole, and each
    step of the arithmetic is rounded by itself.
    """

    before: Size
    after: Size

    @cached_property
    def _axes(self) -> list[_Axis]:
        return [_Axis.between(old, new) for old, new in zip(self.before, self.after, strict=True)]

    @cached_property
    def _order(self) -> list[int]:
        """Axes by what takes the least time: those that shrink first, and of those that grow x, whose voxels adjoin."""
        factors = [new / old for old, new in zip(self.before, self.after, strict=True)]
        return sorted(range(3), key=lambda axis: (factors[axis], axis if factors[axis] < 1 else -axis))

    def source(self, box: Spans) -> Spans:
        """Return the voxels of the grid before that those in a box of the grid after are interpolated from."""
        z, y, x = (
            range(int(axis.low[span[0]]), int(axis.high[span[-1]]) + 1)
            for axis, span in zip(self._axes, box, strict=True)
        )
        return z, y, x

    def interpolate(self, pixels: NDArray[np.float32], box: Spans) -> NDArray[np.float32]:
        """Return the voxels of a box of the grid after, [C, z, y, x], of those at `source(box)`."""
        source = self.source(box)
        for number in self._order:
            if self.before[number] == self.after[number]:
                continue
            axis, first, span = self._axes[number], source[number].start, box[number]
            inside = slice(span.start, span.stop)
            below = pixels.take(axis.low[inside] - first, number + 1)
            pixels = pixels.take(axis.high[inside] - first, number + 1)
            pixels -= below
            pixels *= axis.share[inside].reshape([-1 if each == number else 1 for each in range(3)])
            pixels += below
        return pixels


class _Axis(NamedTuple):
    """Voxels of an axis before that each one after lies between, and the share, float32, of the upper one."""

    low: NDArray[np.intp]
    high: NDArray[np.intp]
    share: NDArray[np.float32]

    @classmethod
    def between(cls, before: int, after: int) -> _Axis:
        """Interpolate between middles of voxels, like `torch.nn.functional.interpolate` without aligned corners."""
        if before == after:
            same = np.arange(before)
            return cls(same, same, np.zeros(before, np.float32))
        places = ((np.arange(after) + 0.5) * before / after - 0.5).clip(0, before - 1)
        low = places.astype(np.intp)
        return cls(low, np.minimum(low + 1, before - 1), (places - low).astype(np.float32))


class ResampledImage:
    """An image on another grid, interpolated where it is read.

    Index it with (0, channels, z, y, x), slices all but the first, like the float32 [1, C, Z, Y, X] that it stands for.
    Several threads may use it at once, where they may use the source.

    source      image of all voxels before; of those at `resampling.source(box)` where there is a box
    resampling  of the whole image
    box         part of the grid after that is there; None: all of it
    """

    def __init__(self, source: Image, resampling: Resampling, box: Spans | None = None) -> None:
        self._source, self._resampling = source, resampling
        self._box = box or _whole(resampling.after)
        self._there = _whole(resampling.before) if box is None else resampling.source(box)
        self.shape = (1, source.shape[1], *map(len, self._box))

    def __getitem__(self, box: Box) -> Tensor:
        _, channels, *spans = box
        z, y, x = (whole[span] for whole, span in zip(self._box, spans, strict=True))
        read = self._resampling.source((z, y, x))
        planes, rows, columns = (
            slice(span.start - there.start, span.stop - there.start)
            for span, there in zip(read, self._there, strict=True)
        )
        pixels = self._source[0, channels, planes, rows, columns].numpy()
        return torch.from_numpy(self._resampling.interpolate(pixels, (z, y, x)))

    def tensor(self) -> Tensor:
        """Return the whole image, float32 [1, C, Z, Y, X]."""
        whole = torch.empty(self.shape)

        def fill(first: int) -> None:
            planes = slice(first, min(first + PLANES_AT_ONCE, self.shape[2]))
            whole[0, :, planes] = self[0, slice(None), planes, slice(None), slice(None)]

        run_in_threads(fill, range(0, self.shape[2], PLANES_AT_ONCE), whole.nbytes)
        return whole


def _whole(size: Size) -> Spans:
    z, y, x = map(range, size)
    return z, y, x


class PreparedImage(NamedTuple):
    """Input of the network. `image`: float32 [1, C, Z, Y, X]; `notes`: remarks for the user on what was changed."""

    image: NormalisedImage | ResampledImage
    notes: tuple[str, ...]


def prepare(volume: Volume, spec: ModelSpec, diameter: Diameter | None = None) -> PreparedImage:
    """Normalise each channel over the whole volume, and resample it to `working_size`.

    Raises the errors of `normalise_volume` and `working_size`.
    """
    image, notes = normalise_volume(volume, spec)
    resampled, more = resample_image(image, volume, spec, diameter)
    return PreparedImage(resampled, notes + more)


def prepare_tensor(volume: Volume, spec: ModelSpec) -> Tensor:
    """Return the prepared image as one tensor, float32 [1, C, z, y, x]. Raises the errors of `prepare`."""
    return prepare(volume, spec).image.tensor()


def resample_image(image: NormalisedImage, volume: Volume, spec: ModelSpec, diameter: Diameter | None) -> PreparedImage:
    """Resample a volume's image trilinearly to `working_size`. Raises the errors of `working_size`."""
    before, after = as_size(volume.shape[1:]), working_size(volume, spec, diameter)
    notes = describe_resampling(before, after, spec, diameter)
    return PreparedImage(ResampledImage(image, Resampling(before, after)) if notes else image, notes)


def describe_resampling(before: Size, after: Size, spec: ModelSpec, diameter: Diameter | None) -> tuple[str, ...]:
    """Return a note for the user, none where nothing is resampled."""
    if before == after:
        return ()
    reason = "the model's voxel size" if diameter is None else f"objects of {spec.input.diameter:g} voxels"
    have, want = (" x ".join(map(str, size)) for size in (before, after))
    return (f"Resampled from {have} to {want} voxels for {reason}.",)


def resample_segmentation(segmentation: Segmentation, size: Size, minimum_size: int = 0) -> Segmentation:
    """Resample a segmentation to `size` (Z, Y, X): labels and classes to the nearest voxel, probabilities trilinearly.

    Objects too small for the grid vanish, and so do those that are left with less than `minimum_size` voxels; the
    remaining ones are renumbered without gaps. A segmentation of that size is returned as it is.
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
    """Return along each axis the voxel before that the middle of each one after lies in."""
    return [((np.arange(new) + 0.5) * old / new).astype(np.intp) for old, new in zip(before, after, strict=True)]


def working_size(volume: Extent, spec: ModelSpec, diameter: Diameter | None = None) -> Size:
    """Return (Z, Y, X) of the grid that the network works on.

    With a `diameter`, objects of that size become as wide as the model wants them, but no axis shrinks below the
    window: padding confuses the network more than objects that are too wide. Without one it is the volume's own grid,
    unless the voxel sizes of both model and volume are known. Raises BadParameter for a diameter or voxel size that
    does not fit, and BadFile for a column of single pixels, whose windows would be nothing but padding.
    """
    _, z, y, x = volume.shape
    if z > 1 and y == x == 1:
        raise BadFile(
            f"The stack's {z} planes are single pixels, so there is nothing to segment. If its axes are other ones, say"
            " so with axes=, slowest first.",
            parameter="axes",
        )
    if diameter is not None:
        scales = zip(_object_scale(volume, spec, diameter), spec.input.roi_size, (z, y, x), strict=True)
        return _scale_size((z, y, x), [max(scale, min(edge / length, 1)) for scale, edge, length in scales])
    if spec.input.voxel_size is None or volume.voxel_size is None:
        return z, y, x
    return resampled_size((z, y, x), volume.voxel_size, VoxelSize(*spec.input.voxel_size))


def base_factors(volume: Extent, spec: ModelSpec) -> tuple[float, float, float]:
    """Return the voxels per voxel of the volume, along (z, y, x), that it is resampled to without a diameter."""
    z, y, x = (n / edge for n, edge in zip(working_size(volume, spec), volume.shape[1:], strict=True))
    return z, y, x


def used_width(volume: Extent, spec: ModelSpec, used: Diameter | None) -> tuple[float, ...] | None:
    """Return how wide along (z, y, x) objects were taken to be in voxels; None: the model wants no width."""
    if spec.input.diameter is None:
        return None
    stated = used and used.in_voxels(volume.voxel_size)
    return stated or tuple(spec.input.diameter / factor for factor in base_factors(volume, spec))


def resampled_size(size: Size, have: VoxelSize, want: VoxelSize) -> Size:
    """Return how many voxels of size `want` cover `size` voxels of size `have`; see `_scale_size` for rounding.

    Raises BadParameter for voxels so far from the model's that one of the two must be wrong.
    """
    factors = [h / w for h, w in zip(have, want, strict=True)]
    if not all(1 / MAX_RESAMPLING <= factor <= MAX_RESAMPLING for factor in factors):
        stated, wanted = (", ".join(f"{edge:g}" for edge in edges) for edges in (have, want))
        raise BadParameter(
            f"The voxel size {stated} um is too far from the {wanted} um that the model works at; "
            "correct it with voxel_size=Z,Y,X in micrometres.",
            parameter="voxel_size",
        )
    return _scale_size(size, factors)


def _scale_size(size: Size, factors: Sequence[float]) -> Size:
    """Scale the voxels along each axis, to at least one; factors within 1 % of 1 change nothing."""
    pairs = zip(size, factors, strict=True)
    return as_size([n if abs(factor - 1) < 0.01 else max(1, round(n * factor)) for n, factor in pairs])


def _object_scale(volume: Extent, spec: ModelSpec, diameter: Diameter) -> list[float]:
    """Return the factors along (z, y, x) that make objects of this diameter as wide as the model wants them."""
    wanted = spec.input.diameter
    if wanted is None:
        raise BadParameter(
            f"{spec.name} does not say how wide it wants objects to be; leave diameter out.", parameter="diameter"
        )
    have = diameter.in_voxels(volume.voxel_size)
    if have is None:
        raise BadParameter(
            "The file states no voxel size, so a diameter in um means nothing; give voxel_size=Z,Y,X too, or diameter "
            "in voxels, such as 15px.",
            parameter="diameter",
        )
    factors = [wanted / length for length in have]
    if not all(1 / MAX_DIAMETER_RATIO <= factor <= MAX_DIAMETER_RATIO for factor in factors):
        widths = " x ".join(f"{length:.3g}" for length in have)
        raise BadParameter(
            f"Objects of {widths} voxels are too far from the {wanted:g} voxels that {spec.name} works at; correct "
            "diameter, or voxel_size where it is in um.",
            parameter="diameter",
        )
    return factors
