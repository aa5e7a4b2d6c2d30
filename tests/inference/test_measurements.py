"""Measurements: comparison with scikit-image, and the additional columns."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from skimage.measure import regionprops_table

from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Objects, Segmentation, Volume
from service.inference import measurements
from service.inference.measurements import measure_objects, write_csv
from service.inference.types import Table

PROPERTIES = [
    "label",
    "num_pixels",
    "area",
    "equivalent_diameter_area",
    "centroid",
    "bbox",
    "intensity_mean",
    "intensity_max",
]


def measure_array(labels: NDArray[Any], image: NDArray[Any], voxel_size: VoxelSize | None = None) -> Table:
    """Measure labels in an image [C, Z, Y, X]."""
    return measure_objects(Segmentation(labels, "labels", voxel_size), Volume.from_array(image))


def test_the_table_has_the_confidence_of_each_object() -> None:
    labels = np.array([[[1, 0, 3, 3]]], np.uint16)
    objects = Objects(np.array([1, 1, 2]), np.array([0.6, 0.7, 0.9], np.float32), np.ones(3, np.float32))
    table = measure_objects(Segmentation(labels, "labels", objects=objects), Volume.from_array(np.zeros((1, 1, 1, 4))))
    assert table["confidence"].tolist() == table["mean_probability"].tolist() == pytest.approx([0.6, 0.9])
    calibrated = replace(objects, match_probability=np.array([0.1, 0.2, 0.3], np.float32))
    table = measure_objects(
        Segmentation(labels, "labels", objects=calibrated), Volume.from_array(np.zeros((1, 1, 1, 4)))
    )
    assert table["confidence"].tolist() == pytest.approx([0.1, 0.3])
    assert table["mean_probability"].tolist() == pytest.approx([0.6, 0.9])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_pixels_are_measured_without_warnings(dtype: type) -> None:
    image = np.array([[[[np.nan, 1, 2, 3]]]], dtype)
    table = measure_array(np.array([[[1, 1, 2, 2]]], np.uint16), image)
    assert np.isnan(table["intensity_max"]).tolist() == np.isnan(table["intensity_mean"]).tolist() == [True, False]


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(2, 12)),
    st.sampled_from([np.uint8, np.uint16, np.int16, np.float32]),
    st.integers(1, 3),
    st.sampled_from([None, VoxelSize(1, 1, 1), VoxelSize(0.5, 0.25, 0.2)]),
    st.sampled_from([1, 2**22]),
)
@settings(deadline=None, max_examples=40)
def test_columns_equal_those_of_scikit_image(seed, shape, dtype, channels, voxel_size, slab_voxels) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, shape).astype(np.uint16)
    labels[labels == 3] = 0
    image = rng.uniform(-100 if np.dtype(dtype).kind in "if" else 0, 200, (channels, *shape)).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "SLAB_VOXELS", slab_voxels)
        table = measure_array(labels, image, voxel_size)
    intensities = np.moveaxis(image, 0, -1) if channels > 1 else image[0]
    spacing = tuple(voxel_size or (1.0, 1.0, 1.0))
    expected = regionprops_table(labels, intensities, properties=PROPERTIES, spacing=spacing)
    assert table.keys() - expected.keys() == {"touching_border", "unit"}
    assert set(table["unit"]) <= {"voxel" if voxel_size is None else "um"}
    # A single plane has no faces along z.
    positions = ((np.argwhere(labels == number), shape) for number in table["label"])
    at_border = [
        ((coordinates == 0) | (coordinates == np.array(n) - 1))[:, np.array(n) > 1].any()
        for coordinates, n in positions
    ]
    assert table["touching_border"].tolist() == at_border
    for name, column in expected.items():
        np.testing.assert_allclose(table[name], column, rtol=2e-6, atol=1e-5, err_msg=name)


def test_sums_of_large_integers_stay_exact() -> None:
    labels = np.ones((2, 300, 300), np.uint16)
    image = np.full((1, 2, 300, 300), 65535, np.uint16)
    table = measure_array(labels, image)
    assert (table["intensity_mean"].item(), table["intensity_max"].item()) == (65535.0, 65535)
    assert table["intensity_max"].dtype == np.uint16


def test_csv_file_on_a_full_disk_is_reported_with_its_path() -> None:
    with pytest.raises(OSError, match="No space left") as error_info:
        write_csv({"label": np.arange(3)}, Path("/dev/full"))
    assert error_info.value.filename == "/dev/full"


def test_the_csv_file_contains_the_table(tmp_path: Path) -> None:
    empty_table = measure_array(np.zeros((2, 3, 4), np.uint16), np.zeros((1, 2, 3, 4), np.float32))
    write_csv(empty_table, tmp_path / "none.csv")
    assert (tmp_path / "none.csv").read_text() == ",".join(empty_table) + "\n"
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 70_000, (4, 40, 40)).astype(np.uint32)
    table = measure_array(labels, rng.normal(0, 1e6, (2, *labels.shape)), VoxelSize(1 / 3, 0.1, 0.1))
    assert len(table["label"]) > 5_000
    write_csv(table, tmp_path / "objects.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "objects.csv").read_text())))
    assert list(rows[0]) == list(table)
    for name in set(table) - {"unit", "touching_border"}:
        np.testing.assert_allclose([float(row[name]) for row in rows], table[name], rtol=1e-8)
    assert {row["touching_border"] for row in rows} <= {"True", "False"}


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        (Segmentation(np.zeros((2, 3, 4), np.uint8), "classes"), "classes"),
        (Segmentation(np.zeros((2, 3, 5), np.uint16), "labels"), r"\(2, 3, 5\)"),
    ],
)
def test_segmentations_that_cannot_be_measured_are_rejected(segmentation: Segmentation, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        measure_objects(segmentation, Volume.from_array(np.zeros((1, 2, 3, 4), np.uint8)))
