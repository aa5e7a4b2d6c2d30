from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.core.quantities import Diameter, ObjectVolume, TimeRange, VoxelSize
from service.core.types import Options, Selection, Steering
from service.serving.parameters import Query, describe_faults


def test_query_becomes_a_selection_and_options() -> None:
    query = Query.model_validate(
        {
            "channel": "2",
            "time": "1",
            "axes": "tzcyx",
            "voxel_size": "0.5, 0.2,0.2",
            "output": "classes",
            "sw_batch_size": "4",
            "overlap": "0.5",
            "diameter": "7, 15,15 px",
        }
    )
    assert query.selection == Selection(2, 1, "TZCYX", VoxelSize(0.5, 0.2, 0.2))
    assert query.options == Options("classes", 4, 0.5, Diameter((7, 15, 15), "px"))


def test_nothing_given_leaves_everything_to_file_and_operator() -> None:
    assert Query().selection == Selection()
    assert Query().options == Options()
    assert Query.model_validate({"axes": "", "channel": ""}).selection == Selection()


@pytest.mark.parametrize(
    ("channel", "meaning"), [("0", 0), ("DAPI", "DAPI"), ("-1", "-1"), ("²", "²"), ("٣", "٣"), ("all", None)]
)
def test_channel_is_an_index_a_name_or_all(channel: str, meaning: int | str | None) -> None:
    assert Query(channel=channel).selection.channel == meaning


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("3", 3),
        (3, 3),
        ("all", TimeRange()),
        ("2:5", TimeRange(2, 5)),
        ("2:", TimeRange(2)),
        (":5", TimeRange(0, 5)),
    ],
)
def test_time_is_an_index_all_or_a_range(text: Any, meaning: int | TimeRange) -> None:
    assert Query.model_validate({"time": text}).selection.time == meaning


@pytest.mark.parametrize("text", ["-1", "5:2", "2:2", ":", "1:2:3", "1-3", "first", "²", "1.5"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="all, or a range"):
        Query(time=text)


@given(st.dictionaries(st.sampled_from([*Query.model_fields, "zoom"]), st.text(max_size=20)))
def test_any_text_is_understood_or_refused_by_name(given: dict[str, str]) -> None:
    try:
        outcome = str(Query.model_validate(given).selection)
    except ValidationError as error:
        outcome = str(describe_faults(error.errors()))
    assert outcome.startswith("Selection(") or any(name in outcome for name in given)


@pytest.mark.parametrize(
    "text", ["1", "1,2", "1,2,3,4", "a,b,c", "0,1,1", "-1,1,1", "nan,1,1", "inf,1,1", "1,1,1e-12", "1e200,1,1", ",,"]
)
def test_voxel_size_is_three_positive_numbers(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Query(voxel_size=text)
    assert "voxel_size" in str(describe_faults(caught.value.errors()))
    assert "0.5,0.2,0.2" in str(describe_faults(caught.value.errors()))


@pytest.mark.parametrize(("text", "meaning"), [("15px", ((15,), "px")), ("6.5UM", ((6.5,), "um"))])
def test_diameter_is_one_length_with_a_unit(text: str, meaning: Any) -> None:
    assert Query(diameter=text).options.diameter == Diameter(*meaning)


@pytest.mark.parametrize("text", ["auto", "none", " AUTO "])
def test_diameter_may_be_left_to_the_stack(text: str) -> None:
    assert Query(diameter=text).options.diameter == text.strip().lower()


@pytest.mark.parametrize(
    ("text", "meaning"), [("auto", "auto"), (" None", "none"), ("120", 120), ("-3.5", -3.5), ("1e3", 1000)]
)
def test_dark_windows_are_skipped_below_a_grey_value(text: str, meaning: Any) -> None:
    assert Query(skip_below=text).options.skip_below == meaning


@pytest.mark.parametrize("text", ["dark", "nan", "inf", "-inf", "12px", "1,2"])
def test_a_grey_value_is_a_finite_number(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Query(skip_below=text)
    assert str(describe_faults(caught.value.errors())).startswith("skip_below: A grey value")


@pytest.mark.parametrize(
    "text", ["64", "64,64", "64,64,0", "64,64,-1", "64,,64", "64,64,64,64", "1e1,2,3", "9999999,1,1"]
)
def test_a_window_is_three_positive_numbers(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Query(roi_size=text)
    assert str(describe_faults(caught.value.errors())).startswith("roi_size: Three positive numbers")
    assert Query(roi_size="32, 64,96").options.roi_size == (32, 64, 96)


def test_steering_is_left_to_the_model_unless_given() -> None:
    given = {"threshold": "0.7", "minimum_size": " 12.5 UM3", "border": "drop", "fill_holes": "true"}
    steering = Query.model_validate(given | {"min_confidence": "0.9"}).options.steering
    assert steering == Steering(0.7, ObjectVolume(12.5, "um3"), "drop", fill_holes=True, min_confidence=0.9)
    assert Query(minimum_size="60").options.steering == Steering(minimum_size=ObjectVolume(60, "px"))
    assert Query.model_validate({"threshold": "", "minimum_size": ""}).options == Options()


@pytest.mark.parametrize("text", ["many", "60px", "12um", "um3", "-1", "nan", "infum3", "1e30"])
def test_a_minimum_size_is_a_number_of_voxels_or_micrometres(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Query(minimum_size=text)
    assert str(describe_faults(caught.value.errors())).startswith("minimum_size: A number of voxels")


@pytest.mark.parametrize(
    "text",
    ["15", "px", "automatic", "15 mm", "1,2px", "1,2,3,4um", "0px", "-3um", "nanpx", "infum", "1,a,3px", "15pxum"],
)
def test_diameter_needs_a_unit_and_positive_lengths(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Query(diameter=text)
    assert "diameter" in str(describe_faults(caught.value.errors()))
    assert "15px" in str(describe_faults(caught.value.errors()))


@pytest.mark.parametrize(
    "given", [{"zoom": 1}, {"overlap": 1}, {"time": -1}, {"output": "cells"}, {"threshold": 1}, {"border": "cut"}]
)
def test_explanation_is_sentences(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Query.model_validate(given)
    sentence = str(describe_faults(caught.value.errors()))
    assert next(iter(given)) in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("loc", "parameter"),
    [(("overlap",), "overlap"), (("query", "limit"), "limit"), (("annotations", 3), "annotations"), ((), None)],
)
def test_error_names_its_parameter(loc: tuple[str | int, ...], parameter: str | None) -> None:
    error = describe_faults([{"loc": loc, "type": "value_error", "msg": "Value error, wrong"}])
    assert error.parameter == parameter


def test_names_are_spelt_as_the_client_states_them() -> None:
    with pytest.raises(ValidationError) as caught:
        Query.model_validate({"overlap": 1, "sw_batch_size": 0})
    sentences = str(describe_faults(caught.value.errors(), spell=lambda name: f"<{name}>"))
    assert "<sw_batch_size>: " in sentences
    assert "<overlap>: " in sentences
