"""The schema of the key `decoding` of a model file: how scores are converted to labels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class FrozenModel(BaseModel):
    """A part of a model file. Unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Instances(FrozenModel):
    """Parameters of instance decoding, which assigns every foreground voxel to a maximum of the distance map.

    foreground         name of the output whose activation is the foreground probability
    distance           name of the output with the distance to the outline of the object, in voxels or normalized
    threshold          foreground probability above which a voxel belongs to an object
    persistence        a maximum is merged with the higher maximum on the other side of their saddle if it rises less
                       than this above the saddle, in units of the distance
    minimum_size       size in voxels below which objects are dropped
    minimum_fraction   objects are dropped if their volume is below this fraction of the volume of a sphere of diameter
                       `input.diameter` or of a typical object in the stack, whichever is smaller
    min_confidence     objects are dropped if the mean foreground probability of their voxels is below this value
    min_relative_odds  an object is dropped if its odds are below this fraction of the odds of a typical object in the
                       stack; the odds are p / (1 - p) for the mean foreground probability p; objects with p >= 0.9 are
                       always kept
    smoothing          number of times the distance map is averaged over neighbors, with weights 1, 2, 1 along each axis
    border             keep or drop objects that touch a face of the volume
    holes              keep or fill background that is enclosed by one object
    """

    kind: Literal["instances"]
    foreground: str = "foreground"
    distance: str = "distance"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    persistence: Annotated[float, Field(ge=0)] = 0.1
    minimum_size: Annotated[int, Field(ge=0)] = 16
    minimum_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_relative_odds: Annotated[float, Field(ge=0, lt=1)] = 0.0
    smoothing: Annotated[int, Field(ge=0, le=16)] = 0
    border: Literal["keep", "drop"] = "keep"
    holes: Literal["keep", "fill"] = "keep"


class Rays(FrozenModel):
    """Directions in which the distance from a voxel to the outline of its object is predicted.

    kind        golden-spiral: points on a spiral around a sphere, as in `stardist.Rays_GoldenSpiral`
    count       number of directions
    anisotropy  factors (z, y, x) by which the directions are divided, so that they are evenly distributed over objects
                in a stack of anisotropic voxels; None: (1, 1, 1)
    """

    kind: Literal["golden-spiral"] = "golden-spiral"
    count: Annotated[int, Field(ge=4, le=1024)]
    anisotropy: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None


class StarConvex(FrozenModel):
    """Parameters of the decoding of star-convex polyhedra with non-maximum suppression, as in StarDist.

    The first output is the object probability. The other outputs are the distances to the outline of the object along
    the rays, in voxels. The outputs may be coarser than the image.

    rays            directions of the distances
    grid            number of voxels along (z, y, x) that one score stands for
    threshold       object probability above which a voxel is a candidate for the origin of a polyhedron
    nms_threshold   a polyhedron is suppressed if a more probable one shares more than this fraction of the smaller one
    minimum_size    size in voxels below which objects are dropped
    min_confidence  objects are dropped if the probability of their polyhedron is below this value
    border          keep or drop objects that touch a face of the volume
    """

    kind: Literal["star-convex"]
    rays: Rays
    grid: tuple[PositiveInt, PositiveInt, PositiveInt] = (1, 1, 1)
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    nms_threshold: Annotated[float, Field(ge=0, le=1)] = 0.4
    minimum_size: Annotated[int, Field(ge=0)] = 0
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.0
    border: Literal["keep", "drop"] = "keep"


class Classes(FrozenModel):
    """One class per voxel: the output with the highest score. The first output is the background."""

    kind: Literal["classes"]
