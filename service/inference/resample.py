"""Resampling of a volume's image to the grid a model works on, and of its segmentation back to the volume's grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.core.errors import BadFile, BadParameter
from service.core.volume import Diameter, Extent, Segmentation, Size, Volume, VoxelSize
from service.inference.decoding.instances import keep_objects
from service.inference.normalize import NormalisedImage, normalise_volume
from service.inference.windows.grid import as_size
from service.models.spec import ModelSpec

# Voxels this many times larger or smaller than the model's mean that a wrong voxel size was stated.
MAX_RESAMPLING = 64.0
# Objects this many times wider or narrower than the model wants cannot be seen in the stack.
MAX_DIAMETER_RATIO = 16.0


class PreparedImage(NamedTuple):
    """Input of the network. `image`: float32 [1, C, Z, Y, X]; `notes`: remarks for the user on what was changed."""

    image: NormalisedImage | Tensor
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
    image = prepare(volume, spec).image
    return image if isinstance(image, Tensor) else image.tensor()


def resample_image(image: NormalisedImage, volume: Volume, spec: ModelSpec, diameter: Diameter | None) -> PreparedImage:
    """Resample a volume's image trilinearly to `working_size`. Raises the errors of `working_size`."""
    target = working_size(volume, spec, diameter)
    if target == volume.shape[1:]:
        return PreparedImage(image, ())
    reason = "the model's voxel size" if diameter is None else f"objects of {spec.input.diameter:g} voxels"
    before, after = (" x ".join(map(str, size)) for size in (volume.shape[1:], target))
    note = f"Resampled from {before} to {after} voxels for {reason}."
    resampled = functional.interpolate(image.tensor(), size=target, mode="trilinear", align_corners=False)
    return PreparedImage(resampled, (note,))


def resample_segmentation(segmentation: Segmentation, size: Size, minimum_size: int = 0) -> Segmentation:
    """Resample a segmentation to `size` (Z, Y, X): labels and classes to the nearest voxel, probabilities trilinearly.

    Objects too small for the grid vanish, and so do those that are left with less than `minimum_size` voxels; the
    remaining ones are renumbered without gaps. A segmentation of that size is returned as it is.
    """
    pixels = segmentation.pixels
    if pixels.shape[-3:] == size:
        return segmentation
    if segmentation.kind == "probabilities":
        scores = torch.from_numpy(pixels)[None]
        resampled = functional.interpolate(scores, size=size, mode="trilinear", align_corners=False)
        return replace(segmentation, pixels=resampled[0].numpy())
    axes = (((np.arange(new) + 0.5) * old / new).astype(np.intp) for old, new in zip(pixels.shape, size, strict=True))
    nearest = pixels[np.ix_(*axes)]
    if segmentation.kind == "classes":
        return replace(segmentation, pixels=nearest)
    voxels = np.bincount(nearest.ravel(), minlength=(segmentation.count or 0) + 1)
    return keep_objects(replace(segmentation, pixels=nearest), voxels[1:] >= max(minimum_size, 1))


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
            " so with axes=, slowest first."
        )
    if diameter is not None:
        scales = zip(_object_scale(volume, spec, diameter), spec.input.roi_size, (z, y, x), strict=True)
        return _scale_size((z, y, x), [max(scale, min(edge / length, 1)) for scale, edge, length in scales])
    if spec.input.voxel_size is None or volume.voxel_size is None:
        return z, y, x
    return resampled_size((z, y, x), volume.voxel_size, VoxelSize(*spec.input.voxel_size))


def resampled_size(size: Size, have: VoxelSize, want: VoxelSize) -> Size:
    """Return how many voxels of size `want` cover `size` voxels of size `have`; see `_scale_size` for rounding.

    Raises BadParameter for voxels so far from the model's that one of the two must be wrong.
    """
    factors = [h / w for h, w in zip(have, want, strict=True)]
    if not all(1 / MAX_RESAMPLING <= factor <= MAX_RESAMPLING for factor in factors):
        stated, wanted = (", ".join(f"{edge:g}" for edge in edges) for edges in (have, want))
        raise BadParameter(
            f"The voxel size {stated} um is too far from the {wanted} um that the model works at; "
            "correct it with voxel_size=Z,Y,X in micrometres."
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
        raise BadParameter(f"{spec.name} does not say how wide it wants objects to be; leave diameter out.")
    have = diameter.in_voxels(volume.voxel_size)
    if have is None:
        raise BadParameter(
            "The file states no voxel size, so a diameter in um means nothing; give voxel_size=Z,Y,X too, or diameter "
            "in voxels, such as 15px."
        )
    factors = [wanted / length for length in have]
    if not all(1 / MAX_DIAMETER_RATIO <= factor <= MAX_DIAMETER_RATIO for factor in factors):
        widths = " x ".join(f"{length:.3g}" for length in have)
        raise BadParameter(
            f"Objects of {widths} voxels are too far from the {wanted:g} voxels that {spec.name} works at; correct "
            "diameter, or voxel_size where it is in um."
        )
    return factors
