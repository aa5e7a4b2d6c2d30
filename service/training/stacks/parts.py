"""Parts of annotated stacks on the grid of the network, for training and for scoring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.errors import BadParameter
from service.core.quantities import Diameter
from service.inference.preprocessing.normalize import normalize_volume
from service.inference.preprocessing.resample import compute_working_size, find_nearest_voxels, resample_image
from service.inference.windows.grid import as_size
from service.models.spec import ModelSpec
from service.training.examples import TargetFunction
from service.training.stacks.annotated_stack import AnnotatedStack

Floats = NDArray[np.float32]

# Maximum number of voxels of an annotated region after resampling.
MAX_RESAMPLED_VOXELS = 2**27
# Fraction of each stack that is held out for the final comparison.
HELD_OUT_FRACTION = 0.2
# Minimum number of objects in the held-out parts. With fewer objects, the scores would not be meaningful.
MIN_HELD_OUT_OBJECTS = 10


@dataclass(frozen=True)
class StackPart:
    """A part of an annotated stack, normalized and resampled as in a request.

    image   normalized image [z, y, x] on the grid of the network
    labels  labels [z, y, x] on the same grid
    truth   labels [Z, Y, X] of the same part at the original resolution
    unknown, unknown_truth  masks of the voxels that are not annotated, on the grids of `labels` and `truth`; None if
                            all voxels are annotated
    """

    name: str
    image: Floats
    labels: NDArray[Any]
    truth: NDArray[Any]
    unknown: NDArray[np.bool_] | None = None
    unknown_truth: NDArray[np.bool_] | None = None

    @property
    def object_count(self) -> int:
        """Number of objects."""
        return int(np.count_nonzero(np.unique(self.truth)))


@dataclass(frozen=True)
class HeldOutParts:
    """Disjoint parts of annotated stacks.

    training    parts to train on
    validation  parts that select the weights
    test        parts for the final comparison; equal to `validation` if there are too few objects for separate parts
    """

    training: Sequence[StackPart]
    validation: Sequence[StackPart]
    test: Sequence[StackPart]

    @property
    def has_separate_test(self) -> bool:
        """Whether the final comparison uses objects that did not select the weights."""
        return self.test is not self.validation


def resample_stack(stack: AnnotatedStack, spec: ModelSpec) -> StackPart:
    """Normalize and resample the annotated region exactly as `segment` does for a request with this diameter.

    Raises BadFile, and BadParameter if the diameter is implausible or the resampled region would be too large.
    """
    diameter = None if stack.extents is None else Diameter(stack.extents, "px")
    volume_size = as_size(stack.volume.shape[1:])
    try:
        working_size = compute_working_size(stack.volume, spec, diameter)
    except BadParameter as error:
        raise BadParameter(f"{stack.name}: {error}", parameter=error.parameter) from error
    nearest_voxels = find_nearest_voxels(volume_size, working_size)
    spans = []
    for span, length, nearest in zip(stack.region, volume_size, nearest_voxels, strict=True):
        start, stop, _ = span.indices(length)
        first, last = np.searchsorted(nearest, [start, stop])
        spans.append(slice(int(first), int(last)))
    voxel_count = math.prod(span.stop - span.start for span in spans)
    if voxel_count > MAX_RESAMPLED_VOXELS:
        raise BadParameter(
            f"{stack.name}: after resampling to the model's object diameter of {spec.input.diameter:g} voxels, the"
            f" stack has {voxel_count:,} voxels. The maximum is {MAX_RESAMPLED_VOXELS:,}. Annotate a smaller region."
        )
    normalized, _ = normalize_volume(stack.volume, spec)
    prepared, _ = resample_image(normalized, stack.volume, spec, diameter)
    z, y, x = spans
    image = np.ascontiguousarray(prepared[0, slice(0, 1), z, y, x][0].numpy())
    indices = [
        nearest[span] - part.indices(length)[0]
        for nearest, span, part, length in zip(nearest_voxels, spans, stack.region, volume_size, strict=True)
    ]
    grid = np.ix_(*indices)
    unknown = None if stack.unknown is None else stack.unknown[grid]
    return StackPart(stack.name, image, stack.labels[grid], stack.labels, unknown, stack.unknown)


def split_part(part: StackPart, fraction: float) -> tuple[StackPart, StackPart]:
    """Split off the end of a part with about `fraction` of the object voxels. Return the beginning and the end.

    The part is split along its longest axis on the grid of the network. It is split along z only if this axis is more
    than twice as long as the others, because few planes may be annotated, and planes are further apart than pixels.
    """
    depth, height, width = part.image.shape
    axis = int(np.argmax([depth / 2, height, width]))
    object_voxels = np.count_nonzero(part.truth, axis=tuple({0, 1, 2} - {axis})).cumsum()
    index = int(np.searchsorted(object_voxels, (1 - fraction) * object_voxels[-1])) + 1
    return cut_part(part, axis, 0, index), cut_part(part, axis, index, part.truth.shape[axis])


def cut_part(part: StackPart, axis: int, start: int, stop: int) -> StackPart:
    """Return the piece of a part between two planes perpendicular to an axis, at the original resolution."""
    scale = part.image.shape[axis] / part.truth.shape[axis]
    box, truth_box = (
        (slice(None),) * axis + (span,)
        for span in (slice(round(start * scale), round(stop * scale)), slice(start, stop))
    )
    return StackPart(
        part.name,
        part.image[box],
        part.labels[box],
        part.truth[truth_box],
        None if part.unknown is None else part.unknown[box],
        None if part.unknown_truth is None else part.unknown_truth[truth_box],
    )


def compute_part_targets(part: StackPart, compute: TargetFunction) -> Floats:
    """Return the targets [T, z, y, x] of a part, float32, with a weight as an additional target if some are unknown."""
    if part.unknown is None:
        return compute(part.labels)
    # Objects do not end at planes that are not annotated, so the targets of each run of annotated planes are computed
    # separately.
    is_annotated = np.asarray(~part.unknown.all(axis=(1, 2)))
    run_starts = np.flatnonzero(np.diff(is_annotated, prepend=is_annotated[:1])).tolist()
    runs = np.split(part.labels, run_starts)
    targets = np.concatenate([compute(run) for run in runs if len(run)], axis=1)
    return np.concatenate([targets, ~part.unknown[None]]).astype(np.float32)


def crop_to_annotated_planes(part: StackPart) -> StackPart:
    """Return a part without the planes before the first and after the last annotated plane."""
    if part.unknown_truth is None:
        return part
    indices = np.flatnonzero(~part.unknown_truth.all(axis=(1, 2)))
    return cut_part(part, 0, int(indices[0]), int(indices[-1]) + 1) if indices.size else part


def hold_out_parts(
    parts: Sequence[StackPart], validation_fraction: float, *, has_large_objects: bool = False
) -> HeldOutParts:
    """Divide parts into training, validation and test. Parts without objects in both divisions are not used.

    If the last fifth of the stacks contains too few objects for a test, the validation parts are used for the test.
    Raises BadParameter if no stack contains objects in both divisions.

    has_large_objects  whether objects may be larger than a slab. The validation and test parts are then next to each
                       other in one thick slab, because more objects fit into compact parts
    """
    usable_parts = [part for part in parts if _can_split(part, validation_fraction)]
    if not usable_parts:
        raise BadParameter(
            "The annotated stacks contain too few objects. At least one stack must contain objects both in the first"
            f" {1 - validation_fraction:.0%} along its longest axis and in the rest. Annotate more objects."
        )
    if has_large_objects:
        fraction = 1 - (1 - HELD_OUT_FRACTION) * (1 - validation_fraction)
        training, slabs = _split_all(usable_parts, fraction)
        validation, test = _split_all(slabs, HELD_OUT_FRACTION / fraction)
    else:
        remaining, test = _split_all(usable_parts, HELD_OUT_FRACTION)
        training, validation = _split_all(remaining, validation_fraction)
    has_enough_objects = sum(part.object_count for part in test) >= MIN_HELD_OUT_OBJECTS
    if has_enough_objects and all(_has_objects(part) for part in (*training, *validation)):
        return HeldOutParts(training, validation, test)
    training, validation = _split_all(usable_parts, validation_fraction)
    return HeldOutParts(training, validation, validation)


def _split_all(parts: Sequence[StackPart], fraction: float) -> tuple[list[StackPart], list[StackPart]]:
    """Split every part. Return the first and the last pieces."""
    pieces = [split_part(part, fraction) for part in parts]
    return [first for first, _ in pieces], [last for _, last in pieces]


def _can_split(part: StackPart, fraction: float) -> bool:
    """Return whether both pieces of a part contain objects."""
    return all(map(_has_objects, split_part(part, fraction)))


def _has_objects(part: StackPart) -> bool:
    return bool(part.truth.any() and part.labels.any())
