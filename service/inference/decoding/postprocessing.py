"""Post-processing options of a request, which change how a model's scores are converted to objects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from service.core.errors import BadParameter
from service.core.quantities import Diameter, Size
from service.core.types import Extent, OutputKind, PostprocessingOptions
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries, Classes, Flows, Instances, StarConvex

# Options that apply to models that predict boundaries.
BOUNDARY_OPTIONS = ("minimum_size", "border")


def require_instances(spec: ModelSpec) -> Instances:
    """Return the instance decoding of a model. Raises TypeError if the model has a different decoding."""
    if not isinstance(spec.decoding, Instances):
        raise TypeError(f"The model {spec.name} does not detect objects.")
    return spec.decoding


def check_postprocessing(spec: ModelSpec, output: OutputKind, postprocessing: PostprocessingOptions) -> None:
    """Check that the post-processing options apply to the output of a model. Raises BadParameter otherwise."""
    for name in postprocessing.overrides:
        if isinstance(spec.decoding, Boundaries) and name not in BOUNDARY_OPTIONS:
            raise BadParameter(
                f"{name}: the model {spec.name} predicts boundaries, and supports only"
                f" {' and '.join(BOUNDARY_OPTIONS)}. Remove this option.",
                parameter=name,
            )
        if isinstance(spec.decoding, StarConvex) and name == "fill_holes":
            raise BadParameter(
                f"fill_holes: the objects of the model {spec.name} are polyhedra, which have no holes. Remove this"
                " option.",
                parameter=name,
            )
        if not spec.has_objects:
            raise BadParameter(
                f"{name}: this option applies to objects, but the model {spec.name} assigns a class to each voxel."
                " Remove this option.",
                parameter=name,
            )
        if output == "probabilities" or (output == "classes" and name != "threshold"):
            raise BadParameter(
                f"{name}: this option has no effect on output={output}. Remove this option, or set output=labels.",
                parameter=name,
                suggested={"output": "labels"},
            )


def compute_min_voxels(postprocessing: PostprocessingOptions, volume: Extent) -> int:
    """Return the minimum object size of a request in voxels of the volume, or 0 if the request has none.

    Raises BadParameter if the size is in cubic micrometers but the voxel size is not known.
    """
    if postprocessing.minimum_size is None:
        return 0
    voxels = postprocessing.minimum_size.to_voxels(volume.voxel_size)
    if voxels is None:
        raise BadParameter(
            "minimum_size: the file does not specify a voxel size, which is needed to convert um3 to voxels. Add"
            " voxel_size=Z,Y,X, or set minimum_size to a number of voxels, such as 60.",
            parameter="minimum_size",
        )
    # Due to rounding errors, 2.7 um3 would be slightly more than 100 voxels of 0.3 um.
    voxel_count = math.ceil(voxels * (1 - 1e-12))
    # A minimum that exceeds the volume by one voxel already removes every object, and it fits in the kernel's integers.
    return min(voxel_count, math.prod(volume.shape[1:]) + 1)


def _scale_steps(spec: ModelSpec, decoding: Flows, volume: Extent, diameter: Diameter | None) -> int:
    """Return the number of steps along the flow for objects of this diameter, rounded down as in Cellpose."""
    lengths = diameter and diameter.to_voxels(volume.voxel_size)
    if not lengths or not spec.input.diameter:
        return decoding.steps
    return max(int(np.float32(decoding.steps * lengths[2] / spec.input.diameter)), 1)


def apply_postprocessing(
    spec: ModelSpec,
    postprocessing: PostprocessingOptions,
    volume: Extent,
    size: Size,
    diameter: Diameter | None = None,
) -> ModelSpec:
    """Return the model with the decoding for one request, on a working grid of `size` (Z, Y, X).

    diameter  object diameter to which the stack is resampled

    A minimum size or minimum confidence in the request replaces all of the model's criteria of that kind. Sizes in the
    result are in voxels of the working grid. The decoder removes objects that would be too small at any position;
    `resample_segmentation` removes the other small objects.

    Raises the same errors as `compute_min_voxels`.
    """
    decoding = spec.decoding
    if isinstance(decoding, Classes):
        return spec
    changes: dict[str, Any] = {}
    if isinstance(decoding, Flows):
        # Objects are decoded on the grid of the stack.
        size = (volume.shape[1], volume.shape[2], volume.shape[3])
        changes = {"steps": _scale_steps(spec, decoding, volume, diameter)}
    if postprocessing.minimum_size is not None:
        # Maximum number of stack voxels per grid voxel. The exact size of an object is known only after resampling.
        max_stack_voxels = math.prod(
            -(-n // grid_length) for n, grid_length in zip(volume.shape[1:], size, strict=True)
        )
        changes["minimum_size"] = -(-compute_min_voxels(postprocessing, volume) // max_stack_voxels)
    changes |= _convert_options(postprocessing, has_relative_criteria=isinstance(decoding, Instances))
    return spec.model_copy(update={"decoding": decoding.model_copy(update=changes)})


def _convert_options(postprocessing: PostprocessingOptions, *, has_relative_criteria: bool) -> dict[str, Any]:
    """Return the keys of a decoding for options except the minimum size, without those that are not set.

    `check_postprocessing` has rejected options that do not apply to the decoding.
    """
    changes: dict[str, Any] = {}
    for name in ("threshold", "border", "min_confidence"):
        if (value := getattr(postprocessing, name)) is not None:
            changes[name] = value
    if postprocessing.fill_holes is not None:
        changes["holes"] = "fill" if postprocessing.fill_holes else "keep"
    if has_relative_criteria and postprocessing.minimum_size is not None:
        changes["minimum_fraction"] = 0.0
    if has_relative_criteria and postprocessing.min_confidence is not None:
        changes["min_relative_odds"] = 0.0
    return changes
