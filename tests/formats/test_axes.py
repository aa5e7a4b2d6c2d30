"""Resolve the axes of files, override them, and select channels and time points."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import AmbiguousAxes, BadFile, BadParameter
from service.core.types import Selection
from service.formats import axes
from service.formats.axes import Layout

NAMES = ("DAPI", "GFP", "gfp", "")


@pytest.mark.parametrize(
    ("stored", "shape", "expected"),
    [
        ("ZYX", (5, 6, 7), "ZYX"),
        ("TZCYXS", (1, 5, 1, 6, 7, 1), "ZYX"),
        ("TZCYXS", (2, 5, 3, 6, 7, 1), "TZCYX"),
        ("YX", (6, 7), "YX"),
        ("YX", (1, 7), "YX"),
        ("YXT", (6, 7, 4), "YXT"),
        ("IYX", (5, 6, 7), "ZYX"),
        ("QYX", (5, 6, 7), "ZYX"),
        ("QQYX", (1, 5, 6, 7), "ZYX"),
        ("MPZCYX", (1, 1, 5, 2, 6, 7), "ZCYX"),
    ],
)
def test_axes_of_the_file_are_used(stored: str, shape: tuple[int, ...], expected: str) -> None:
    layout = axes.resolve_axes(stored, shape, None)

    assert layout.axes == expected
    assert bool(layout.notes) == any(letter in stored for letter in "QI")


@pytest.mark.parametrize(
    ("stored", "shape", "suggested"),
    [
        ("QQYX", (51, 2, 40, 50), "ZCYX"),
        ("QQYX", (2, 51, 40, 50), "CZYX"),
        ("QQYX", (20, 51, 40, 50), "TZYX"),
        ("QQQYX", (20, 51, 3, 40, 50), "TZCYX"),
        ("QQQYX", (20, 3, 51, 40, 50), "TCZYX"),
        ("IYXS", (51, 40, 50, 3), "ZYXS"),
        ("QCYX", (5, 2, 40, 50), "ZCYX"),
        ("TRYX", (5, 2, 6, 7), "TZYX"),
        ("ZX", (5, 6), r"\w\w"),
        ("ZZYX", (2, 5, 6, 7), r"\w{4}"),
    ],
)
def test_ambiguous_axes_are_rejected_with_a_suggestion(stored: str, shape: tuple[int, ...], suggested: str) -> None:
    with pytest.raises(AmbiguousAxes, match=f"axes={suggested}[.]") as caught:
        axes.resolve_axes(stored, shape, None)

    assert " x ".join(map(str, shape)) in str(caught.value)


@given(st.text("TZCYXSQIRMP", min_size=2, max_size=7), st.data())
def test_suggested_axes_are_valid(stored: str, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(2, 60)] * len(stored)))
    try:
        axes.resolve_axes(stored, shape, None, "the metadata is damaged")
    except AmbiguousAxes as error:
        match = re.search(r"axes=(\w*)", str(error))
        assert bool(match) == (len(stored) <= len(axes.AXIS_LETTERS))
        if match:
            axes.resolve_axes(stored, shape, match[1])


def test_unusable_metadata_is_rejected_for_stacks_and_noted_for_planes() -> None:
    with pytest.raises(AmbiguousAxes, match=r"the metadata is damaged.*axes="):
        axes.resolve_axes("IYX", (5, 6, 7), None, "the metadata is damaged")

    assert "the metadata is damaged" in axes.resolve_axes("YX", (6, 7), None, "the metadata is damaged").notes[0]
    assert axes.resolve_axes("IYX", (5, 6, 7), "TYX", "the metadata is damaged").axes == "TYX"


@pytest.mark.parametrize(
    ("stored", "shape", "override", "expected"),
    [
        *(("ZYX", (5, 6, 7), override, (5, 6, 7)) for override in ("TYX", "tyx", "CYX", "ZYX", "XYZ")),
        # Dimensions of length 1 may be included or left out.
        ("TZCYXS", (1, 5, 2, 6, 7, 1), "TCYX", (5, 2, 6, 7)),
        ("TZCYXS", (1, 5, 2, 6, 7, 1), "ZTCYXS", (1, 5, 2, 6, 7, 1)),
    ],
)
def test_override_takes_precedence(
    stored: str, shape: tuple[int, ...], override: str, expected: tuple[int, ...]
) -> None:
    layout = axes.resolve_axes(stored, shape, override)

    assert (layout.axes, layout.shape) == (override.upper(), expected)


@pytest.mark.parametrize("override", ["", "ZY", "ZYYX", "ZYXQ", "ZZYX", "YX", "CZYX", "TCZYX", "Z Y X", "ÄYX"])
def test_error_for_invalid_override_contains_stored_shape_or_letters(override: str) -> None:
    with pytest.raises(BadParameter, match=r"5 x 6 x 7|TZCYXS"):
        axes.resolve_axes("ZYX", (5, 6, 7), override)


@given(st.text(max_size=7), st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_any_override_is_valid_or_a_bad_parameter(override: str, shape: list[int]) -> None:
    stored_axes = "TZCYXS"[-len(shape) :]
    try:
        layout = axes.resolve_axes("QQQQYX"[-len(stored_axes) :], shape, override)
    except BadParameter:
        return
    assert len(layout.axes) == len(layout.shape)
    assert {"Y", "X"} <= set(layout.axes)


@pytest.mark.parametrize("shape", [(0, 5, 5), (3, 0, 5), (3, 5, 0)])
def test_empty_dimensions_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadFile, match="has no pixels"):
        axes.resolve_axes("ZYX", shape, None)


@pytest.mark.parametrize(
    ("channel", "number"), [(0, 0), (3, 3), ("2", 2), (" 1 ", 1), ("DAPI", 0), ("dapi", 0), ("gfp", 2)]
)
def test_channel_is_selected_by_number_or_name(channel: int | str, number: int) -> None:
    assert axes.select_part(Layout("CYX", (4, 6, 7)), NAMES, Selection(channel=channel)).channels == (number,)


@pytest.mark.parametrize("channel", [-1, 4, "4", "RFP", "", "Gfp", "1.0"])
def test_error_for_unknown_channel_lists_existing_channels(channel: int | str) -> None:
    with pytest.raises(BadParameter, match=r"0 \(DAPI\), 1 \(GFP\), 2 \(gfp\), 3|Choose one by its number"):
        axes.select_part(Layout("CYX", (4, 6, 7)), NAMES, Selection(channel=channel))


@pytest.mark.parametrize(("channel", "number"), [(0, 0), (1, 1), (2, 2), ("0", 2), (405, 0), (3, 1)])
def test_channel_names_that_are_numbers_do_not_replace_indices(channel: int | str, number: int) -> None:
    assert axes.select_part(Layout("CYX", (3, 6, 7)), ("405", "3", "0"), Selection(channel=channel)).channels == (
        number,
    )
    assert axes.select_part(Layout("CYX", (3, 6, 7)), ("405", "3", "0"), Selection()).channels == (0, 1, 2)


@pytest.mark.parametrize(
    ("stored", "override", "is_noted"),
    [
        ("ZYX", "XYZ", True),
        ("ZYX", "YXZ", True),
        ("QYX", "ZXY", True),
        ("ZYX", "TYX", False),
        ("QYXS", "ZYXS", False),
        ("IYXS", "ZYXC", False),
        ("XYZ", "ZXY", False),
    ],
)
def test_override_that_transposes_the_planes_of_a_file_is_noted(stored: str, override: str, is_noted: bool) -> None:
    layout = axes.resolve_axes(stored, (5, 6, 7, 3)[: len(stored)], override)

    assert any(f"axes={override}" in note for note in layout.notes) == is_noted


def test_single_time_point_is_selected_by_default() -> None:
    assert axes.select_part(Layout("ZYX", (5, 6, 7)), ("",), Selection()).time == 0
    assert axes.select_part(Layout("TYX", (5, 6, 7)), ("",), Selection()).time is None
    assert axes.select_part(Layout("TYX", (5, 6, 7)), ("",), Selection(time=4)).time == 4


@pytest.mark.parametrize("time", [-1, 5])
def test_missing_time_point_is_rejected(time: int) -> None:
    with pytest.raises(BadParameter, match="time=0 to time=4"):
        axes.select_part(Layout("TYX", (5, 6, 7)), ("",), Selection(time=time))
    with pytest.raises(BadParameter, match="one time point"):
        axes.select_part(Layout("ZYX", (5, 6, 7)), ("",), Selection(time=5))


def test_time_choice_message_suggests_time_and_axes() -> None:
    message = axes.explain_time_choice(Layout("TYX", (5, 6, 7)))

    assert "time=0 to time=4" in message
    assert "axes=ZYX" in message
    assert "axes=" not in axes.explain_time_choice(Layout("TZYX", (5, 3, 6, 7)))


def test_names_of_channels_have_no_spaces_around_them() -> None:
    assert axes.match_channels((" DAPI", " \t"), 2) == ("DAPI", "")
    assert axes.match_channels(("DAPI", "GFP"), 3) == ("", "", "")
