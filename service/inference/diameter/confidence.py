"""Confidence in a result, judged by what decoding knows of its objects, and what to try where it cannot.

A network that meets what it was trained for is sure of the voxels of an object, gives it one high peak of the distance,
and finds it as wide as it should be. On other stacks it is unsure of all three, whatever they show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.core.quantities import Diameter
from service.core.types import Objects
from service.inference.types import Doubt
from service.models.spec import Calibration

# Nothing is more certain than scores from -8 to 8 can say.
CERTAIN = 0.9996

# Widths so much apart are worth another try.
OTHER_WIDTH = 1.4

# Objects with this mean probability of foreground stand out where most others are grain, and what is judged of them
# alone has to be so many times what is judged of all.
SURE, SURER = 0.8, 2.0

# Share of voxels that belong to structures, how far their curvature along the other axes may be from none, and how
# steep they may be: at the step of a Gaussian edge the gradient is the curvature times the width of the smoothing, on
# the ridge of a sheet it is 0.
BRIGHTEST, LEAST_CURVED, STEEPEST = 0.05, 0.3, 0.7
# Smoothing by means of 27 voxels, so often: a standard deviation of 2 voxels.
SMOOTHINGS, SMOOTHED = 6, 2.0

TRAIN = "annotate a piece of the stack and train a model (docs/models.md)"


class Features(NamedTuple):
    """Evidence for a verdict; means are over voxels, so that a few specks do not count.

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


class Evidence(NamedTuple):
    """Facts about a doubtful result and its stack, from which the advice follows.

    windows  of the image [C, z, y, x] where most is to be seen, at the sampling of the stack
    guess    how wide objects seem to be; None where that is not known
    used     how wide along (z, y, x) they were taken to be, in voxels; None: the model wants no width
    stated   whether the request says how wide they are
    steered  whether the request says which objects are kept
    sure     objects that stand out from what looks like grain; 0: none do
    """

    windows: Sequence[Tensor]
    guess: Diameter | None
    used: Sequence[float] | None
    stated: bool = False
    steered: bool = False
    sure: int = 0

    @property
    def blank(self) -> bool:
        """Whether there is nothing to be seen at all."""
        return bool(self.windows) and all(bool((window == window.flatten()[0]).all()) for window in self.windows)


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


def count_sure(objects: Objects, wanted: float, calibration: Calibration) -> int:
    """Return how many objects stand out from what looks like grain, 0 where they are most, or no better than all."""
    sure = objects.select(objects.confidence >= SURE)
    judged, alone = judge(objects, wanted, calibration), judge(sure, wanted, calibration)
    if judged is None or alone is None or 2 * len(sure) > len(objects):
        return 0
    return len(sure) if alone > SURER * judged else 0


def known_models(calibration: Calibration, models: Path) -> Calibration:
    """Return a calibration that names no model to try which has no folder in `models`."""
    names = {"sheets": calibration.sheets, "blobs": calibration.blobs}
    missing = {key: None for key, name in names.items() if name is None or not (models / name).is_dir()}
    return calibration.model_copy(update=missing)


def explain(confidence: float, evidence: Evidence, calibration: Calibration) -> Doubt:
    """Name the likely reason of a doubtful result, and what to try next."""
    says = f"This result is doubtful (confidence {confidence:.2f})"
    width, grain = _other_width(evidence), _less_grain(evidence)
    likely = (_other_model(evidence, calibration), *((grain, width) if evidence.stated else (width, grain)))
    for advice in filter(None, likely):
        reason, attempt, more = advice
        return Doubt(confidence, f"{says}: {reason}; try {attempt}{more}.", attempt)
    looks = f"{says}: what was found hardly looks like what the model knows. Look at it, and at other channels."
    width_is_wrong = "" if evidence.stated else "state diameter= where objects have another width, else "
    return Doubt(confidence, f"{looks} Where it is wrong, {width_is_wrong}{TRAIN}.", "")


def explain_nothing(evidence: Evidence, calibration: Calibration | None) -> Doubt:
    """Name the likely reason why nothing was found, and what to try next."""
    says = "No object was found"
    if evidence.blank:
        return Doubt(None, f"{says}: all that was looked at has one grey value; try another channel= or time=.", "")
    if evidence.steered:
        dropped = "threshold=, minimum_size=, border= or min_confidence="
        return Doubt(None, f"{says}: the request may have dropped them; leave out {dropped}.", "")
    model = None if calibration is None else _other_model(evidence, calibration)
    advice = model or _other_width(evidence)
    if advice is not None:
        reason, attempt, _more = advice
        return Doubt(None, f"{says}: {reason}; try {attempt}.", attempt)
    return Doubt(None, f"{says}: try another diameter=, channel= or model=. Where none of them helps, {TRAIN}.", "")


# Reason, attempt, and what else is to be said of it.
_Advice = tuple[str, str, str]


def _other_model(evidence: Evidence, calibration: Calibration) -> _Advice | None:
    if calibration.sheets is None and calibration.blobs is None:
        return None
    shown = shows_sheets([window[0] for window in evidence.windows])
    if shown and calibration.sheets is not None:
        return "this looks like membranes or shells", f"model={calibration.sheets}", ""
    if shown is False and calibration.blobs is not None:
        return "this does not look like membranes", f"model={calibration.blobs}", ""
    return None


def _other_width(evidence: Evidence) -> _Advice | None:
    widths = None if evidence.guess is None else evidence.guess.in_voxels(None)
    if widths is None or evidence.used is None:
        return None
    if abs(math.log(math.prod(widths) / math.prod(evidence.used))) <= 3 * math.log(OTHER_WIDTH):
        return None
    return f"objects seem to be {evidence.guess} wide", f"diameter={evidence.guess}", ""


def _less_grain(evidence: Evidence) -> _Advice | None:
    if not evidence.sure or evidence.steered:
        return None
    reason = f"most objects are as faint as grain, and {evidence.sure} stand out"
    return reason, f"min_confidence={SURE}", f" to keep those alone. To find more, {TRAIN}"


def shows_sheets(windows: Sequence[Tensor]) -> bool | None:
    """Return whether what is bright in windows [z, y, x] of one channel lies on sheets: membranes or shells.

    It is mostly curved across one direction only, and a ridge there, not the edge of something bright. The eigenvalues
    of the Hessian tell sheets from lines and blobs (Sato et al. 1998). None where no window is large enough to tell.
    """
    flatness = np.array([_flatness(window) for window in windows if min(window.shape) >= 5]).reshape(-1, 3)
    if not len(flatness):
        return None
    # Where nothing is curved at all, it is not a number.
    flatness = flatness[np.isfinite(flatness).all(axis=1)]
    return bool(len(flatness) and (np.abs(np.median(flatness, axis=0)) < (LEAST_CURVED, LEAST_CURVED, STEEPEST)).all())


def _flatness(window: Tensor) -> tuple[float, float, float]:
    """Return how curved and steep a window is where its first eigenvalue is the most negative.

    These are medians of the middle and the last eigenvalue over the first, and of the gradient over the first and the
    width of the smoothing.
    """
    smooth = window.clamp(0, 1)[None]
    for _ in range(SMOOTHINGS):
        smooth = functional.avg_pool3d(smooth, 3, 1, 1, count_include_pad=False)
    gradient = torch.stack(torch.gradient(smooth[0]))
    hessian = torch.stack([torch.stack(torch.gradient(part)) for part in gradient])[:, :, 2:-2, 2:-2, 2:-2]
    matrices, slopes = hessian.flatten(2).permute(2, 0, 1), gradient[:, 2:-2, 2:-2, 2:-2].flatten(1).norm(dim=0)
    # Those with the most negative eigenvalue are among those with the most negative trace or the largest norm.
    count = max(int(BRIGHTEST * len(matrices)), 1)
    strong = matrices.square().sum((1, 2)).topk(min(4 * count, len(matrices))).indices
    values, slopes = torch.linalg.eigvalsh(matrices[strong]), slopes[strong]
    first = values[:, 0].topk(min(count, len(values)), largest=False).indices
    values, slopes = values[first], slopes[first]
    middle, last = (values[:, 1:] / values[:, :1]).median(0).values
    return float(middle), float(last), float((slopes / (-SMOOTHED * values[:, 0])).median())
