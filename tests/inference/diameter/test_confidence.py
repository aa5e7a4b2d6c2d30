from dataclasses import replace

import numpy as np
import pytest

from service.core.types import Objects
from service.inference.diameter.advice import Evidence
from service.inference.diameter.confidence import (
    assess_objects,
    calibrate_objects,
    compute_typical_diameter,
    count_clear_objects,
    find_smaller_diameter,
    limit_confidence,
    predict_confidence,
)
from service.models.spec import Calibration, ModelSpec
from service.models.spec_parts import ObjectCalibration

CALIBRATION = Calibration(intercept=-15, certainty=2, peak=14, size=-3, giants=-1, sheets="membranes")


def make_objects(diameters: list[float], confidence: float, peak: float) -> Objects:
    voxels = np.round(np.pi / 6 * np.array(diameters) ** 3).astype(np.int64)
    ones = np.ones(len(diameters), np.float32)
    return Objects(voxels, confidence * ones, peak * ones)


def compute_confidence(found: Objects) -> float:
    confidence = predict_confidence(found, 20.0, CALIBRATION)
    assert confidence is not None
    return confidence


def test_confidence_is_high_only_for_objects_like_the_training_data() -> None:
    good = compute_confidence(make_objects([20, 21, 19], 0.94, 0.85))
    assert good > 0.9
    assert compute_confidence(make_objects([20, 21, 19], 0.8, 0.85)) < good
    assert compute_confidence(make_objects([20, 21, 19], 0.94, 0.55)) < 0.3
    assert compute_confidence(make_objects([50, 60, 55], 0.94, 0.85)) < good
    assert compute_confidence(make_objects([20, 20, 20] + 3 * [3], 0.94, 0.85)) == pytest.approx(good, abs=0.01)
    # The typical object is the one that contains the median voxel.
    assert compute_typical_diameter(make_objects([20, 4, 4, 4, 4], 0.9, 0.9)) == pytest.approx(20, abs=0.1)


def test_confidence_is_a_number_unless_no_object_is_found() -> None:
    unknown_peak, lowest_peak, highest_peak = (
        compute_confidence(make_objects([20], 1.0, peak)) for peak in (np.nan, 0.0, 1.0)
    )
    assert unknown_peak == lowest_peak < highest_peak
    assert predict_confidence(make_objects([], 0.9, 0.9), 20.0, CALIBRATION) is None


def test_clear_objects_are_counted_if_most_others_look_like_noise() -> None:
    nuclei, noise = make_objects([20, 21], 0.94, 0.8), make_objects(100 * [12], 0.7, 0.55)
    both = Objects.concatenate([nuclei, noise])
    assert count_clear_objects(both, 20.0, CALIBRATION) == 2
    assert count_clear_objects(nuclei, 20.0, CALIBRATION) == count_clear_objects(noise, 20.0, CALIBRATION) == 0


def test_the_calibrated_confidence_of_a_result_is_the_expected_f1(random_nuclei: ModelSpec) -> None:
    input_spec = random_nuclei.input.model_copy(update={"diameter": 20.0})
    uncalibrated = random_nuclei.model_copy(update={"confidence": CALIBRATION, "input": input_spec})
    model = ObjectCalibration(intercept=-4, certainty=2, peak=1, size=-1, result=0.5, threshold=0.7)
    calibration = CALIBRATION.model_copy(update={"objects": model})
    spec = uncalibrated.model_copy(update={"confidence": calibration})
    groups = [make_objects([20, 21], 0.94, 0.8), make_objects([12], 0.7, 0.55)]
    objects = calibrate_objects(Objects.concatenate(groups), spec)
    assert objects.match_probability is not None
    clear, other_clear, faint = objects.match_probability.tolist()
    assert clear == pytest.approx(other_clear, abs=0.02)
    assert clear > 0.9 > 0.2 > faint
    assert objects.select(objects.voxel_counts < 2000).match_probability == pytest.approx([faint])
    evidence = Evidence([], None, None)
    assert assess_objects(objects, spec, lambda: evidence).confidence == pytest.approx(
        (clear + other_clear + faint) / 3
    )
    assert assess_objects(objects, spec, lambda: evidence).quality_warning is not None
    # The same objects of a model that is not calibrated have the confidence of `predict_confidence`.
    assert calibrate_objects(objects, uncalibrated) is objects
    assert assess_objects(objects, uncalibrated, lambda: evidence).confidence == predict_confidence(
        objects, 20.0, CALIBRATION
    )
    assert (
        assess_objects(calibrate_objects(make_objects([], 0.9, 0.9), spec), spec, lambda: evidence).confidence is None
    )


def test_fragments_have_a_lower_confidence_than_typical_objects(random_nuclei: ModelSpec) -> None:
    model = ObjectCalibration(intercept=2, certainty=0, peak=0, size=0, result=0, fragment=-4)
    changes = {
        "confidence": CALIBRATION.model_copy(update={"objects": model}),
        "input": random_nuclei.input.model_copy(update={"diameter": 20.0}),
    }
    objects = calibrate_objects(make_objects([24, 20, 20, 20, 10], 0.9, 0.9), random_nuclei.model_copy(update=changes))
    assert objects.match_probability is not None
    large, typical, *_, fragment = objects.match_probability.tolist()
    assert large == pytest.approx(typical, abs=0.01)
    assert fragment < 0.4 < 0.8 < typical


def test_confidence_in_an_object_that_fills_its_stack_is_low() -> None:
    objects, labels = make_objects([20], 0.9, 0.9), np.ones((10, 10, 10), np.uint16)
    assert limit_confidence(objects, labels) is objects
    objects = replace(objects, match_probability=np.array([0.95], np.float32))
    filled = limit_confidence(objects, labels).match_probability
    assert filled is not None
    assert filled[0] < 0.5
    labels[:2] = 0
    assert limit_confidence(objects, labels) is objects
    pair = Objects.concatenate([objects, objects])
    assert limit_confidence(pair, np.ones_like(labels)) is pair


def test_smaller_diameter_of_most_objects_is_found() -> None:
    sparse_cells = Objects.concatenate([make_objects(12 * [5.5], 0.9, 0.8), make_objects([60, 80], 0.9, 0.8)])
    diameter = find_smaller_diameter(sparse_cells, 20.0, (20.0, 50.0, 50.0))
    assert diameter is not None
    assert diameter.lengths == pytest.approx((5.5, 13.75, 13.75), rel=0.02)
    assert find_smaller_diameter(sparse_cells, 20.0, None) is None
    # The stack would be enlarged 4 times along each axis.
    assert find_smaller_diameter(sparse_cells, 20.0, (18.0, 18.0, 18.0)) is None
    assert find_smaller_diameter(make_objects(5 * [5.5], 0.9, 0.8), 20.0, (20.0, 50.0, 50.0)) is None
    assert find_smaller_diameter(make_objects(20 * [16], 0.9, 0.8), 20.0, (20.0, 50.0, 50.0)) is None
