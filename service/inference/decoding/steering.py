"""Steering: changes by a request of the way in which a model's scores become objects."""

from __future__ import annotations

import math
from typing import Any

from service.core.errors import BadParameter
from service.core.quantities import Size
from service.core.types import Extent, OutputKind, Steering
from service.models.spec import Instances, ModelSpec


def require_instances(spec: ModelSpec) -> Instances:
    """Return how a model decodes objects. Raises TypeError for a model that finds none."""
    if not isinstance(spec.decoding, Instances):
        raise TypeError(f"{spec.name} finds no objects.")
    return spec.decoding


def check_steering(spec: ModelSpec, output: OutputKind, steering: Steering) -> None:
    """Check that the output of a model follows what a request steers. Raises BadParameter."""
    for name in steering.given:
        if not isinstance(spec.decoding, Instances):
            raise BadParameter(
                f"{name}: {spec.name} gives each voxel the class with the highest score and finds no objects; leave it"
                " out.",
                parameter=name,
            )
        if output == "probabilities" or (output == "classes" and name != "threshold"):
            raise BadParameter(
                f"{name}: there are no objects in {output}; leave it out, or ask for output=labels.",
                parameter=name,
                suggested={"output": "labels"},
            )


def minimum_voxels(steering: Steering, volume: Extent) -> int:
    """Return how many voxels of the volume an object must have for the caller, 0 where that is not stated.

    Raises BadParameter for micrometres without a voxel size.
    """
    if steering.minimum_size is None:
        return 0
    voxels = steering.minimum_size.in_voxels(volume.voxel_size)
    if voxels is None:
        raise BadParameter(
            "minimum_size: the file states no voxel size, so um3 mean nothing; give voxel_size=Z,Y,X too, or a number"
            " of voxels, such as 60.",
            parameter="minimum_size",
        )
    # 2.7 um3 are 100 voxels of 0.3 um, of which floats make a little more.
    least = math.ceil(voxels * (1 - 1e-12))
    # One more than there are drops everything as well, and fits the integers of the kernel.
    return min(least, math.prod(volume.shape[1:]) + 1)


def steer(spec: ModelSpec, steering: Steering, volume: Extent, size: Size) -> ModelSpec:
    """Return a model as it decodes one request on a working grid of `size` (Z, Y, X), whose voxels its sizes are in.

    A stated minimum size or confidence is the only one that holds. Objects that are smaller wherever they lie are
    dropped here, and `resample_segmentation` drops the others. Raises what `minimum_voxels` raises.
    """
    decoding = spec.decoding
    if not isinstance(decoding, Instances):
        return spec
    changes: dict[str, Any] = {}
    if steering.minimum_size is not None:
        # Voxels of the stack that one of the grid becomes at most: whether an object has enough of them is known later.
        most = math.prod(-(-n // edge) for n, edge in zip(volume.shape[1:], size, strict=True))
        changes = {"minimum_size": -(-minimum_voxels(steering, volume) // most), "minimum_fraction": 0.0}
    for name in ("threshold", "border", "min_confidence"):
        if (value := getattr(steering, name)) is not None:
            changes[name] = value
    if steering.min_confidence is not None:
        changes["min_relative_odds"] = 0.0
    if steering.fill_holes is not None:
        changes["holes"] = "fill" if steering.fill_holes else "keep"
    return spec.model_copy(update={"decoding": decoding.model_copy(update=changes)})
