"""Annotated stacks: the image and the labels of an annotated region, before resampling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt

from service.core.errors import BadParameter
from service.core.quantities import Diameter, VoxelSize
from service.core.types import Selection, Volume
from service.formats import stack_reader
from service.training.examples import MAX_DECODED_BYTES, compute_median_extents

Extents = tuple[float, float, float]
Region = tuple[slice, slice, slice]

WHOLE_STACK: Region = (slice(None), slice(None), slice(None))
# Width of the background around the objects of a partially annotated stack, as a fraction of the object diameter.
PARTIAL_RIM = 0.25
# Fraction of object voxels above which a stack contains too little background to learn from.
MAX_OBJECT_FRACTION = 0.97
# Minimum number of annotated objects whose extents are preferred to the diameter that was used to segment the stack.
MIN_OBJECTS_FOR_EXTENTS = 5


class LabelOptions(NamedTuple):
    """The meaning of the labels.

    diameter            diameter of the objects; None to measure it on the annotated objects
    has_diameter        whether the stack is resampled to the object diameter of the model
    ignored             label of voxels that are not annotated; None if there is no such label
    is_partial          whether only some objects are annotated, so that most voxels without a label are unknown
    has_partial_planes  whether only some planes are annotated, so that all voxels of planes without labels are unknown
    """

    diameter: Diameter | None = None
    has_diameter: bool = True
    ignored: int | None = None
    is_partial: bool = False
    has_partial_planes: bool = False


DEFAULT_LABEL_OPTIONS = LabelOptions()


class StackFiles(NamedTuple):
    """The files of an annotated stack.

    region     annotated region; None for the whole stack
    diameter   object diameter that was used to segment the stack, which is used if there are few annotated objects
    selection  channel, axes and voxel size of the image
    """

    name: str
    image: Path
    labels: Path
    region: Region | None = None
    diameter: str | None = None
    selection: Selection = Selection()


@dataclass(frozen=True)
class AnnotatedStack:
    """A stack and the labels of its annotated region.

    volume   the whole stack, with one channel
    labels   labels [Z, Y, X] of the region
    region   annotated region of the volume
    extents  object diameter along (z, y, x) in voxels; None to use the stack at its original resolution
    unknown  mask [Z, Y, X] of voxels of the region that are not annotated; None if all voxels are annotated
    """

    name: str
    volume: Volume
    labels: NDArray[Any]
    region: Region = WHOLE_STACK
    extents: Extents | None = None
    unknown: NDArray[np.bool_] | None = None


def name_stack(image: Path) -> str:
    """Return the name of a stack: the folder name if the file is called `image`, else the file name."""
    is_generic = image.name.partition(".")[0] == "image" and image.parent.name
    return image.parent.name if is_generic else image.name


def read_stack(stack: StackFiles, options: LabelOptions = DEFAULT_LABEL_OPTIONS) -> AnnotatedStack:
    """Read a stack and the labels of its annotated region.

    Raises BadFile, and BadParameter if the stack has several channels, if the labels have a different shape or are no
    integers, or if a diameter in micrometers is used for a stack without a voxel size.
    """
    volume = stack_reader.read(stack.image, stack.selection, MAX_DECODED_BYTES)
    axes = stack.selection.axes and stack.selection.axes.upper().replace("C", "")
    labels_volume = stack_reader.read(stack.labels, Selection(axes=axes, is_labels=True), MAX_DECODED_BYTES)
    _check_shapes(stack.name, volume, labels_volume)
    region = stack.region or WHOLE_STACK
    labels = convert_labels(labels_volume.read_all()[0][region], stack.name)
    labels, unknown = separate_unknown_voxels(labels, options)
    measured = _find_extents(stack, labels, volume.voxel_size, options)
    if options.is_partial:
        unknown |= _find_distant_voxels(labels, measured or (1.0, 1.0, 1.0))
    extents = measured if options.has_diameter else None
    return AnnotatedStack(stack.name, volume, labels, region, extents, unknown if unknown.any() else None)


def _check_shapes(name: str, volume: Volume, labels_volume: Volume) -> None:
    if volume.shape[0] != 1:
        channels = ", ".join(f"{index} {channel}".strip() for index, channel in enumerate(volume.channels))
        raise BadParameter(
            f"{name}: the stack has {volume.shape[0]} channels ({channels}). Models are trained on one channel,"
            " so set channel= to its index or name.",
            parameter="channel",
        )
    if volume.shape != labels_volume.shape:
        raise BadParameter(
            f"{name}: the image and the labels differ in shape: {volume.shape[1:]} and"
            f" {labels_volume.shape[1:] if labels_volume.shape[0] == 1 else labels_volume.shape}."
        )


def separate_unknown_voxels(labels: NDArray[Any], options: LabelOptions) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return labels [Z, Y, X] without the ignored label, and a mask of ignored voxels and of planes without labels."""
    unknown = np.zeros(labels.shape, np.bool_)
    if options.ignored is not None:
        unknown |= labels == options.ignored
        labels = np.where(unknown, labels.dtype.type(0), labels)
    if options.has_partial_planes:
        unknown |= ~labels.any(axis=(1, 2), keepdims=True)
    return labels, unknown


def _find_distant_voxels(labels: NDArray[Any], extents: Extents) -> NDArray[np.bool_]:
    """Return a mask of the voxels outside all objects and their rims."""
    sampling = [1 / extent for extent in extents]
    distances: NDArray[np.float64] = distance_transform_edt(labels == 0, sampling=sampling)
    return distances > PARTIAL_RIM


def convert_labels(labels: NDArray[Any], name: str) -> NDArray[Any]:
    """Return labels as contiguous integers. Raises BadParameter if they are not whole numbers from 0."""
    if labels.dtype.kind not in "iub":
        whole_numbers = np.nan_to_num(labels, nan=-1.0, posinf=-1.0, neginf=-1.0).astype(np.int64)
        if not np.array_equal(whole_numbers, labels):
            raise BadParameter(f"{name}: the labels must be whole numbers, one for each object, and 0 for background.")
        # From this number on, a float of this type cannot represent all labels, so objects may have been merged.
        limit = 2 ** (np.finfo(labels.dtype).nmant + 1)
        if whole_numbers.max(initial=0) > limit:
            raise BadParameter(
                f"{name}: labels of type {labels.dtype} are exact only up to {limit}, but the largest label is"
                f" {whole_numbers.max()}. Save the labels as integers."
            )
        labels = whole_numbers
    if labels.size and labels.min() < 0:
        raise BadParameter(f"{name}: the labels must not be negative. The smallest label is {labels.min()}.")
    return np.ascontiguousarray(labels.astype(np.uint8) if labels.dtype.kind == "b" else labels)


def _find_extents(
    stack: StackFiles, labels: NDArray[Any], voxel_size: VoxelSize | None, options: LabelOptions
) -> Extents | None:
    """Return the diameter of the objects in voxels: the specified one, the annotated one, or the recorded one."""
    if options.diameter is not None:
        return _convert_diameter(stack.name, options.diameter, voxel_size)
    recorded = None if stack.diameter is None else Diameter.parse(stack.diameter).to_voxels(voxel_size)
    measured = compute_median_extents(labels)
    if measured is None or (recorded is not None and np.count_nonzero(np.unique(labels)) < MIN_OBJECTS_FOR_EXTENTS):
        return recorded
    z, y, x = measured.tolist()
    if not (options.has_partial_planes and options.has_diameter):
        return z, y, x
    depth = _estimate_depth(labels)
    if depth is not None:
        return depth, y, x
    if recorded is not None:
        return recorded
    raise BadParameter(
        f"{stack.name}: the annotated planes do not show how many planes deep the objects are, because too few"
        " objects begin or end between two annotated planes. Annotate adjacent planes, or set the diameter"
        " along z, y and x, such as 7,15,15px.",
        parameter="diameter",
    )


def _convert_diameter(name: str, diameter: Diameter, voxel_size: VoxelSize | None) -> Extents:
    extents = diameter.to_voxels(voxel_size)
    if extents is None:
        raise BadParameter(
            f"{name}: the file does not specify a voxel size, which is needed for a diameter in um. Add"
            " voxel_size=Z,Y,X, or set the diameter in voxels, such as 15px.",
            parameter="diameter",
        )
    return extents


def _estimate_depth(labels: NDArray[Any]) -> float | None:
    """Return the mean number of planes of an object in labels [Z, Y, X] of which only some planes are annotated.

    Planes without labels are not annotated. Objects that are cut off by them would bias the measured depth. Therefore,
    only pairs of adjacent annotated planes are used (the disector of Sterio, 1984): the number of object sections,
    divided by the number of objects that are in one of the two planes. Returns None if there are too few of them.
    """
    sections = [set(np.unique(plane[plane > 0]).tolist()) for plane in labels]
    pairs = [(upper, lower) for upper, lower in itertools.pairwise(sections) if upper and lower]
    section_count = sum(len(upper) + len(lower) for upper, lower in pairs)
    end_count = sum(len(upper ^ lower) for upper, lower in pairs)
    return section_count / end_count if end_count >= MIN_OBJECTS_FOR_EXTENTS else None


def check_background(stacks: Sequence[AnnotatedStack]) -> None:
    """Raise BadParameter if almost all annotated voxels belong to objects, because a model could not separate them."""
    known_count = sum(
        stack.labels.size - (0 if stack.unknown is None else int(np.count_nonzero(stack.unknown))) for stack in stacks
    )
    object_count = sum(int(np.count_nonzero(stack.labels)) for stack in stacks)
    if object_count > MAX_OBJECT_FRACTION * known_count:
        raise BadParameter(
            f"{100 * object_count / known_count:.0f}% of the annotated voxels belong to objects. Training learns to"
            " distinguish objects from background, so a model would find a single object. For objects that fill the"
            " stack, train a model that predicts boundaries: set target=boundaries for cells in a tissue, or"
            " target=affinities for bodies in electron microscopy. If the stacks have a background, set its label"
            " to 0.",
            parameter="target",
        )


def choose_default_diameter(stacks: Sequence[AnnotatedStack]) -> Diameter | None:
    """Return the median object diameter of the stacks along (z, y, x); None if no stack is resampled to a diameter.

    The diameter is in micrometers if the voxel sizes of all stacks are known, so that it also applies to stacks with a
    different voxel size.
    """
    known = [(stack.extents, stack.volume.voxel_size) for stack in stacks if stack.extents is not None]
    if not known:
        return None
    has_voxel_sizes = all(voxel_size is not None for _, voxel_size in known)
    lengths = [np.asarray(extents) * (tuple(size) if has_voxel_sizes and size else 1.0) for extents, size in known]
    z, y, x = np.median(lengths, axis=0).tolist()
    return Diameter((z, y, x), "um" if has_voxel_sizes else "px")
