"""Resampling of an image to the model's grid, and of its segmentation back to the grid of the volume."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.errors import BadFile, BadParameter
from service.core.hardware.host import run_in_threads
from service.core.quantities import Diameter, Size, VoxelSize
from service.core.types import Extent, OutputKind, Segmentation, Volume
from service.inference.decoding.labels import keep_objects
from service.inference.preprocessing.interpolation import InterpolationKind, InterpolationKinds, Resampling, Spans
from service.inference.preprocessing.normalize import NormalizedImage, normalize_volume
from service.inference.windows.grid import Box, as_size
from service.inference.windows.sliding_window import Image
from service.models.spec import ModelSpec
from service.models.spec_parts import Flows

# Maximum ratio between the voxel sizes of the volume and the model. If the ratio is larger, one of them must be wrong.
MAX_VOXEL_SIZE_RATIO = 64.0
# Maximum ratio between the object diameters of the request and the model. Objects with a larger ratio would not be
# visible in the stack.
MAX_DIAMETER_RATIO = 16.0
# Maximum number of scores that are interpolated together, which limits temporary memory.
MAX_SCORES_PER_STEP = 2**22
# Maximum ratio of the voxel lengths of an image that nnU-Net interpolates along all axes.
MAX_ANISOTROPY = 3
# Number of planes that a thread resamples at a time when a whole image is created.
PLANES_PER_TASK = 8


class ResampledImage:
    """An image on another grid, interpolated when it is read.

    Index it like a float32 tensor [1, C, Z, Y, X] with (0, channels, z, y, x). All indices except the first are slices.
    The image is thread-safe if its source is thread-safe.

    source      image before resampling: the whole image or, with a box, only its part `resampling.find_source_box(box)`
    resampling  resampling of the whole image
    box         part of the resampled grid that the image covers; None: all of it
    limits      lowest and highest value of each channel, which splines could exceed
    """

    def __init__(
        self,
        source: Image,
        resampling: Resampling,
        box: Spans | None = None,
        limits: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._source, self._resampling, self._limits = source, resampling, limits
        self._box = box or _make_full_spans(resampling.target_size)
        self._source_box = _make_full_spans(resampling.source_size) if box is None else resampling.find_source_box(box)
        self.shape = (1, source.shape[1], *map(len, self._box))

    def __getitem__(self, box: Box) -> Tensor:
        _, channels, *spans = box
        z, y, x = (full_range[span] for full_range, span in zip(self._box, spans, strict=True))
        source_spans = self._resampling.find_source_box((z, y, x))
        planes, rows, columns = (
            slice(span.start - source_span.start, span.stop - source_span.start)
            for span, source_span in zip(source_spans, self._source_box, strict=True)
        )
        pixels = self._source[0, channels, planes, rows, columns].numpy()
        resampled_pixels = self._resampling.interpolate(pixels, (z, y, x))
        for channel_pixels, limits in zip(resampled_pixels, self._limits[channels], strict=False):
            np.clip(channel_pixels, *limits, out=channel_pixels)
        return torch.from_numpy(resampled_pixels)

    def to_tensor(self) -> Tensor:
        """Return the whole image as a float32 tensor [1, C, Z, Y, X]."""
        # Worker threads are not in the caller's inference mode and must not write to tensors created in it.
        pixels = np.empty(self.shape, np.float32)

        def fill(first: int) -> None:
            planes = slice(first, min(first + PLANES_PER_TASK, self.shape[2]))
            pixels[0, :, planes] = self[0, slice(None), planes, slice(None), slice(None)].numpy()

        run_in_threads(fill, range(0, self.shape[2], PLANES_PER_TASK), pixels.nbytes)
        return torch.from_numpy(pixels)


def _make_full_spans(size: Size) -> Spans:
    z, y, x = map(range, size)
    return z, y, x


class PreparedImage(NamedTuple):
    """Input of the network, and notes for the user. `image` behaves like a float32 tensor [1, C, Z, Y, X]."""

    image: NormalizedImage | ResampledImage
    notes: tuple[str, ...]


def prepare(volume: Volume, spec: ModelSpec, diameter: Diameter | None = None) -> PreparedImage:
    """Normalize each channel over the whole volume, and resample it to the grid of the network.

    Raises the same errors as `normalize_volume` and `compute_working_size`.
    """
    image, notes = normalize_volume(volume, spec)
    resampled, resampling_notes = resample_image(image, volume, spec, diameter)
    return PreparedImage(resampled, notes + resampling_notes)


def prepare_tensor(volume: Volume, spec: ModelSpec) -> Tensor:
    """Return the prepared image as one tensor, float32 [1, C, z, y, x]. Raises the same errors as `prepare`."""
    return prepare(volume, spec).image.to_tensor()


def resample_image(image: NormalizedImage, volume: Volume, spec: ModelSpec, diameter: Diameter | None) -> PreparedImage:
    """Resample the image to the grid of the network. Raises the same errors as `compute_working_size`."""
    source_size, target_size = as_size(volume.shape[1:]), compute_working_size(volume, spec, diameter)
    notes = describe_resampling(volume, target_size, spec, diameter)
    kinds = _choose_interpolation(volume, spec, "cubic" if spec.input.resampling == "nnunet" else "linear")
    resampling = Resampling(source_size, target_size, kinds)
    if source_size == target_size:
        return PreparedImage(image, notes)
    limits = image.find_limits() if "cubic" in kinds else ()
    return PreparedImage(ResampledImage(image, resampling, limits=limits), notes)


def resamples_scores(spec: ModelSpec, output: OutputKind) -> bool:
    """Return whether scores, instead of the labels, are resampled to the grid of the stack."""
    return isinstance(spec.decoding, Flows) or (spec.input.resampling == "nnunet" and output != "labels")


def count_score_bytes(spec: ModelSpec, size: Size, stack_size: Size) -> int:
    """Return the memory for resampling scores from a grid of `size` (Z, Y, X) to a grid of `stack_size`, in bytes."""
    plane_scores = len(spec.outputs) * math.prod(size[1:])
    step_scores = max(MAX_SCORES_PER_STEP, len(spec.outputs) * math.prod(stack_size[1:]))
    return 4 * (2 * (spec.input.roi_size[0] + 2) * plane_scores + 4 * step_scores)


def choose_score_interpolation(volume: Extent, spec: ModelSpec) -> InterpolationKinds:
    """Return the kind of interpolation of scores along each axis of a stack."""
    return _choose_interpolation(volume, spec, "linear")


def _choose_interpolation(volume: Extent, spec: ModelSpec, kind: InterpolationKind) -> InterpolationKinds:
    """Return the kind of interpolation along each axis of a stack.

    nnU-Net uses the nearest planes if the voxels of the stack or, failing that, of the model are much longer along one
    axis than along the others. Source: `determine_do_sep_z_and_axis` in nnU-Net.
    """
    if spec.input.resampling != "nnunet" or spec.input.voxel_size is None or volume.voxel_size is None:
        return kind, kind, kind
    for lengths in (tuple(volume.voxel_size), spec.input.voxel_size):
        if max(lengths) / min(lengths) > MAX_ANISOTROPY:
            is_separate = [length == max(lengths) and lengths.count(length) == 1 for length in lengths]
            z, y, x = ("nearest" if separate else kind for separate in is_separate)
            return z, y, x
    return kind, kind, kind


def describe_resampling(
    volume: Extent, target_size: Size, spec: ModelSpec, diameter: Diameter | None
) -> tuple[str, ...]:
    """Return notes for the user about the resampling, if the size changes, and about the diameter."""
    limit_notes, source_size = tuple(_explain_limits(volume, spec, diameter)), as_size(volume.shape[1:])
    if source_size == target_size:
        return limit_notes
    reason = "the model's voxel size" if diameter is None else f"an object diameter of {spec.input.diameter:g} voxels"
    source, target = (" x ".join(map(str, size)) for size in (source_size, target_size))
    return (f"Resampled from {source} to {target} voxels to match {reason}.", *limit_notes)


def _explain_limits(volume: Extent, spec: ModelSpec, diameter: Diameter | None) -> Iterator[str]:
    """Yield notes about a diameter that is applied only in part."""
    lengths = None if diameter is None else diameter.to_voxels(volume.voxel_size)
    if diameter is None or lengths is None:
        return
    sizes = zip(lengths[1:], volume.shape[2:], spec.input.roi_size[1:], strict=True)
    if not isinstance(spec.decoding, Flows) and all(length > max(size, window) for length, size, window in sizes):
        yield (
            f"An object diameter of {diameter} is larger than the stack, which is not made smaller than a window. Check"
            " the diameter and the voxel size."
        )
    if len(diameter.lengths) == 1 and volume.voxel_size is not None and volume.voxel_size.is_anisotropy_limited:
        ratio = volume.voxel_size.z / volume.voxel_size.pixel_size
        yield (
            f"The planes are {ratio:.3g} times as far apart as the pixels, and objects are assumed to be"
            f" {lengths[0] * volume.voxel_size.z:.3g} um deep, so that they span {lengths[0]:.3g} planes. Check the"
            " voxel size, or set the diameter along Z,Y,X."
        )


def resample_segmentation(segmentation: Segmentation, size: Size, minimum_size: int = 0) -> Segmentation:
    """Resample a segmentation to `size` (Z, Y, X): labels and classes to the nearest voxel, probabilities trilinearly.

    Objects that are too small for the grid, or have fewer than `minimum_size` voxels afterward, are removed. The
    remaining objects are renumbered without gaps. A segmentation that already has this size is returned unchanged.
    """
    pixels = segmentation.pixels
    if pixels.shape[-3:] == size:
        return segmentation
    if segmentation.kind == "probabilities":
        scores = ResampledImage(torch.from_numpy(pixels)[None], Resampling(as_size(pixels.shape[1:]), size))
        return replace(segmentation, pixels=scores.to_tensor()[0].numpy())
    nearest_pixels = pixels[np.ix_(*find_nearest_voxels(as_size(pixels.shape), size))]
    if segmentation.kind == "classes":
        return replace(segmentation, pixels=nearest_pixels)
    voxel_counts = np.bincount(nearest_pixels.ravel(), minlength=(segmentation.count or 0) + 1)
    return keep_objects(replace(segmentation, pixels=nearest_pixels), voxel_counts[1:] >= max(minimum_size, 1))


def find_nearest_voxels(source_size: Size, target_size: Size) -> list[NDArray[np.intp]]:
    """Return for each axis the source voxel that contains the center of each target voxel."""
    return [
        ((np.arange(target_length) + 0.5) * source_length / target_length).astype(np.intp)
        for source_length, target_length in zip(source_size, target_size, strict=True)
    ]


def compute_working_size(volume: Extent, spec: ModelSpec, diameter: Diameter | None = None) -> Size:
    """Return the size (Z, Y, X) of the grid that the network works on.

    With a `diameter`, the volume is resampled so that objects have the model's diameter, but no axis becomes shorter
    than the window, because padding affects the network more than large objects do. Models with `decoding.kind: flows`
    have no such limit. Without a diameter, the grid is that of the volume, unless the voxel sizes of both the model and
    the volume are known.

    Raises BadParameter if the diameter or voxel size is implausible. Raises BadFile if each plane is a single pixel,
    because windows would contain almost only padding.
    """
    _, z, y, x = volume.shape
    if z > 1 and y == x == 1:
        raise BadFile(
            f"The {z} planes of the stack are single pixels, so there is nothing to segment. If the axes are wrong,"
            " set axes=, slowest axis first.",
            parameter="axes",
        )
    if diameter is not None and isinstance(spec.decoding, Flows):
        factors = _find_object_scale(volume, spec, diameter)
        return as_size([max(1, _truncate(n * factor)) for n, factor in zip((z, y, x), factors, strict=True)])
    if diameter is not None:
        scales = zip(_find_object_scale(volume, spec, diameter), spec.input.roi_size, (z, y, x), strict=True)
        return _scale_size(
            (z, y, x), [max(scale, min(window_length / length, 1)) for scale, window_length, length in scales]
        )
    if spec.input.voxel_size is None or volume.voxel_size is None:
        return z, y, x
    return compute_resampled_size((z, y, x), volume.voxel_size, VoxelSize(*spec.input.voxel_size))


def compute_scale_factors(
    volume: Extent, spec: ModelSpec, diameter: Diameter | None = None
) -> tuple[float, float, float]:
    """Return the factors along (z, y, x) by which the volume is resampled. Raises like `compute_working_size`."""
    size = compute_working_size(volume, spec, diameter)
    z, y, x = (length / source_length for length, source_length in zip(size, volume.shape[1:], strict=True))
    return z, y, x


def compute_applied_diameter(volume: Extent, spec: ModelSpec, diameter: Diameter | None) -> tuple[float, ...] | None:
    """Return the applied object diameter along (z, y, x), in voxels; None if the model has no object diameter."""
    if spec.input.diameter is None:
        return None
    diameter_lengths = diameter and diameter.to_voxels(volume.voxel_size)
    return diameter_lengths or tuple(spec.input.diameter / factor for factor in compute_scale_factors(volume, spec))


def compute_resampled_size(size: Size, source: VoxelSize, target: VoxelSize) -> Size:
    """Return the size of the grid after voxels of size `source` are resampled to voxels of size `target`.

    size  size of the grid before resampling

    Raises BadParameter if the voxel sizes differ so much that one of them must be wrong.
    """
    factors = [source_length / target_length for source_length, target_length in zip(source, target, strict=True)]
    if not all(1 / MAX_VOXEL_SIZE_RATIO <= factor <= MAX_VOXEL_SIZE_RATIO for factor in factors):
        volume_text, model_text = (", ".join(f"{length:g}" for length in voxel_size) for voxel_size in (source, target))
        raise BadParameter(
            f"The voxel size is {volume_text} um, but the model needs about {model_text} um. "
            "If the voxel size is wrong, set voxel_size=Z,Y,X in micrometers.",
            parameter="voxel_size",
        )
    return _scale_size(size, factors)


def _scale_size(size: Size, factors: Sequence[float]) -> Size:
    """Scale each length, and round it to at least 1 voxel. Factors between 0.99 and 1.01 are ignored."""
    pairs = zip(size, factors, strict=True)
    return as_size([n if abs(factor - 1) < 0.01 else max(1, round(n * factor)) for n, factor in pairs])


def _truncate(value: float) -> int:
    """Round down like Cellpose, which computes in float32, so that 16.9999999 becomes 17."""
    return int(np.float32(value))


def _find_object_scale(volume: Extent, spec: ModelSpec, diameter: Diameter) -> list[float]:
    """Return the factors along (z, y, x) that scale objects of this diameter to the model's diameter."""
    model_diameter = spec.input.diameter
    if model_diameter is None:
        raise BadParameter(
            f"The model {spec.name} has no object diameter to resample to. Remove the parameter diameter.",
            parameter="diameter",
        )
    source_diameters = diameter.to_voxels(volume.voxel_size)
    if source_diameters is None:
        raise BadParameter(
            "The file does not specify a voxel size, which is needed for a diameter in um. Add voxel_size=Z,Y,X, or "
            "set the diameter in voxels, such as 15px.",
            parameter="diameter",
        )
    factors = [model_diameter / length for length in source_diameters]
    if not all(1 / MAX_DIAMETER_RATIO <= factor <= MAX_DIAMETER_RATIO for factor in factors):
        lengths = " x ".join(f"{length:.3g}" for length in source_diameters)
        raise BadParameter(
            f"The object diameter of {lengths} voxels differs too much from the {model_diameter:g} voxels of the model "
            f"{spec.name}. Correct the diameter, or the voxel size if the diameter is in um.",
            parameter="diameter",
        )
    return factors
