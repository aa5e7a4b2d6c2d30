from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.core.quantities import Diameter, ObjectVolume, TimeRange, VoxelSize
from service.core.types import Options, PostprocessingOptions, Selection
from service.serving.parameters import Query, describe_validation_errors


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Selection()),
        ({"axes": "", "channel": ""}, Selection()),
        (
            {"channel": "2", "time": "1", "axes": "tzcyx", "voxel_size": "0.5, 0.2,0.2"},
            Selection(2, 1, "TZCYX", VoxelSize(0.5, 0.2, 0.2)),
        ),
        ({"channel": "0"}, Selection(channel=0)),
        ({"allow_incomplete": "true"}, Selection(allow_incomplete=True)),
        ({"allow_incomplete": "false"}, Selection()),
        ({"scene": "2"}, Selection(scene=2)),
        ({"scene": "Position 3"}, Selection(scene="Position 3")),
        *(({"channel": name}, Selection(channel=name)) for name in ("DAPI", "-1", "²", "٣")),
        ({"channel": "all"}, Selection()),
        *(({"time": time}, Selection(time=3)) for time in ("3", 3)),
        ({"time": "all"}, Selection(time=TimeRange())),
        ({"time": "2:5"}, Selection(time=TimeRange(2, 5))),
        ({"time": "2:"}, Selection(time=TimeRange(2))),
        ({"time": ":5"}, Selection(time=TimeRange(0, 5))),
    ],
)
def test_query_is_parsed_to_a_selection(given: dict[str, Any], expected: Selection) -> None:
    assert Query.model_validate(given).selection == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Options()),
        ({"output": "classes", "sw_batch_size": "4", "overlap": "0.5"}, Options("classes", 4, 0.5)),
        ({"diameter": "15px"}, Options(diameter=Diameter((15,), "px"))),
        ({"diameter": "7, 15,15 px"}, Options(diameter=Diameter((7, 15, 15), "px"))),
        ({"diameter": "6.5UM"}, Options(diameter=Diameter((6.5,), "um"))),
        ({"diameter": "none"}, Options(diameter="none")),
        ({"diameter": " AUTO "}, Options(diameter="auto")),
        ({"skip_below": "auto"}, Options(skip_below="auto")),
        ({"skip_below": " None"}, Options(skip_below="none")),
        *(({"skip_below": text}, Options(skip_below=float(text))) for text in ("120", "-3.5", "1e3")),
        ({"roi_size": "32, 64,96"}, Options(roi_size=(32, 64, 96))),
        ({"minimum_size": "60"}, Options(postprocessing=PostprocessingOptions(minimum_size=ObjectVolume(60, "px")))),
        (
            {
                "threshold": "0.7",
                "minimum_size": " 12.5 UM3",
                "border": "drop",
                "fill_holes": "true",
                "min_confidence": "0.9",
            },
            Options(
                postprocessing=PostprocessingOptions(
                    0.7, ObjectVolume(12.5, "um3"), "drop", fill_holes=True, min_confidence=0.9
                )
            ),
        ),
        ({"threshold": "", "minimum_size": ""}, Options()),
    ],
)
def test_query_is_parsed_to_options(given: dict[str, Any], expected: Options) -> None:
    assert Query.model_validate(given).options == expected


INVALID_TEXT = {
    "time": ("or 'all'", ["-1", "5:2", "2:2", ":", "1:2:3", "1-3", "first", "²", "1.5"]),
    "voxel_size": (
        "0.5,0.2,0.2",
        ["1", "1,2", "1,2,3,4", "a,b,c", "0,1,1", "-1,1,1", "nan,1,1", "inf,1,1", "1,1,1e-12", "1e200,1,1", ",,"],
    ),
    "diameter": (
        "15px",
        ["15", "px", "automatic", "15 mm", "1,2px", "1,2,3,4um", "0px", "-3um", "nanpx", "infum", "1,a,3px", "15pxum"],
    ),
    "skip_below": (": Expected a gray value", ["dark", "nan", "inf", "-inf", "12px", "1,2"]),
    "roi_size": (
        ": Expected three positive numbers",
        ["64", "64,64", "64,64,0", "64,64,-1", "64,,64", "64,64,64,64", "1e1,2,3", "9999999,1,1"],
    ),
    "minimum_size": (": Expected a volume in voxels", ["many", "60px", "12um", "um3", "-1", "nan", "infum3", "1e30"]),
}

PYTHON_NUMERALS = (
    *(("time", text) for text in ("1_0", "\u0661")),
    *(("voxel_size", f"{text},1,1") for text in ("1_0", "\u0661")),
    *(("diameter", f"{text}px") for text in ("1_0", "\u0661", "1_0,1_0,1_0")),
    *(("skip_below", text) for text in ("1_0", "\u0661")),
    *(("roi_size", f"{text},16,16") for text in ("1_6", "\u0661")),
    *(("minimum_size", f"{text}um3") for text in ("1_0", "\u0661")),
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *((name, text, fragment) for name, (fragment, texts) in INVALID_TEXT.items() for text in texts),
        # Numbers for Python, but not for people.
        *((name, text, INVALID_TEXT[name][0]) for name, text in PYTHON_NUMERALS),
    ],
)
def test_invalid_text_is_rejected_with_the_expected_format(name: str, text: str, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Query.model_validate({name: text})
    message = str(describe_validation_errors(caught.value.errors()))
    assert message.startswith(f"{name}: ")
    assert expected in message


@given(st.dictionaries(st.sampled_from([*Query.model_fields, "zoom"]), st.text(max_size=20)))
def test_any_text_is_parsed_or_rejected_with_its_parameter(given: dict[str, str]) -> None:
    try:
        outcome = str(Query.model_validate(given).selection)
    except ValidationError as error:
        outcome = str(describe_validation_errors(error.errors()))
    assert outcome.startswith("Selection(") or any(name in outcome for name in given)


@pytest.mark.parametrize(
    "given", [{"zoom": 1}, {"overlap": 1}, {"time": -1}, {"output": "cells"}, {"threshold": 1}, {"border": "cut"}]
)
def test_error_message_names_the_parameter_and_is_a_sentence(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        Query.model_validate(given)
    message = str(describe_validation_errors(caught.value.errors()))
    assert next(iter(given)) in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("loc", "parameter"),
    [(("overlap",), "overlap"), (("query", "limit"), "limit"), (("annotations", 3), "annotations"), ((), None)],
)
def test_error_has_the_parameter_of_its_location(loc: tuple[str | int, ...], parameter: str | None) -> None:
    error = describe_validation_errors([{"loc": loc, "type": "value_error", "msg": "Value error, wrong"}])
    assert error.parameter == parameter


def test_parameter_names_are_formatted_for_the_client() -> None:
    with pytest.raises(ValidationError) as caught:
        Query.model_validate({"overlap": 1, "sw_batch_size": 0})
    messages = str(describe_validation_errors(caught.value.errors(), format_name=lambda name: f"<{name}>"))
    assert "<sw_batch_size>: " in messages
    assert "<overlap>: " in messages
