"""Units of length, voxel sizes and resolution tags."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.quantities import VoxelSize
from service.formats import sampling
from service.formats.sampling import Resolution

RESOLUTION = Resolution(((5, 1), (4, 1)), "")


UNITS = {
    1: ["µm", "μm", "um", "\\u00B5m", "Âµm", "micron", "Microns", "micrometer", "micrometres", " um\0"],
    1e-6: ["pm"],
    1e-4: ["Å"],
    1e-3: ["nm", "nanometers"],
    1e3: ["mm"],
    1e4: ["cm"],
    1e5: ["dm"],
    1e6: ["m", "meter"],
    1e9: ["km"],
    25400: ["in", "inch"],
    304800: ["ft"],
    25.4: ["thou"],
    25400 / 72: ["pt"],
}


@pytest.mark.parametrize(("micrometers", "unit"), [(length, unit) for length, units in UNITS.items() for unit in units])
def test_units_of_length(unit: str, micrometers: float) -> None:
    assert sampling.get_micrometers_per_unit(unit) == pytest.approx(micrometers, rel=1e-12)


@pytest.mark.parametrize("unit", ["pixel", "pixels", "reference frame", "", "s", "furlong", "µ", "2 um"])
def test_other_units_are_unknown(unit: str) -> None:
    assert sampling.get_micrometers_per_unit(unit) is None


@pytest.mark.parametrize("value", [0, -1, "nan", "inf", float("nan"), "abc", None, [], 10**400, 1e-30, 1e30, "1e999"])
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
        ({"spacing": 500, "unit": "um", "yunit": "mm", "zunit": "nm"}, VoxelSize(0.5, 250.0, 0.2)),
        ({"spacing": 2, "unit": "pixel"}, None),
        ({"spacing": 2, "unit": ""}, None),
        ({"spacing": 2, "unit": "sec"}, None),
    ],
)
def test_imagej_unit_may_differ_per_axis(metadata: dict[str, Any], size: VoxelSize | None) -> None:
    calibration = sampling.parse_imagej_calibration(metadata, RESOLUTION, "ImageJ metadata")

    assert calibration.get_voxel_size() == size
    assert calibration.list_user_notes() == (() if size else (sampling.NO_VOXEL_SIZE_NOTE,))


@pytest.mark.parametrize("spacing", [0, -0.5, float("nan"), "x"])
def test_invalid_spacing_is_noted_and_other_edges_are_reported(spacing: object) -> None:
    calibration = sampling.parse_imagej_calibration({"spacing": spacing, "unit": "um"}, RESOLUTION, "ImageJ metadata")

    assert calibration.get_voxel_size() is None
    assert "along z" in calibration.notes[0]
    assert "y 0.25 um, x 0.2 um" in calibration.list_user_notes()[-1]
    assert "voxel_size=" in calibration.list_user_notes()[-1]


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
        ((28, 1), "cm", None),
        ((1, 1), "", None),
        ((0, 1), "cm", None),
    ],
)
def test_resolution_tags_are_used_only_if_plausible_for_a_microscope(
    ratio: tuple[int, int], unit: str, pixel: float | None
) -> None:
    calibration = Resolution((ratio, ratio), unit).get_calibration()

    assert calibration.x == pixel
    assert calibration.get_voxel_size() is None


def test_lengths_in_vendor_headers() -> None:
    calibration = sampling.parse_calibration((1e-6, 2e-7, 3e-7), "m", "LSM header").get_voxel_size()

    assert calibration is not None
    assert tuple(calibration) == pytest.approx((1, 0.2, 0.3))
    assert sampling.parse_calibration((None, None, None), "m", "LSM header").get_voxel_size() is None
