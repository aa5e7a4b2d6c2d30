"""Choice between the default diameter of a model and the estimate for a stack."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Diameter
from service.core.types import Volume
from service.inference.diameter.estimation import DiameterEstimator
from service.inference.diameter.measurement import measure_diameter
from service.inference.preprocessing.normalize import IntensityScaling, NormalizedImage
from service.inference.types import DiameterEstimate
from service.models.spec import Calibration, Lineage, ModelSpec
from service.models.spec_parts import Instances

BALL_DIAMETER = 14


@pytest.fixture
def spec(random_nuclei: ModelSpec) -> ModelSpec:
    """Model for objects of 10 voxels, with a confidence of 0.5 at this diameter, and less at other diameters."""
    changes = {
        "input": random_nuclei.input.model_copy(update={"diameter": 10.0, "roi_size": (32, 32, 32)}),
        "activation": "sigmoid",
        "decoding": Instances(kind="instances", persistence=0.2, minimum_size=8),
    }
    return with_calibration(random_nuclei.model_copy(update=changes))


def with_calibration(spec: ModelSpec, intercept: float = 0.0, size: float = -6.0) -> ModelSpec:
    calibration = Calibration(intercept=intercept, certainty=0, peak=0, size=size, giants=0, threshold=0.4)
    return spec.model_copy(update={"confidence": calibration})


@pytest.fixture(scope="module")
def balls() -> NDArray[np.float32]:
    """Balls [Z, Y, X] on a lattice, 1 at the center and 0 at the surface."""
    spacing = 1.2 * BALL_DIAMETER
    squares = (
        (((axis + spacing / 4) % spacing - spacing / 2) / BALL_DIAMETER * 2) ** 2 for axis in np.indices((80,) * 3)
    )
    return np.clip(1 - np.sqrt(sum(squares)), 0, 1).astype(np.float32)


def measure(pixels: NDArray[Any], spec: ModelSpec, default: Diameter | None) -> tuple[DiameterEstimate, int]:
    """Return the diameter that is chosen, and the number of windows that were scored."""
    window_counts = list[int]()

    def score_brightness(windows: Tensor) -> Tensor:
        window_counts.append(len(windows))
        return torch.cat([100 * (windows - 0.1), torch.logit(windows.clamp(1e-3, 1 - 1e-3))], 1)

    volume = Volume.from_array(pixels[None])
    image = NormalizedImage(volume, [IntensityScaling(0, 1)])
    return measure_diameter(image, volume, spec, score_brightness, default), sum(window_counts)


@pytest.mark.parametrize("width", [7.0, 28.0])
def test_an_estimate_with_a_clearly_higher_confidence_replaces_the_default_diameter(
    spec: ModelSpec, balls: NDArray[Any], width: float
) -> None:
    default = Diameter((width,), "px")
    found, _ = measure(balls, spec, default)
    assert found.is_estimated
    assert found.diameter is not None
    assert found.diameter.lengths[-1] == pytest.approx(BALL_DIAMETER, rel=0.1)
    assert f"diameter={default}" in found.note
    assert found.diameter.describe() in found.note
    assert measure(balls, spec, None)[0].diameter == found.diameter


@pytest.mark.parametrize("width", [12.5, 14.0, 16.0])
def test_default_diameter_is_used_if_the_estimate_is_not_clearly_better(
    spec: ModelSpec, balls: NDArray[Any], width: float
) -> None:
    default = Diameter((width,), "px")
    found, _ = measure(balls, spec, default)
    assert (found.diameter, found.resampling_diameter, found.is_estimated) == (default, default, False)
    assert found.note.startswith(f"Objects are assumed to be {default.describe()}, as in the stacks")


def test_default_diameter_is_used_if_nothing_can_be_measured(spec: ModelSpec) -> None:
    default = Diameter((7.0,), "px")
    assert measure(np.zeros((40, 40, 40), np.float32), spec, default)[0].diameter == default


@pytest.mark.parametrize("has_lineage", [False, True])
def test_a_few_windows_are_enough_if_the_confidence_at_the_default_diameter_is_as_good_as_in_training(
    spec: ModelSpec, balls: NDArray[Any], has_lineage: bool
) -> None:
    default = Diameter((12.5,), "px")
    assert measure(balls, spec, default)[1] > 4
    clear_spec = with_calibration(spec, intercept=4.0)
    if has_lineage:
        lineage = Lineage(parent="a/1", annotations=1, before=0.1, after=0.2, better=True, remark="")
        clear_spec = spec.model_copy(update={"lineage": lineage})
    found, window_count = measure(balls, clear_spec, default)
    assert (found.diameter, window_count) == (default, 4)


@pytest.mark.parametrize("lengths", [(17.5,), (10.5, 9.5, 10.5)])
def test_objects_that_are_found_reliably_correct_the_default_diameter(
    spec: ModelSpec, balls: NDArray[Any], lengths: tuple[float] | tuple[float, float, float]
) -> None:
    default = Diameter(lengths, "px")
    # The confidence depends little on the size, so only the size of the objects shows that the default is wrong.
    found, window_count = measure(balls, with_calibration(spec, intercept=4.0, size=-1.0), default)
    assert found.diameter is not None
    # The objects are the parts of the balls that are clearly brighter than 0.
    assert np.prod(found.diameter.lengths) ** (1 / len(lengths)) == pytest.approx(0.9 * BALL_DIAMETER, rel=0.1)
    ratios = np.divide(found.diameter.lengths, lengths)
    assert ratios == pytest.approx(ratios[0])
    assert window_count == found.num_windows
    assert f"diameter={default}" in found.note


def test_default_diameter_is_not_corrected_if_the_confidence_decreases(spec: ModelSpec, balls: NDArray[Any]) -> None:
    default = Diameter((17.5,), "px")
    assert measure(balls, with_calibration(spec, intercept=-1.0, size=20.0), default)[0].diameter == default


def test_confident_parts_of_objects_do_not_replace_the_default_diameter(
    spec: ModelSpec, balls: NDArray[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    default, wrong = Diameter((14.0,), "px"), Diameter((40.0,), "px")
    monkeypatch.setattr(DiameterEstimator, "estimate", lambda *_: DiameterEstimate(wrong, False, 9, 4, wrong))
    # The confidence increases with the difference between the size of the objects and the expected one.
    assert measure(balls, with_calibration(spec, size=6.0), default)[0].diameter == default


def test_large_parts_of_a_stack_are_not_read_for_a_large_default_diameter(spec: ModelSpec) -> None:
    default = Diameter((60.0,), "px")
    found, window_count = measure(np.zeros((200, 200, 200), np.float32), spec, default)
    assert (found.diameter, window_count) == (default, 0)
