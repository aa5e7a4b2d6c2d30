"""What to try where a result is doubtful, or nothing was found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from service.core.quantities import Diameter
from service.inference.diameter.sheets import shows_sheets
from service.inference.types import Doubt
from service.models.spec import Calibration

# Widths so much apart are worth another try.
OTHER_WIDTH = 1.4

# Mean probability of foreground of objects that stand out where most others are grain.
SURE = 0.8

TRAIN = "annotate a piece of the stack and train a model (docs/models.md)"


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
