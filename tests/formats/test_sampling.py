"""Units and voxel sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.quantities import VoxelSize
from service.formats import sampling
from service.formats.sampling import Resolution

PLAIN = Resolution(((5, 1), (4, 1)), "")


@pytest.mark.parametrize(
    ("unit", "micrometres"),
    [
        ("µm", 1),
        ("μm", 1),
        ("um", 1),
        ("\\u00B5m", 1),
        ("Âµm", 1),
        ("micron", 1),
        ("Microns", 1),
        ("micrometer", 1),
        ("micrometres", 1),
        (" um\0", 1),
        ("nm", 1e-3),
        ("nanometers", 1e-3),
        ("Å", 1e-4),
        ("pm", 1e-6),
        ("mm", 1e3),
        ("cm", 1e4),
        ("dm", 1e5),
        ("m", 1e6),
        ("meter", 1e6),
        ("km", 1e9),
        ("in", 25400),
        ("inch", 25400),
        ("ft", 304800),
        ("thou", 25.4),
        ("pt", 25400 / 72),
    ],
)
def test_units_of_length(unit: str, micrometres: float) -> None:
    found = sampling.micrometres(unit)

    assert found is not None
    assert math.isclose(found, micrometres, rel_tol=1e-12)


@pytest.mark.parametrize("unit", ["pixel", "pixels", "reference frame", "", "s", "furlong", "µ", "2 um"])
def test_what_is_no_length_is_unknown(unit: str) -> None:
    assert sampling.micrometres(unit) is None


@pytest.mark.parametrize("value", [0, -1, "nan", "inf", float("nan"), "abc", None, [], 10**400, 1e-30, 1e30, "1e999"])
def test_what_cannot_be_a_size_is_unknown(value: object) -> None:
    assert sampling.length(value, "um") is None


@given(st.floats(1e-5, 1e6))
def test_sizes_in_micrometres_are_kept(size: float) -> None:
    assert sampling.length(repr(size), "µm") == size


def test_imagej_has_z_in_its_text_and_xy_in_the_tags() -> None:
    found = sampling.from_spacing({"spacing": 0.5, "unit": "micron"}, PLAIN, "ImageJ metadata")

    assert found.voxel_size() == VoxelSize(0.5, 0.25, 0.2)
    assert found.remarks() == ()


def test_imagej_may_have_a_unit_per_axis() -> None:
    metadata = {"spacing": 500, "unit": "um", "yunit": "mm", "zunit": "nm"}

    assert sampling.from_spacing(metadata, PLAIN, "").voxel_size() == VoxelSize(0.5, 250.0, 0.2)


@pytest.mark.parametrize("spacing", [0, -0.5, float("nan"), "x"])
def test_an_impossible_spacing_is_noted_and_the_rest_is_reported(spacing: object) -> None:
    found = sampling.from_spacing({"spacing": spacing, "unit": "um"}, PLAIN, "ImageJ metadata")

    assert found.voxel_size() is None
    assert "along z" in found.notes[0]
    assert "y 0.25 um, x 0.2 um" in found.remarks()[-1]
    assert "voxel_size=" in found.remarks()[-1]


def test_resolution_zero_is_unknown_and_never_divides() -> None:
    found = sampling.from_spacing({"spacing": 1, "unit": "um"}, Resolution(((0, 1), None), ""), "")

    assert (found.z, found.y, found.x) == (1, None, None)


def test_exactly_one_pixel_per_unit_is_used_with_a_caution() -> None:
    found = sampling.from_spacing({"spacing": 2, "unit": "um"}, Resolution(((1, 1), (1, 1)), ""), "")

    assert found.voxel_size() == VoxelSize(2, 1, 1)
    assert "exactly one pixel per um" in found.notes[0]


@pytest.mark.parametrize("unit", ["pixel", "", "sec"])
def test_imagej_without_a_unit_of_length_is_uncalibrated(unit: str) -> None:
    assert sampling.from_spacing({"spacing": 2, "unit": unit}, PLAIN, "") == sampling.NOTHING


@pytest.mark.parametrize(
    ("ratio", "unit", "pixel"),
    [
        ((20000, 1), "cm", 0.5),
        ((72, 1), "inch", None),
        ((96, 1), "inch", None),
        ((300, 1), "inch", None),
        ((28, 1), "cm", None),
        ((1, 1), "", None),
        ((0, 1), "cm", None),
    ],
)
def test_resolution_tags_alone_count_only_where_a_microscope_may_have_made_them(
    ratio: tuple[int, int], unit: str, pixel: float | None
) -> None:
    found = Resolution((ratio, ratio), unit).calibration()

    assert found.x == pixel
    assert found.voxel_size() is None


def test_vendors_lengths() -> None:
    found = sampling.from_lengths((1e-6, 2e-7, 3e-7), "m", "LSM header").voxel_size()

    assert found is not None
    assert tuple(found) == pytest.approx((1, 0.2, 0.3))
    assert sampling.from_lengths((None, None, None), "m", "LSM header").voxel_size() is None
