import numpy as np
import pytest

from service.core.types import Objects
from service.inference.diameter.confidence import predict_confidence
from service.models.spec import Calibration
from service.models.spec_parts import ObjectCalibration
from service.training.loop.confidence_calibration import calibrate

BASE = Calibration(intercept=-19, certainty=1, peak=23, size=-6, giants=4, threshold=0.6, sheets="membranes")


def make_objects(count: int, confidence: float, peak: float) -> Objects:
    return Objects(np.full(count, 4000), np.full(count, confidence, np.float32), np.full(count, peak, np.float32))


@pytest.mark.parametrize("f1", [0.0, 0.3, 0.8, 1.0])
def test_confidence_in_the_held_out_result_equals_its_score(f1: float) -> None:
    objects, worse_objects = make_objects(9, 0.8, 0.6), make_objects(9, 0.65, 0.5)
    calibration = calibrate(BASE, [objects, make_objects(0, 0, 0)], 20, f1)
    assert calibration is not None
    confidence = predict_confidence(objects, 20, calibration)
    assert confidence == pytest.approx(np.clip(f1, 0.05, 0.95), abs=0.01)
    worse_confidence = predict_confidence(worse_objects, 20, calibration)
    assert worse_confidence is not None
    assert worse_confidence < 0.7 * confidence
    assert (calibration.threshold, calibration.sheets) == (BASE.threshold, BASE.sheets)


def test_calibration_of_single_objects_is_not_inherited() -> None:
    single_objects = ObjectCalibration(intercept=1, certainty=1, peak=1, size=1, result=1, threshold=0.5)
    calibration = calibrate(BASE.model_copy(update={"objects": single_objects}), [make_objects(9, 0.8, 0.6)], 20, 0.5)
    assert calibration is not None
    assert calibration.objects is None


def test_calibration_needs_objects() -> None:
    assert calibrate(BASE, [make_objects(0, 0, 0)], 20, 0.5) is None
