"""Advice on questionable results: warnings that suggest what to try next, and corrections of a stated diameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Diameter
from service.inference.diameter.sheets import contains_sheets
from service.inference.types import QualityWarning
from service.models.spec import Calibration

# Suggest a diameter only if it differs by at least this factor from the diameter that was used.
MIN_DIAMETER_RATIO = 1.4

# Suggest the model for membranes below this confidence if the stack shows sheets. The confidence of other models is too
# high on membranes, for which they were not calibrated. A stated diameter is also compared with the estimate.
MIN_CONFIDENCE_ON_SHEETS = 0.8

# Minimum mean foreground probability of a clear object.
CLEAR_CONFIDENCE = 0.8

# Correct a stated diameter only if the width, or the diameter of a sphere with the same volume, changes by at most this
# factor. A larger difference may be intended, for example to segment large objects instead of their parts.
MAX_CORRECTION_RATIO = 1.75

# Minimum gain in confidence for which a stated diameter is replaced by the estimate.
MIN_CORRECTION_GAIN = 0.05

# Maximum loss of confidence for which the stated diameter of flat objects is replaced by the estimate.
MAX_FLAT_LOSS = 0.05

# Minimum ratio between the width and depth of flat objects, which are probed with planes enlarged more than pixels.
MIN_FLAT_ASPECT = 2.5

TRAINING_ADVICE = "annotate part of the stack and train a model (docs/training.md)"


class Evidence(NamedTuple):
    """Properties of a questionable result and of its stack, on which the advice is based.

    windows             high-contrast windows [C, z, y, x] of the image at its original resolution
    likely_diameter     estimate of the object diameter; None if there is no estimate
    used_diameter       object diameter along (z, y, x) that was used, in voxels; None if the model has no object
                        diameter
    is_diameter_given   whether the request specifies the diameter
    has_postprocessing  whether the request sets post-processing options, such as a minimum size
    num_clear_objects   number of clear objects if most of the other objects look like noise, else 0
    found_diameter      diameter of most objects that were found, if it is much smaller than the used one; else None
    """

    windows: Sequence[Tensor]
    likely_diameter: Diameter | None
    used_diameter: Sequence[float] | None
    is_diameter_given: bool = False
    has_postprocessing: bool = False
    num_clear_objects: int = 0
    found_diameter: Diameter | None = None

    @property
    def is_blank(self) -> bool:
        """Whether all windows are constant; False if there are no windows."""
        return bool(self.windows) and all(bool((window == window.flatten()[0]).all()) for window in self.windows)


def drop_missing_models(calibration: Calibration, models_folder: Path) -> Calibration:
    """Return the calibration without the suggested models that have no folder in `models_folder`."""
    names = {"sheets": calibration.sheets, "blobs": calibration.blobs}
    missing_models = {key: None for key, name in names.items() if name is None or not (models_folder / name).is_dir()}
    return calibration.model_copy(update=missing_models)


def make_low_confidence_warning(confidence: float, evidence: Evidence, calibration: Calibration) -> QualityWarning:
    """Return the warning for labels with low confidence, with the likely reason and a suggestion."""
    prefix = "The labels may be wrong"
    diameter_advice, filter_advice = _suggest_diameter(evidence), _suggest_filtering(evidence)
    parameter_advice = (
        (filter_advice, diameter_advice) if evidence.is_diameter_given else (diameter_advice, filter_advice)
    )
    candidates = (_suggest_model(evidence, calibration), *parameter_advice, _suggest_found_diameter(evidence))
    for advice in filter(None, candidates):
        reason, suggestion, details = advice
        return QualityWarning(confidence, f"{prefix}: {reason}. Try {suggestion}{details}.", suggestion)
    problem = f"{prefix}: the objects do not look like the objects that the model was trained on."
    instruction = "Check the labels and the selected channel."
    diameter_hint = "" if evidence.is_diameter_given else "set diameter= to the diameter of the objects, or "
    return QualityWarning(
        confidence, f"{problem} {instruction} If the labels are wrong, {diameter_hint}{TRAINING_ADVICE}.", ""
    )


def make_sheets_warning(confidence: float, evidence: Evidence, calibration: Calibration) -> QualityWarning | None:
    """Return the warning for labels of a stack that shows membranes; None if it does not show any.

    `calibration` names the model for membranes.
    """
    if (advice := _suggest_model(evidence, calibration.model_copy(update={"blobs": None}))) is None:
        return None
    reason, suggestion, _details = advice
    return QualityWarning(confidence, f"The labels may be wrong: {reason}. Try {suggestion}.", suggestion)


def make_no_objects_warning(evidence: Evidence, calibration: Calibration | None) -> QualityWarning:
    """Return the warning for a result without objects, with the likely reason and a suggestion."""
    prefix = "No object was found"
    if evidence.is_blank:
        return QualityWarning(
            None,
            f"{prefix}: the image has the same gray value everywhere. If the file has several channels or time points,"
            " try another channel= or time=.",
            "",
        )
    if evidence.has_postprocessing:
        options = "threshold=, minimum_size=, border= and min_confidence="
        return QualityWarning(None, f"{prefix}: the request may exclude all objects. Try again without {options}.", "")
    model = None if calibration is None else _suggest_model(evidence, calibration)
    advice = model or _suggest_diameter(evidence)
    if advice is not None:
        reason, suggestion, _details = advice
        return QualityWarning(None, f"{prefix}: {reason}. Try {suggestion}.", suggestion)
    return QualityWarning(
        None, f"{prefix}. Try another diameter=, channel= or model=. If that fails, {TRAINING_ADVICE}.", ""
    )


# Reason, suggested parameter, and the rest of the sentence after the suggestion.
_Advice = tuple[str, str, str]


def _suggest_model(evidence: Evidence, calibration: Calibration) -> _Advice | None:
    if calibration.sheets is None and calibration.blobs is None:
        return None
    has_sheets = contains_sheets([window[0] for window in evidence.windows])
    if has_sheets and calibration.sheets is not None:
        return "the stack seems to show membranes or shells", f"model={calibration.sheets}", ""
    if has_sheets is False and calibration.blobs is not None:
        return "the stack does not seem to show membranes", f"model={calibration.blobs}", ""
    return None


def _suggest_diameter(evidence: Evidence) -> _Advice | None:
    diameter = evidence.likely_diameter
    if diameter is None or evidence.used_diameter is None or (diameters := diameter.to_voxels(None)) is None:
        return None
    if max(compare_diameters(diameters, evidence.used_diameter)) <= math.log(MIN_DIAMETER_RATIO):
        return None
    return f"the objects seem to be {diameter.describe()}", f"diameter={diameter}", ""


def _suggest_found_diameter(evidence: Evidence) -> _Advice | None:
    if (diameter := evidence.found_diameter) is None:
        return None
    return f"most of the objects that were found are {diameter.describe()}", f"diameter={diameter}", ""


def _suggest_filtering(evidence: Evidence) -> _Advice | None:
    if not evidence.num_clear_objects or evidence.has_postprocessing:
        return None
    reason = f"most objects look like noise, and only {evidence.num_clear_objects} are clear"
    return reason, f"min_confidence={CLEAR_CONFIDENCE}", f" to keep only these. To find more objects, {TRAINING_ADVICE}"


class Correction(NamedTuple):
    """An estimated diameter to use instead of the stated one.

    diameter     estimated diameter
    is_for_flat  whether the reason is that the objects are flat, so that they cannot be as deep as they are wide
    """

    diameter: Diameter
    is_for_flat: bool = False

    @property
    def min_gain(self) -> float:
        """Minimum gain in confidence for which the correction is used."""
        return -MAX_FLAT_LOSS if self.is_for_flat else MIN_CORRECTION_GAIN

    def make_note(self, stated: Diameter, used_diameter: Sequence[float], confidence: float) -> str:
        """Return a note for the user.

        used_diameter  diameter along (z, y, x) with which the stack was segmented first, in voxels
        confidence     confidence in that result
        """
        reason = (
            f"The objects are flat and the voxel size is unknown, so the specified object diameter, {stated}, cannot be"
            " their depth. Therefore, the"
            if self.is_for_flat
            else f"With the specified object diameter, {stated}, the confidence is only {confidence:.2f}, so the"
        )
        z, y, x = used_diameter
        return (
            f"{reason} diameter was estimated from the stack: {self.diameter.describe()}. To use the specified"
            f" diameter, set diameter={Diameter((z, y, x), 'px')}."
        )


def compare_diameters(diameter: Sequence[float], other_diameter: Sequence[float]) -> tuple[float, float]:
    """Return the absolute log ratios of two diameters along (z, y, x): in the plane, and of spheres of their volumes.

    The two differ if one of the diameters belongs to flat objects, and the other to round ones.
    """
    z, y, x = (math.log(first / second) for first, second in zip(diameter, other_diameter, strict=True))
    return abs(y + x) / 2, abs(z + y + x) / 3


def find_correction(
    warning: QualityWarning | None,
    confidence: float | None,
    used_diameter: Sequence[float],
    estimate: Callable[[], Diameter | None],
    *,
    is_flat: bool,
) -> Correction | None:
    """Return the correction of a stated diameter, or None.

    warning        warning about the result with the stated diameter
    confidence     confidence in that result; None if it is not known
    used_diameter  stated diameter along (z, y, x), in voxels
    estimate       returns the likely diameter; called only if the warning does not contain it
    is_flat        whether the objects are flat in a stack without a voxel size
    """
    is_moderate = warning is None and confidence is not None and confidence < MIN_CONFIDENCE_ON_SHEETS
    likely_diameter = estimate() if is_flat or is_moderate else None
    if is_flat and (correction := find_flat_correction(likely_diameter, used_diameter)) is not None:
        return correction
    if is_moderate:
        return find_estimate_correction(likely_diameter, used_diameter)
    return find_diameter_correction(warning, used_diameter)


def find_diameter_correction(warning: QualityWarning | None, used_diameter: Sequence[float]) -> Correction | None:
    """Return the diameter that a low-confidence warning suggests, if it is similar to the diameter that was used.

    used_diameter  object diameter along (z, y, x), in voxels
    """
    if warning is None or (setting := warning.suggested_parameters.get("diameter")) is None:
        return None
    diameter = Diameter.parse(setting)
    return Correction(diameter) if _are_similar(diameter.to_voxels(None), used_diameter) else None


def find_estimate_correction(likely_diameter: Diameter | None, used_diameter: Sequence[float]) -> Correction | None:
    """Return the estimate for a result of moderate confidence if it differs from the diameter that was used.

    It must differ as much as in a suggestion, but still be similar.

    used_diameter  object diameter along (z, y, x), in voxels
    """
    if likely_diameter is None or (lengths := likely_diameter.to_voxels(None)) is None:
        return None
    is_different = max(compare_diameters(lengths, used_diameter)) > math.log(MIN_DIAMETER_RATIO)
    return Correction(likely_diameter) if is_different and _are_similar(lengths, used_diameter) else None


def find_flat_correction(likely_diameter: Diameter | None, used_diameter: Sequence[float]) -> Correction | None:
    """Return the estimate for a stack of flat objects, if it is similar to the diameter that was used.

    likely_diameter  estimate for a stack without a voxel size
    used_diameter    object diameter along (z, y, x), in voxels
    """
    if likely_diameter is None or (lengths := likely_diameter.to_voxels(None)) is None:
        return None
    if math.sqrt(lengths[1] * lengths[2]) < MIN_FLAT_ASPECT * lengths[0]:
        return None
    return Correction(likely_diameter, is_for_flat=True) if _are_similar(lengths, used_diameter) else None


def _are_similar(diameter: Sequence[float] | None, other_diameter: Sequence[float]) -> bool:
    difference = math.inf if diameter is None else min(compare_diameters(diameter, other_diameter))
    return difference <= math.log(MAX_CORRECTION_RATIO)


def are_flat(labels: NDArray[Any]) -> bool:
    """Return whether most objects of labels [Z, Y, X] are much wider than deep, in voxels.

    The width of an object is that of an ellipsoid with its volume and depth. Objects that are cut off by the first or
    last plane also seem to be flat.
    """
    num_labels = int(labels.max(initial=0)) + 1
    voxel_counts, depths = np.zeros((2, num_labels), np.int64)
    for plane in labels:
        counts = np.bincount(plane.ravel(), minlength=num_labels)
        voxel_counts += counts
        depths += counts > 0
    voxel_counts, depths = voxel_counts[1:][depths[1:] > 0], depths[1:][depths[1:] > 0]
    widths = np.sqrt(6 / np.pi * voxel_counts / depths)
    return bool(len(depths) and np.median(widths / depths) >= MIN_FLAT_ASPECT)
