"""Objects found at one scale of an image, and the selection of a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# A trial selects the smallest of the scales whose log-odds are within this of the best, because large scales need many
# windows.
LOG_ODDS_TOLERANCE = 1.0

# Confidence below which a scale of a trial is ignored, because the objects are probably noise.
MIN_TRIAL_CONFIDENCE = 0.001

# Treat scales that are closer than this factor as equal.
EQUAL_SCALE_RATIO = 1.15

Factors = tuple[float, float, float]
"""Voxels of a scaled grid per voxel of the image, along (z, y, x)."""


class ScaleProbe(NamedTuple):
    """Objects found at one scale, and how well the scale suits the model.

    factors     voxels of the scaled grid per voxel of the image, along (z, y, x)
    extents     median extents of objects along (z, y, x), in voxels of the scaled grid; y and x have one value
    objects     number of objects that were measured
    fit         how well this scale suits the model, 0 to 1; 0 if too few objects were found
    windows     number of windows that were scored
    confidence  in the objects, 0 to 1; None if it is not known
    voxels      of all objects, in voxels of the scaled grid
    """

    factors: Factors
    extents: Factors
    objects: int
    fit: float
    windows: int
    confidence: float | None = None
    voxels: int = 0

    @property
    def log_odds(self) -> float:
        """Log-odds of the confidence, -inf if it is not known."""
        return -math.inf if self.confidence is None else math.log(self.confidence / max(1 - self.confidence, 1e-15))


def are_close(one: Factors, other: Factors, ratio: float) -> bool:
    """Return whether two scales differ by less than `ratio` along each axis."""
    return all(abs(math.log(a / b)) < math.log(ratio) for a, b in zip(one, other, strict=True))


def is_probed(factors: Factors, probes: Iterable[ScaleProbe]) -> bool:
    """Return whether one of the probes has about this scale."""
    return any(are_close(factors, probe.factors, EQUAL_SCALE_RATIO) for probe in probes)


def choose_clearly_better(used: ScaleProbe, candidates: Sequence[ScaleProbe], margin: float) -> ScaleProbe | None:
    """Return the smallest scale that is close to the best and better than `used` by `margin`; None if there is none."""
    credible = [probe for probe in candidates if (probe.confidence or 0.0) >= MIN_TRIAL_CONFIDENCE]
    minimum = max((probe.log_odds for probe in credible), default=-math.inf)
    minimum = max(minimum - LOG_ODDS_TOLERANCE, used.log_odds + margin)
    better = [probe for probe in credible if probe.log_odds >= minimum]
    return min(better, key=lambda probe: math.prod(probe.factors), default=None)
