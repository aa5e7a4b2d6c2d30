"""Units of length, voxel sizes and resolution tags."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.quantities import VoxelSize
from service.formats import sampling
from service.formats.sampling import Calibration, Resolution

RESOLUTION = Resolution(((5, 1), (4, 1)), "")


UNITS = {
    1: ["µm", "μm", "um", "\\u00B5m", "Âµm", "micron", "Microns", "micrometer", "micrometres", " um\0"],
    1e-6: ["picometer", "Picometers", "pm"],
    1e-4: ["Å"],
    1e-3: ["nm", "nanometers"],
    1e3: ["mm"],
    1e4: ["cm"],
    1e5: ["decimeter", "dm"],
    1e6: ["m", "meter"],
    1e9: ["km"],
    25400: ["in", "inch"],
    304800: ["ft"],
    25.4: ["thou"],
    914400: ["yd", "yard"],
    25400 / 72: ["pt"],
}


@pytest.mark.parametrize(("micrometers", "unit"), [(length, unit) for length, units in UNITS.items() for unit in units])
def test_units_of_length(unit: str, micrometers: float) -> None:
    assert sampling.get_micrometers_per_unit(unit) == pytest.approx(micrometers, rel=1e-12)


@pytest.mark.parametrize("unit", ["pixel", "pixels", "reference frame", "", "s", "furlong", "µ", "2 um"])
def test_other_units_are_unknown(unit: str) -> None:
    assert sampling.get_micrometers_per_unit(unit) is None


@pytest.mark.parametrize("value", [0, "nan", "inf", float("nan"), "abc", None, [], 10**400, 1e-30, 1e30, "1e999"])
def test_implausible_sizes_are_unknown(value: object) -> None:
    assert sampling.convert_to_micrometers(value, "um") is None


@given(st.floats(1e-5, 1e6))
def test_sizes_in_micrometers_are_unchanged(size: float) -> None:
    assert sampling.convert_to_micrometers(repr(size), "µm") == size


@pytest.mark.parametrize(
    ("metadata", "size"),
    [
        # z is in the description, y and x are in the resolution tags.
        ({"spacing": 0.5, "unit": "micron"}, VoxelSize(0.5, 0.25, 0.2)),
        ({"spacing": 500, "unit": "um", "yunit": "\\u00B5m", "zunit": "nm"}, VoxelSize(0.5, 0.25, 0.2)),
        # ImageJ omits a spacing of 1, and shows the absolute value of a negative one.
        ({"unit": "micron"}, VoxelSize(1.0, 0.25, 0.2)),
        ({"unit": "micrometer", "spacing": -0.5}, VoxelSize(0.5, 0.25, 0.2)),
        ({"spacing": 2, "unit": "pixel"}, None),
        ({"spacing": 2, "unit": ""}, None),
        ({"spacing": 2, "unit": "sec"}, None),
    ],
)
def test_imagej_unit_may_differ_per_axis(metadata: dict[str, Any], size: VoxelSize | None) -> None:
    calibration = sampling.parse_imagej_calibration(metadata, RESOLUTION, "ImageJ metadata")

    assert calibration.get_voxel_size() == size
    assert calibration.get_partial_voxel_size() is None
    assert calibration.list_user_notes()[-1:] == (() if size else (sampling.NO_VOXEL_SIZE_NOTE,))


@pytest.mark.parametrize(("unit", "is_named"), [("microm", True), ("um/pixel", True), (" Pixels", False), ("", False)])
def test_note_names_an_unknown_unit_of_an_imagej_stack(unit: str, is_named: bool) -> None:
    calibration = sampling.parse_imagej_calibration({"spacing": 0.5, "unit": unit}, RESOLUTION, "ImageJ metadata")

    assert calibration.get_voxel_size() is None
    assert any(f"unknown unit {unit!r}" in note for note in calibration.list_user_notes()) == is_named


@pytest.mark.parametrize("spacing", [0, 5e-6, float("nan"), "x", "0,5"])
def test_invalid_spacing_is_noted_and_other_edges_are_reported(spacing: object) -> None:
    calibration = sampling.parse_imagej_calibration({"spacing": spacing, "unit": "um"}, RESOLUTION, "ImageJ metadata")

    assert calibration.get_voxel_size() is None
    assert "along z" in calibration.notes[0]
    assert calibration.get_partial_voxel_size() == (None, 0.25, 0.2)
    assert "y 0.25 um, x 0.2 um" in calibration.list_user_notes()[-1]
    assert "voxel_size=" in calibration.list_user_notes()[-1]


@pytest.mark.parametrize(
    ("unit", "tag_unit", "pixels_per_unit", "spacing", "size"),
    [
        # Without a unit in the tags, or with the same unit, the unit of the description applies.
        ("um", "", 5, 0.5, (0.5, 0.2)),
        ("nm", "", 0.005, 500, (0.5, 0.2)),
        ("mm", "", 5000, 0.0005, (0.5, 0.2)),
        ("inch", "inch", 127000, 0.5 / 25400, (0.5, 0.2)),
        ("cm", "cm", 50000, 5e-5, (0.5, 0.2)),
        # ImageJ scales the tags only for "um" and centimeters. Other programs write such tags with other units as well.
        ("um", "cm", 50000, 0.5, (0.5, 0.2)),
        ("micron", "cm", 50000, 0.5, (0.5, 0.2)),
        ("\\u00B5m", "cm", 50000, 0.5, (0.5, 0.2)),
        ("nm", "cm", 50000, 500, (0.5, 0.2)),
        ("mm", "cm", 50000, 0.0005, (0.5, 0.02)),
        ("um", "inch", 127000, 0.5, (0.5, 0.2)),
        # Programs that do not know the unit tag write the default, inch or centimeter.
        ("um", "cm", 5, 0.5, (0.5, 0.2)),
        ("micron", "cm", 5, 0.5, (0.5, 0.2)),
        ("um", "inch", 5, 0.5, (0.5, 0.2)),
        # ImageJ replaces 72 dpi with one pixel per unit.
        ("um", "inch", 72, 2.0, (2.0, 1.0)),
        # ImageJ omits a spacing of 1, and does not scale it if it converts cm to micrometers.
        ("cm", "cm", 50000, None, (1.0, 0.2)),
        ("um", "cm", 50000, None, (1.0, 0.2)),
    ],
)
def test_imagej_unit_may_differ_from_the_unit_of_the_tags(
    unit: str, tag_unit: str, pixels_per_unit: float, spacing: float | None, size: tuple[float, float]
) -> None:
    ratio = Fraction(pixels_per_unit).limit_denominator(10**6).as_integer_ratio()
    metadata = {"unit": unit} | ({} if spacing is None else {"spacing": spacing})

    calibration = sampling.parse_imagej_calibration(metadata, Resolution((ratio, ratio), tag_unit), "ImageJ metadata")

    assert calibration.get_voxel_size() is not None
    assert (calibration.z, calibration.y, calibration.x) == pytest.approx((size[0], size[1], size[1]))


@pytest.mark.parametrize(
    ("sizes", "unit", "discarded_axes"),
    [
        ((500, 0.2, 0.2), "um", "z"),
        ((0.0005, 0.2, 0.2), "um", "z"),
        ((0.5, 0.2, 200), "um", "yx"),
        ((0.5, 0.0002, 0.2), "um", "yx"),
        ((1, 200, 200), "nm", "z"),
        ((5, 2e-5, 2e-5), "um", "yx"),
        ((0.5, 0.2, 0.2), "m", "zyx"),
        ((100, 0.2, 0.2), "um", ""),
        ((0.1, 0.65, 0.65), "um", ""),
        ((4, 4, 4), "nm", ""),
        ((-0.5, -0.2, 0.2), "um", ""),
    ],
)
def test_sizes_that_contradict_each_other_or_a_microscope_are_unknown(
    sizes: tuple[float, float, float], unit: str, discarded_axes: str
) -> None:
    calibration = sampling.parse_calibration(sizes, unit, "OME-XML")

    assert "".join(axis for axis in "zyx" if getattr(calibration, axis) is None) == discarded_axes
    assert all(any(axis in note for note in calibration.notes) for axis in discarded_axes)


@pytest.mark.parametrize(
    ("axes", "scales", "units", "size"),
    [
        ("X,Y,Z", "0.2,0.25,0.5", "\\u00B5m,\\u00B5m,\\u00B5m", (0.5, 0.25, 0.2)),
        ("X,Y,Channel,Z,Time", "200.0,250.0,1.0,0.5,1.0", "nm,nm,null,um,sec", (0.5, 0.25, 0.2)),
        ("X,Y,Z", "0.2,0.25,-0.5", "um,um,um", (0.5, 0.25, 0.2)),
        ("X,Y,Z", "0.2,0.25,1.0", "um,um,null", (None, 0.25, 0.2)),
        ("X,Y,Z", "1.0,1.0,1.0", "null,null,null", (None, None, None)),
        ("X,Y", "0.2", "um,um", (None, None, 0.2)),
    ],
)
def test_scales_and_units_of_scifio(
    axes: str, scales: str, units: str, size: tuple[float | None, float | None, float | None]
) -> None:
    calibration = sampling.parse_scifio_calibration({"axes": axes, "scales": scales, "units": units}, "SCIFIO metadata")

    assert (calibration.z, calibration.y, calibration.x) == pytest.approx(size)
    assert not calibration.notes


def test_next_source_is_used_if_one_is_incomplete() -> None:
    incomplete = Calibration(None, 0.2, 0.2, "OME-XML", ("no z",))
    complete = Calibration(0.5, 0.25, 0.25, "ImageJ metadata")
    spacing = Calibration(0.4, None, None, "ScanImage header")

    assert sampling.combine_calibrations([incomplete, complete, spacing]) == replace(complete, notes=("no z",))
    combined = sampling.combine_calibrations([incomplete, spacing])
    assert combined.get_voxel_size() == VoxelSize(0.4, 0.2, 0.2)
    assert combined.source == "OME-XML and ScanImage header"
    assert sampling.combine_calibrations([]) == sampling.UNKNOWN_CALIBRATION


def test_zero_resolution_is_unknown() -> None:
    calibration = sampling.parse_imagej_calibration({"spacing": 1, "unit": "um"}, Resolution(((0, 1), None), ""), "")

    assert (calibration.z, calibration.y, calibration.x) == (1, None, None)


def test_one_pixel_per_unit_is_used_with_a_note() -> None:
    calibration = sampling.parse_imagej_calibration({"spacing": 2, "unit": "um"}, Resolution(((1, 1), (1, 1)), ""), "")

    assert calibration.get_voxel_size() == VoxelSize(2, 1, 1)
    assert "exactly one pixel per um" in calibration.notes[0]


@pytest.mark.parametrize(
    ("ratio", "unit", "pixel"),
    [
        ((20000, 1), "cm", 0.5),
        ((72, 1), "inch", None),
        ((96, 1), "inch", None),
        ((300, 1), "inch", None),
        ((9600, 1), "inch", None),
        ((127000, 1), "inch", 0.2),
        ((5 * 10**9, 1), "cm", None),
        ((28, 1), "cm", None),
        ((1, 1), "", None),
        ((0, 1), "cm", None),
    ],
)
def test_resolution_tags_are_used_only_if_plausible_for_a_microscope(
    ratio: tuple[int, int], unit: str, pixel: float | None
) -> None:
    calibration = Resolution((ratio, ratio), unit).get_calibration()

    assert calibration.x == pytest.approx(pixel)
    assert calibration.get_voxel_size() is None


def test_lengths_in_vendor_headers() -> None:
    calibration = sampling.parse_calibration((1e-6, 2e-7, 3e-7), "m", "LSM header").get_voxel_size()

    assert calibration is not None
    assert tuple(calibration) == pytest.approx((1, 0.2, 0.3))
    assert sampling.parse_calibration((None, None, None), "m", "LSM header").get_voxel_size() is None
