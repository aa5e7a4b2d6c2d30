"""Objects found at one scale of an image, and the selection of a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.quantities import VoxelSize
from service.inference.diameter.advice import MIN_FLAT_ASPECT

# A trial selects the smallest scale whose log-odds are at most this much lower than the highest log-odds, because large
# scales need many windows.
LOG_ODDS_TOLERANCE = 1.0

# Minimum confidence of a scale in a trial. Below this confidence, the objects are probably noise.
MIN_TRIAL_CONFIDENCE = 0.001

# Fit below which the diameter is not even suggested to the user.
MIN_FIT_FOR_SUGGESTION = 0.2

# Minimum confidence of a larger scale than those of a trial. There, it is at most 0.01 in noise, and 0.03 to 0.2 in
# stacks of spots of 4 voxels with a signal-to-noise ratio of 3 or 4.
MIN_SMALL_CONFIDENCE = 0.02

# Typical ratio between the depth and width of object outlines, in micrometers. Light is blurred along z.
BLURRED_DEPTH_RATIO = 1.25

# Maximum ratio between the width and depth of objects that are found as reliably as round objects.
MAX_ROUND_ASPECT = 1.5

# Maximum ratio between a scale and the base grid. Beyond this ratio, objects would be too small to be resolved.
MAX_SCALE_RATIO = 5.0

# Maximum ratio along z if planes are enlarged more than pixels for flat objects, which are resolved in the plane. It
# suffices for objects two planes deep, and for the planes that the model `nuclei` was trained on.
MAX_FLAT_SCALE_RATIO = 10.0

# Treat scales that are closer than this factor as equal.
EQUAL_SCALE_RATIO = 1.15

# Skip resampling if the object diameter is within this factor of the model's object diameter.
MATCHING_DIAMETER_RATIO = 1.2

Factors = tuple[float, float, float]
"""Voxels of a scaled grid per voxel of the image, along (z, y, x)."""


class ScaleProbe(NamedTuple):
    """Objects found at one scale, and how well the scale suits the model.

    factors            voxels of the scaled grid per voxel of the image, along (z, y, x)
    extents            median extents of objects along (z, y, x), in voxels of the scaled grid; y and x have the same
                       value
    num_objects        number of objects that were measured
    fit                how well this scale suits the model, 0 to 1; 0 if too few objects were found
    num_windows        number of windows that were scored
    confidence         confidence in the objects, 0 to 1; None if it is not known
    num_object_voxels  total number of voxels of all objects, in voxels of the scaled grid
    has_depth          whether the depth was measured; if too few objects are complete along z, it is the width
    """

    factors: Factors
    extents: Factors
    num_objects: int
    fit: float
    num_windows: int
    confidence: float | None = None
    num_object_voxels: int = 0
    has_depth: bool = True

    @property
    def log_odds(self) -> float:
        """Log-odds of the confidence; -inf if the confidence is not known."""
        return -math.inf if self.confidence is None else math.log(self.confidence / max(1 - self.confidence, 1e-15))

    @property
    def suggests_small_objects(self) -> bool:
        """Whether the objects are real rather than noise, even if this scale is larger than those of a trial."""
        return self.fit >= MIN_FIT_FOR_SUGGESTION and (self.confidence or 0.0) >= MIN_SMALL_CONFIDENCE


def are_close(factors: Factors, other_factors: Factors, ratio: float) -> bool:
    """Return whether two scales differ by less than `ratio` along each axis."""
    return all(
        abs(math.log(first / second)) < math.log(ratio) for first, second in zip(factors, other_factors, strict=True)
    )


def is_probed(factors: Factors, probes: Iterable[ScaleProbe]) -> bool:
    """Return whether one of the probes has about this scale."""
    return any(are_close(factors, probe.factors, EQUAL_SCALE_RATIO) for probe in probes)


def choose_better_probe(reference: ScaleProbe, candidates: Sequence[ScaleProbe], margin: float) -> ScaleProbe | None:
    """Return the probe at the smallest scale that is close to the best probe and better than `reference` by `margin`.

    Returns None if no probe qualifies.
    """
    credible_probes = [probe for probe in candidates if (probe.confidence or 0.0) >= MIN_TRIAL_CONFIDENCE]
    min_log_odds = max((probe.log_odds for probe in credible_probes), default=-math.inf)
    min_log_odds = max(min_log_odds - LOG_ODDS_TOLERANCE, reference.log_odds + margin)
    better_probes = [probe for probe in credible_probes if probe.log_odds >= min_log_odds]
    return min(better_probes, key=lambda probe: math.prod(probe.factors), default=None)


def compute_expected_flatness(voxel_size: VoxelSize | None, base: Factors) -> float:
    """Return the expected ratio of object width to depth on the base grid; 1 if the voxel size is unknown."""
    if voxel_size is None:
        return 1.0
    z, y, x = (length / factor for length, factor in zip(voxel_size, base, strict=True))
    return max(VoxelSize(z, y, x).anisotropy / BLURRED_DEPTH_RATIO, 1.0)


def compute_max_factors(factors: Factors, base: Factors) -> Factors:
    """Return the maximum factors along (z, y, x). Along z, they depend on whether `factors` suit flat objects."""
    is_flat = factors[0] / base[0] >= MIN_FLAT_ASPECT * factors[1] / base[1]
    max_z_ratio = MAX_FLAT_SCALE_RATIO if is_flat else MAX_SCALE_RATIO
    return base[0] * max_z_ratio, base[1] * MAX_SCALE_RATIO, base[2] * MAX_SCALE_RATIO


def suggest_flat_factors(probe: ScaleProbe, expected_diameter: float) -> Factors | None:
    """Return factors at which flat objects are about as deep as they are wide; None if the objects are not flat.

    The depth of objects in few planes is overestimated, by a factor of about `MAX_ROUND_ASPECT`.
    """
    depth, width = (probe.extents[axis] / probe.factors[axis] for axis in (0, 1))
    if not probe.fit or width < MIN_FLAT_ASPECT * depth:
        return None
    in_plane = expected_diameter / width
    return MAX_ROUND_ASPECT * expected_diameter / depth, in_plane, in_plane


def measure_flatness(probe: ScaleProbe, base: Factors) -> float:
    """Return the ratio of object width to depth on the base grid."""
    depth, width = (probe.extents[axis] * base[axis] / probe.factors[axis] for axis in (0, 1))
    return width / depth


def measure_extents(labels: NDArray[np.unsignedinteger], num_objects: int) -> NDArray[np.float64]:
    """Return the extents [num_objects, 3] of the objects in a window of labels [z, y, x], in voxels.

    An extent is NaN if the object touches a face of the window along this axis, because it may be cut off.
    """
    indices = np.nonzero(labels)
    object_indices = labels[indices].astype(np.intp) - 1
    extents = np.empty((num_objects, 3))
    for axis, (position, length) in enumerate(zip(indices, labels.shape, strict=True)):
        first, last = np.full(num_objects, length), np.full(num_objects, -1)
        np.minimum.at(first, object_indices, position)
        np.maximum.at(last, object_indices, position)
        extents[:, axis] = np.where((first == 0) | (last == length - 1), np.nan, last - first + 1)
    return extents
