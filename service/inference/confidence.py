"""How far a result can be believed, judged by what decoding knows of its objects, and what to try where it cannot.

A network that meets what it was trained for is sure of the voxels of an object, gives it one high peak of the distance,
and finds it as wide as it should be. On other stacks it is unsure of all three, whatever they show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.core.volume import Diameter, Objects
from service.models.spec import Calibration

# Nothing is more certain than scores from -8 to 8 can say.
CERTAIN = 0.9996

# Widths so much apart are worth another try.
OTHER_WIDTH = 1.4

# Share of voxels that belong to structures, and how far their curvature along the other axes may be from none.
BRIGHTEST, LEAST_CURVED = 0.05, 0.3
# Smoothing by means of 27 voxels, so often: a standard deviation of 2 voxels.
SMOOTHINGS = 6


class Features(NamedTuple):
    """What a verdict is made of; means are over voxels, so that a few specks do not count.

    certainty  logit of the mean probability of the objects' voxels to be foreground
    peak       mean of the distance at the peaks of objects
    size       how far the width of objects is from the one that the model works best at, as a logarithm
    giants     share of voxels in objects more than twice as wide as that
    """

    certainty: float
    peak: float
    size: float
    giants: float

    @classmethod
    def measure(cls, objects: Objects, wanted: float) -> Features:
        """Measure at least one object of a network that wants objects `wanted` voxels wide."""
        share = objects.voxels / objects.voxels.sum()
        confidence = min(float((share * objects.confidence).sum()), CERTAIN)
        widths = np.cbrt(6 / np.pi * objects.voxels)
        return cls(
            math.log(confidence / (1 - confidence)),
            float((share * np.nan_to_num(objects.peaks)).sum()),
            abs(math.log(typical_width(objects) / wanted)),
            float(share[widths > 2 * wanted].sum()),
        )


class Doubt(NamedTuple):
    """Why a result is not to be trusted.

    confidence  in it, 0 to 1
    detail      the likely reason and what to try next, in a sentence
    attempt     that as a parameter, such as diameter=4px; "" where none is known
    """

    confidence: float
    detail: str
    attempt: str


def typical_width(objects: Objects) -> float:
    """Return the diameter in voxels of a ball as large as the object that the median voxel belongs to."""
    return float(np.cbrt(6 / np.pi * objects.typical_size))


def judge(objects: Objects, wanted: float, calibration: Calibration) -> float | None:
    """Return the confidence in a result, 0 to 1, by logistic regression; None where nothing was found."""
    if not len(objects):
        return None
    weights = (calibration.certainty, calibration.peak, calibration.size, calibration.giants)
    features = Features.measure(objects, wanted)
    score = calibration.intercept + sum(weight * value for weight, value in zip(weights, features, strict=True))
    return 1 / (1 + math.exp(-min(max(score, -50.0), 50.0)))


def explain(
    confidence: float,
    windows: Sequence[Tensor],
    guess: Diameter | None,
    used: Sequence[float],
    calibration: Calibration,
) -> Doubt:
    """Name the likely reason of a doubtful result, and what to try next.

    windows  of the image [C, z, y, x] where most is to be seen, at the sampling of the stack
    guess    how wide objects seem to be; None where that is not known
    used     how wide along (z, y, x) they were taken to be, in voxels
    """
    says = f"This result is doubtful (confidence {confidence:.2f})"
    if calibration.sheets is not None and shows_sheets([window[0] for window in windows]):
        attempt = f"model={calibration.sheets}"
        return Doubt(confidence, f"{says}: this looks like membranes or shells; try {attempt}.", attempt)
    widths = None if guess is None else guess.in_voxels(None)
    if widths is not None and abs(math.log(math.prod(widths) / math.prod(used))) > 3 * math.log(OTHER_WIDTH):
        attempt = f"diameter={guess}"
        return Doubt(confidence, f"{says}: objects seem to be {guess} wide; try {attempt}.", attempt)
    return Doubt(
        confidence,
        f"{says}: what was found hardly looks like what the model knows. Look at it; state diameter=, or try another "
        "model= or channel=.",
        "",
    )


def shows_sheets(windows: Sequence[Tensor]) -> bool:
    """Return whether what is bright in windows [z, y, x] of one channel is mostly curved across one direction only.

    The eigenvalues of the Hessian tell sheets from lines and blobs (Sato et al. 1998).
    """
    flatness = np.array([_flatness(window) for window in windows if min(window.shape) >= 5]).reshape(-1, 2)
    # Where nothing is curved at all, it is not a number.
    flatness = flatness[np.isfinite(flatness).all(axis=1)]
    return bool(len(flatness) and (np.abs(np.median(flatness, axis=0)) < LEAST_CURVED).all())


def _flatness(window: Tensor) -> tuple[float, float]:
    """Return the medians of the middle and the last eigenvalue over the first, where that is the most negative."""
    smooth = window.clamp(0, 1)[None]
    for _ in range(SMOOTHINGS):
        smooth = functional.avg_pool3d(smooth, 3, 1, 1, count_include_pad=False)
    gradient = torch.gradient(smooth[0])
    hessian = torch.stack([torch.stack(torch.gradient(part)) for part in gradient])[:, :, 2:-2, 2:-2, 2:-2]
    matrices = hessian.flatten(2).permute(2, 0, 1)
    # Those with the most negative eigenvalue are among those with the most negative trace or the largest norm.
    count = max(int(BRIGHTEST * len(matrices)), 1)
    strong = matrices[matrices.square().sum((1, 2)).topk(min(4 * count, len(matrices))).indices]
    values = torch.linalg.eigvalsh(strong)
    values = values[values[:, 0].topk(min(count, len(values)), largest=False).indices]
    ratios = (values[:, 1:] / values[:, :1]).median(0).values
    return float(ratios[0]), float(ratios[1])
