"""A volume's image on the grid that a model wants, and its segmentation back on the grid of the volume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.core.errors import BadFile, BadParameter
from service.core.volume import Diameter, Extent, Segmentation, Size, Volume, VoxelSize, label_dtype
from service.inference.normalize import Image, normalised
from service.models.spec import (
    ModelSpec,
)

# A stack whose voxels are more than so many times larger or smaller than the model's was given a wrong voxel size.
MOST_RESAMPLING = 64.0
# Objects smaller than this part of what the model wants are not to be seen in the stack.
MOST_ENLARGING = 16.0


def resample(image: Image, volume: Volume, spec: ModelSpec, diameter: Diameter | None) -> Prepared:
    """The image of a volume on the grid of `working_size`. Raises what that raises."""
    target = working_size(volume, spec, diameter)
    if target == volume.shape[1:]:
        return Prepared(image, ())
    reason = "the model's voxel size" if diameter is None else f"objects of {spec.input.diameter:g} voxels"
    note = f"Resampled from {_times(volume.shape[1:])} to {_times(target)} voxels for {reason}."
    resampled = functional.interpolate(image.tensor(), size=target, mode="trilinear", align_corners=False)
    return Prepared(resampled, (note,))


def on_grid(segmentation: Segmentation, size: Size) -> Segmentation:
    """The way back: a segmentation on a grid of `size` (Z, Y, X), labels by nearest voxel, probabilities trilinear.

    Objects too small for the grid vanish; the remaining ones are renumbered without gaps.
    """
    pixels = segmentation.pixels
    if pixels.shape[-3:] == size:
        return segmentation
    if segmentation.kind == "probabilities":
        scores = torch.from_numpy(pixels)[None]
        resampled = functional.interpolate(scores, size=size, mode="trilinear", align_corners=False)
        return replace(segmentation, pixels=resampled[0].numpy())
    places = (((np.arange(new) + 0.5) * old / new).astype(np.intp) for old, new in zip(pixels.shape, size, strict=True))
    nearest = pixels[np.ix_(*places)]
    if segmentation.kind == "classes":
        return replace(segmentation, pixels=nearest)
    present = np.zeros(int(nearest.max(initial=0)) + 1, bool)
    present[nearest] = True
    present[0] = False
    count = int(np.count_nonzero(present))
    numbers = np.where(present, np.cumsum(present), 0).astype(label_dtype(count))
    return replace(segmentation, pixels=numbers[nearest], count=count)


def working_size(volume: Extent, spec: ModelSpec, diameter: Diameter | None = None) -> Size:
    """(Z, Y, X) of the grid that the network works on.

    With a `diameter`, objects of that size become as wide as the model wants them, though no axis shrinks below the
    window's: what is padded confuses the network more than objects that are too wide. Else it is the volume's own grid,
    unless the voxel sizes of both model and volume are known. Raises BadParameter where that cannot be, and BadFile for
    a column of single pixels, whose windows would be padding and nothing else.
    """
    _, z, y, x = volume.shape
    if z > 1 and y == x == 1:
        raise BadFile(
            f"The stack's {z} planes are single pixels, so there is nothing to segment. If its axes are other ones, say"
            " so with axes=, slowest first."
        )
    if diameter is not None:
        scales = zip(_object_scale(volume, spec, diameter), spec.input.roi_size, (z, y, x), strict=True)
        return scaled_size((z, y, x), [max(scale, min(edge / length, 1)) for scale, edge, length in scales])
    if spec.input.voxel_size is None or volume.voxel_size is None:
        return z, y, x
    return resampled_size((z, y, x), volume.voxel_size, VoxelSize(*spec.input.voxel_size))


def resampled_size(size: Size, have: VoxelSize, want: VoxelSize) -> Size:
    """The same extent in other voxels, at least one along each axis; up to 1 % of difference is left alone.

    Raises BadParameter for voxels so far from the model's that one of the two must be wrong.
    """
    factors = [h / w for h, w in zip(have, want, strict=True)]
    if not all(1 / MOST_RESAMPLING <= factor <= MOST_RESAMPLING for factor in factors):
        stated, wanted = (", ".join(f"{edge:g}" for edge in edges) for edges in (have, want))
        raise BadParameter(
            f"The voxel size {stated} um is too far from the {wanted} um that the model works at; "
            "correct it with voxel_size=Z,Y,X in micrometres."
        )
    return scaled_size(size, factors)


def scaled_size(size: Size, factors: Sequence[float]) -> Size:
    """So many times the voxels along each axis, at least one; up to 1 % of difference is left alone."""
    z, y, x = (
        length if abs(factor - 1) < 0.01 else max(1, round(length * factor))
        for length, factor in zip(size, factors, strict=True)
    )
    return z, y, x


def _object_scale(volume: Extent, spec: ModelSpec, diameter: Diameter) -> list[float]:
    wanted = spec.input.diameter
    if wanted is None:
        raise BadParameter(f"{spec.name} does not say how wide it wants objects to be; leave diameter out.")
    have = diameter.in_voxels(volume.voxel_size)
    if have is None:
        raise BadParameter(
            "The file states no voxel size, so a diameter in um means nothing; give voxel_size=Z,Y,X too, or diameter "
            "in voxels, such as 15px."
        )
    factors = [wanted / length for length in have]
    if not all(1 / MOST_ENLARGING <= factor <= MOST_ENLARGING for factor in factors):
        widths = " x ".join(f"{length:.3g}" for length in have)
        raise BadParameter(
            f"Objects of {widths} voxels are too far from the {wanted:g} voxels that {spec.name} works at; correct "
            "diameter, or voxel_size where it is in um."
        )
    return factors


def _times(size: Size) -> str:
    return " x ".join(map(str, size))


class Prepared(NamedTuple):
    """What the network gets. `image`: float32 [1, C, Z, Y, X]; `notes`: what was done that a user should know."""

    image: Image | Tensor
    notes: tuple[str, ...]


def prepare(volume: Volume, spec: ModelSpec, diameter: Diameter | None = None) -> Prepared:
    """Normalise each channel over the whole volume, and resample it to `working_size`.

    NaN and infinite pixels count as the lowest finite value; a constant channel becomes zeros. Raises BadFile where
    a channel has no finite pixel, and what `working_size` does.
    """
    image, notes = normalised(volume, spec)
    resampled, more = resample(image, volume, spec, diameter)
    return Prepared(resampled, notes + more)


def prepare_tensor(volume: Volume, spec: ModelSpec) -> Tensor:
    """Prepare a volume as `prepare` does -> the whole image at once, float32 [1, C, z, y, x]. Raises what it raises."""
    image = prepare(volume, spec).image
    return image if isinstance(image, Tensor) else image.tensor()
