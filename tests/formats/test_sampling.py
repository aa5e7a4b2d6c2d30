"""Units and voxel sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.quantities import VoxelSize
from service.formats import sampling
from service.formats.sampling import Resolution

PLAIN = Resolution(((5, 1), (4, 1)), "")


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


@pytest.mark.parametrize(("micrometres", "unit"), [(length, unit) for length, units in UNITS.items() for unit in units])
def test_units_of_length(unit: str, micrometres: float) -> None:
    assert sampling.micrometres(unit) == pytest.approx(micrometres, rel=1e-12)


@pytest.mark.parametrize("unit", ["pixel", "pixels", "reference frame", "", "s", "furlong", "µ", "2 um"])
def test_what_is_no_length_is_unknown(unit: str) -> None:
    assert sampling.micrometres(unit) is None


@pytest.mark.parametrize("value", [0, -1, "nan", "inf", float("nan"), "abc", None, [], 10**400, 1e-30, 1e30, "1e999"])
def test_what_cannot_be_a_size_is_unknown(value: object) -> None:
    assert sampling.length(value, "um") is None


@given(st.floats(1e-5, 1e6))
def test_sizes_in_micrometres_are_kept(size: float) -> None:
    assert sampling.length(repr(size), "µm") == size


@pytest.mark.parametrize(
    ("metadata", "size"),
    [
        # z is in the text, y and x are in the tags.
        ({"spacing": 0.5, "unit": "micron"}, VoxelSize(0.5, 0.25, 0.2)),
        ({"spacing": 500, "unit": "um", "yunit": "mm", "zunit": "nm"}, VoxelSize(0.5, 250.0, 0.2)),
        ({"spacing": 2, "unit": "pixel"}, None),
        ({"spacing": 2, "unit": ""}, None),
        ({"spacing": 2, "unit": "sec"}, None),
    ],
)
def test_imagej_may_have_a_unit_of_length_or_one_per_axis(metadata: dict[str, Any], size: VoxelSize | None) -> None:
    found = sampling.from_spacing(metadata, PLAIN, "ImageJ metadata")

    assert found.voxel_size() == size
    assert found.remarks() == (() if size else (sampling.NO_VOXEL_SIZE,))


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
