import pytest

from service.core.quantities import Diameter, VoxelSize
from service.inference.series.diameter import choose_diameter, select_evenly_spaced
from service.inference.types import DiameterEstimate


def make_estimate(width: float | None, *, fits: bool = False) -> DiameterEstimate:
    return DiameterEstimate(None if width is None else Diameter((width,), "px"), fits, 9, 2)


@pytest.mark.parametrize(("members", "count"), [(1, 3), (2, 3), (3, 3), (5, 3), (1000, 5)])
def test_samples_are_spread_over_the_series(members: int, count: int) -> None:
    sampled = select_evenly_spaced(range(members), count)
    assert len(set(sampled)) == min(members, count)
    assert sampled[0] == 0
    assert max(sampled) >= members * (1 - 1 / count) - 1


def test_median_of_the_estimates_is_used_for_the_series() -> None:
    text, note = choose_diameter([(make_estimate(width), None) for width in (10, 30, None, 12)], "4 time points")
    assert text == "12,12,12px"
    assert "12 px wide (measured in 3 of 4 time points)" in note


def test_estimates_for_different_voxel_sizes_are_compared_in_micrometers() -> None:
    sizes = VoxelSize(1, 1, 1), VoxelSize(0.5, 0.5, 0.5)
    text, _note = choose_diameter([(make_estimate(10 / size.z), size) for size in sizes], "2 stacks")
    assert text == "10,10,10um"


def test_the_default_diameter_of_the_model_is_used_for_a_series_that_it_suits() -> None:
    default = Diameter((2.0, 12.0, 12.0), "um")
    suits = DiameterEstimate(default, False, 0, 0, default=default), VoxelSize(1, 0.5, 0.5)
    text, note = choose_diameter([suits] * 3, "3 stacks")
    assert text == "2,12,12um"
    assert note.startswith("Objects are assumed to be 12 um wide and 2 um deep")
    text, note = choose_diameter([suits, *[(make_estimate(9), VoxelSize(1, 0.5, 0.5))] * 2], "3 stacks")
    assert text == "4.5,9,9px"
    assert "measured in 3 of 3 stacks" in note


def test_original_resolution_is_used_if_it_fits_or_no_diameter_is_known() -> None:
    assert choose_diameter([(make_estimate(15, fits=True), None)], "1 stack")[0] == "none"
    text, note = choose_diameter([(make_estimate(None), None)], "1 stack")
    assert text == "none"
    assert "could not be estimated" in note
