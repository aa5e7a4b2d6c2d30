"""Removal of planes of zeros at the faces of a volume, for models with `input.crop_zeros`, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from service.core.buffers import Allocator
from service.core.quantities import Size
from service.core.types import Array, Segmentation, Volume
from service.inference.preprocessing.normalize import BLOCK_VOXELS
from service.models.spec import ModelSpec
from service.models.spec_parts import Classes


@dataclass(frozen=True)
class Crop:
    """The part of a volume without planes of zeros at its faces.

    volume      the remaining part
    slices      position of this part along (z, y, x)
    whole_size  size (Z, Y, X) of the whole volume
    """

    volume: Volume
    slices: tuple[slice, slice, slice]
    whole_size: Size

    def undo(self, segmentation: Segmentation, spec: ModelSpec, allocate: Allocator) -> Segmentation:
        """Return the segmentation of the part on the grid of the whole volume. The rest is background."""
        pixels = segmentation.pixels
        whole_pixels = allocate((*pixels.shape[:-3], *self.whole_size), pixels.dtype)
        if segmentation.kind == "probabilities" and isinstance(spec.decoding, Classes):
            whole_pixels[0] = 1
        whole_pixels[(..., *self.slices)] = pixels
        return replace(segmentation, pixels=whole_pixels)


def crop_zeros(volume: Volume) -> Crop | None:
    """Remove the planes at all faces that contain only zeros in all channels.

    Returns None if there are no such planes, or if all pixels are zero.
    """
    _, depth, height, width = volume.shape
    used = [np.zeros(length, np.bool_) for length in (depth, height, width)]
    step = max(BLOCK_VOXELS // (height * width), 1)
    for z0 in range(0, depth, step):
        is_nonzero = (volume.read(z0, min(z0 + step, depth)) != 0).any(0)
        used[0][z0 : z0 + step] = is_nonzero.any((1, 2))
        plane = is_nonzero.any(0)
        used[1] |= plane.any(1)
        used[2] |= plane.any(0)
    if not used[0].any() or all(flags[0] and flags[-1] for flags in used):
        return None
    z, y, x = (slice(int(indices[0]), int(indices[-1]) + 1) for indices in map(np.flatnonzero, used))

    def read(first: int, end: int) -> Array:
        planes: Array = volume.read(z.start + first, z.start + end)[:, :, y, x]
        return planes

    shape = (volume.shape[0], z.stop - z.start, y.stop - y.start, x.stop - x.start)
    part = replace(volume, shape=shape, read=read, read_part=None)
    return Crop(part, (z, y, x), (depth, height, width))
