"""Parts of the schema of a model file: normalization, placement of windows, and how scores are converted to labels."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

# Maximum standard deviation of Gaussian filters in voxels, because larger filters take very long.
MAX_SIGMA = 50
# Maximum number of affinities, and the longest offset in voxels.
MAX_AFFINITIES = 64
MAX_OFFSET = 64
Epsilon = Annotated[float, Field(ge=0, le=0.1)]


class FrozenModel(BaseModel):
    """A part of a model file. Unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PercentileNormalization(FrozenModel):
    """Normalization to (x - p_low) / (p_high - p_low + eps) with percentiles of a whole channel, optionally clipped."""

    kind: Literal["percentile"]
    low: Annotated[float, Field(ge=0, le=100)] = 1.0
    high: Annotated[float, Field(ge=0, le=100)] = 99.8
    eps: Epsilon = 0.0
    clip: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self


class ZScoreNormalization(FrozenModel):
    """Normalization to (x - mean) / (std + eps), with the mean and standard deviation (std) of a whole channel."""

    kind: Literal["zscore"]
    eps: Epsilon = 0.0


class RangeNormalization(FrozenModel):
    """Normalization to (x - low) / (high - low) with fixed intensities, optionally clipped."""

    kind: Literal["range"]
    low: float
    high: float
    clip: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.low == self.high:
            raise ValueError("low and high must differ")
        return self


Normalization = Annotated[
    PercentileNormalization | ZScoreNormalization | RangeNormalization, Field(discriminator="kind")
]


TilingName = Literal["monai", "nnunet", "stardist", "cellpose"]


class Tiling(NamedTuple):
    """How windows are placed on a volume.

    name         program whose positions and weights of windows are used. MONAI moves the last window back, so it
                 overlaps more than the others. The other programs increase the overlap of all windows equally. Windows
                 of Cellpose are tiles of planes, which overlap along y and x only.
    alignment    the first voxels of all windows are multiples of these numbers (z, y, x), which also divide the window
    step         number of voxels along (z, y, x) that one score stands for; these numbers divide the alignment
    is_fixed     whether tiles of Cellpose keep their size if a plane is smaller; otherwise they have the size of the
                 plane, with padding
    is_mirrored  whether volumes that are shorter than a window along two or three axes are padded with mirror images
    """

    name: TilingName = "monai"
    alignment: tuple[int, int, int] = (1, 1, 1)
    step: tuple[int, int, int] = (1, 1, 1)
    is_fixed: bool = False
    is_mirrored: bool = False


# Windows as MONAI places them.
MONAI_TILING = Tiling()


class ObjectCalibration(FrozenModel):
    """Logistic regression for the probability that an object matches a true object at an IoU of 0.5.

    It is fitted to objects of stacks that the weights were not trained on.

    intercept   intercept of the regression
    certainty   coefficient of the logit of the mean foreground probability of the object
    peak        coefficient of the distance at the peak of the object
    size        coefficient of the absolute logarithm of the ratio between the diameters of object and model
    result      coefficient of the log-odds of all objects of the result, `Calibration.intercept` and the terms after it
    fragment    coefficient of the logarithm of the ratio between the diameters of a typical object of the result and
                this object; the logarithm is 0 for objects that are larger
    threshold   expected F1 below which a result causes a warning
    """

    intercept: float
    certainty: float
    peak: float
    size: float
    result: float
    fragment: float = 0.0
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5


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


class Regions(FrozenModel):
    """Overlapping regions, one per output: each voxel gets the class of the last region that contains it.

    classes    class of each region, in the order of the outputs; voxels outside all regions are background, class 0
    threshold  probability above which a voxel belongs to a region
    """

    kind: Literal["regions"]
    classes: Annotated[tuple[Annotated[PositiveInt, Field(le=255)], ...], Field(min_length=1)]
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5


def _check_offset(offset: tuple[int, int, int]) -> tuple[int, int, int]:
    if not any(offset) or max(map(abs, offset)) > MAX_OFFSET:
        raise ValueError(f"offsets must not be zero, and at most {MAX_OFFSET} voxels along each axis")
    return offset


Offset = Annotated[tuple[int, int, int], AfterValidator(_check_offset)]
"""Offset (z, y, x) in voxels to another voxel."""


class Boundaries(FrozenModel):
    """Parameters of boundary decoding: a watershed to supervoxels, which are then merged to objects.

    Every voxel belongs to an object. The defaults are those of PanSeg.

    boundary                 name of the output whose activation is the boundary probability
    affinities               offsets (z, y, x) in voxels of the outputs that follow the first one, which is `boundary`:
                             the probability that a voxel and the voxel at the offset belong to the same object; empty
                             if there are no such outputs. Supervoxels are merged by the affinities if there are any
    agglomeration            how supervoxels are merged: by solving a multicut, by GASP with the mean boundary
                             probability as linkage, by the mutex watershed, or not at all
    beta                     bias of the merging from 0 (few, large objects) to 1 (many, small objects)
    watershed_threshold      boundary probability above which a voxel is a boundary in the distance transform
    watershed_sigma          standard deviation of the Gaussian filter of the distances, whose maxima become
                             supervoxels, in voxels
    watershed_weight_sigma   standard deviation of the Gaussian filter of the boundary probability that is flooded
    watershed_alpha          weight of the boundary probability among the heights that are flooded; the rest is the
                             weight of the inverted distances
    watershed_minimum_size   size in voxels below which supervoxels are merged with their neighbors
    watershed_stacked        whether each plane is flooded on its own, for stacks with a large distance between planes
    minimum_size             size in voxels below which objects are merged with their neighbors
    border                   keep or drop objects that touch a face of the volume
    background               keep all objects, or drop the largest object, which is the background
    """

    kind: Literal["boundaries"]
    boundary: str = "boundary"
    affinities: Annotated[tuple[Offset, ...], Field(max_length=MAX_AFFINITIES)] = ()
    agglomeration: Literal["multicut", "gasp", "mutex_watershed", "none"] = "gasp"
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.6
    watershed_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    watershed_sigma: Annotated[float, Field(ge=0, le=MAX_SIGMA)] = 1.0
    watershed_weight_sigma: Annotated[float, Field(ge=0, le=MAX_SIGMA)] = 2.0
    watershed_alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    watershed_minimum_size: Annotated[int, Field(ge=0)] = 100
    watershed_stacked: bool = False
    minimum_size: Annotated[int, Field(ge=0)] = 100
    border: Literal["keep", "drop"] = "keep"
    background: Literal["keep", "drop_largest"] = "keep"


class Flows(FrozenModel):
    """Parameters of flow decoding, in which voxels move along a flow to the center of their object, as in Cellpose.

    The network segments planes. It is applied to the planes of three orientations, and its scores are added. The first
    output is the logit of the foreground probability. The others are the flow along z, y and x, times 5. Scores are
    resampled to the grid of the stack before they are decoded.

    threshold         foreground probability above which a voxel belongs to an object
    tiles             whether tiles have the size of the plane if it is smaller than `roi_size` (fitted), or planes are
                      padded to `roi_size` (fixed), as transformers require
    steps             number of steps along the flow if the objects have the diameter `input.diameter`; the number is
                      proportional to the diameter
    minimum_size      size in voxels of the stack below which objects are dropped
    maximum_fraction  objects are dropped if they occupy more than this fraction of the stack
    min_confidence    objects are dropped if the mean foreground probability of their voxels is below this value
    border            keep or drop objects that touch a face of the volume
    holes             keep or fill background, and other objects, that are enclosed by one object
    """

    kind: Literal["flows"]
    tiles: Literal["fitted", "fixed"] = "fitted"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    steps: Annotated[int, Field(ge=1, le=100_000)] = 200
    minimum_size: Annotated[int, Field(ge=0)] = 15
    maximum_fraction: Annotated[float, Field(gt=0, le=1)] = 0.4
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.0
    border: Literal["keep", "drop"] = "keep"
    holes: Literal["keep", "fill"] = "fill"


Decoding = Annotated[Instances | Classes | Regions | Boundaries | StarConvex | Flows, Field(discriminator="kind")]


def get_probability_output(decoding: FrozenModel) -> str | None:
    """Return the name of the output whose activation must be a probability; None if the decoding compares outputs."""
    if isinstance(decoding, Instances):
        return decoding.foreground
    return decoding.boundary if isinstance(decoding, Boundaries) else None
