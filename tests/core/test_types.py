"""Volumes, voxel sizes and label types."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import BadParameter
from service.core.quantities import Diameter, ObjectVolume, VoxelSize
from service.core.types import Volume, choose_label_dtype

PIXELS = np.arange(2 * 5 * 3 * 4, dtype=np.uint16).reshape(2, 5, 3, 4)

IMPLAUSIBLE_LENGTHS = st.one_of(st.floats(max_value=9e-6), st.floats(min_value=1.1e6), st.just(math.nan))


@pytest.mark.parametrize("text", ["6.5um", "6.5µm", " 6.5 \u03bcm", "6.5UM"])
def test_micrometers_have_several_spellings(text: str) -> None:
    assert str(Diameter.parse(text)) == "6.5um"
    assert ObjectVolume.parse(f"{text}3") == ObjectVolume(6.5, "um3")


@pytest.mark.parametrize("text", ["15px", "7,15.5,15px", "6.5um"])
def test_formatted_diameter_is_parsed_to_the_same_diameter(text: str) -> None:
    assert str(Diameter.parse(text)) == text


def test_units_are_accepted_as_they_are_displayed() -> None:
    for text in ("6.5 um", "6.5 \u00b5m", "6.5\u03bcm", " 6.5UM "):
        assert Diameter.parse(text) == Diameter((6.5,), "um")
    for text in ("12.5 um3", "12.5\u00b5m\u00b3", "12.5 \u03bcm3"):
        assert ObjectVolume.parse(text) == ObjectVolume(12.5, "um3")


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("15px", "15 px wide"),
        ("10.4,20.8,20.8px", "20.8 px wide and 10.4 px deep"),
        ("9,9,9px", "9 px wide"),
        ("2,3,4um", "3 x 4 um wide and 2 um deep"),
    ],
)
def test_diameter_is_described_by_width_and_depth(text: str, description: str) -> None:
    assert Diameter.parse(text).describe() == description


def test_diameter_is_converted_to_voxels() -> None:
    size = VoxelSize(2, 0.5, 0.25)
    assert Diameter((15,), "px").to_voxels(None) == Diameter((15, 15, 15), "px").to_voxels(size) == (15, 15, 15)
    assert Diameter((4, 3, 2), "um").to_voxels(size) == (2, 6, 8)
    assert Diameter((4,), "um").to_voxels(None) is None


def test_diameter_in_the_plane_also_applies_along_z() -> None:
    assert Diameter((4,), "um").to_voxels(VoxelSize(2, 0.5, 0.5)) == (2, 8, 8)
    assert Diameter((8,), "px").to_voxels(VoxelSize(2, 0.5, 0.5)) == (2, 8, 8)
    assert Diameter((8,), "px").to_voxels(VoxelSize(0.25, 0.5, 0.5)) == (16, 8, 8)
    # The anisotropy is limited, because such a voxel size is wrong or every plane shows different objects.
    assert Diameter((12,), "px").to_voxels(VoxelSize(100, 0.5, 0.5)) == (2, 12, 12)


@pytest.mark.parametrize("length", [0, -1, 1e-9, 1e9, math.nan, math.inf])
def test_implausible_diameter_is_rejected(length: float) -> None:
    with pytest.raises(BadParameter, match="between 1e-05 and 1e"):
        Diameter((5, length, 5), "px")


@given(IMPLAUSIBLE_LENGTHS, st.sampled_from("zyx"))
def test_implausible_voxel_size_is_rejected_with_its_axis(size: float, axis: str) -> None:
    with pytest.raises(BadParameter, match=rf"along {axis} must be between 1e-05 and 1e\+06 micrometers"):
        VoxelSize(**({"z": 1.0, "y": 1.0, "x": 1.0} | {axis: size}))


@given(st.integers(0, 5), st.integers(0, 5))
def test_slab_contains_the_planes_of_every_channel(z0: int, z1: int) -> None:
    slab = Volume.from_array(PIXELS).read(z0, z1)
    np.testing.assert_array_equal(slab, PIXELS[:, z0:z1])
    assert slab.dtype == PIXELS.dtype


def test_volume_size_is_known_without_reading_pixels() -> None:
    volume = Volume((2, 300, 4000, 5000), np.dtype(np.uint16), lambda _z0, _z1: pytest.fail("it was read"))
    assert volume.voxel_count == 300 * 4000 * 5000
    assert volume.nbytes == 2 * 300 * 4000 * 5000 * 2


def test_volume_from_array_shares_memory() -> None:
    volume = Volume.from_array(PIXELS, VoxelSize(2.0, 0.5, 0.5), ("nuclei", "membranes"))
    assert volume.shape == PIXELS.shape
    assert volume.channels == ("nuclei", "membranes")
    assert np.shares_memory(volume.read_all(), PIXELS)
    assert Volume.from_array(PIXELS).channels == ("", "")


@pytest.mark.parametrize(("count", "expected"), [(0, np.uint16), (65_535, np.uint16), (65_536, np.uint32)])
def test_label_dtype_changes_at_65536_labels(count: int, expected: type[np.unsignedinteger]) -> None:
    assert choose_label_dtype(count) == expected
