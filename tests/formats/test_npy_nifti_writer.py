from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from service.core.quantities import VoxelSize
from service.core.types import Volume
from service.formats.npy_nifti_writer import write_nifti, write_npy

VOXEL_SIZE = VoxelSize(0.5, 0.25, 0.125)


def make_labels(dtype: str = "uint16", voxel_size: VoxelSize | None = VOXEL_SIZE) -> Volume:
    pixels = np.arange(20 * 3 * 4, dtype=dtype).reshape(1, 20, 3, 4)
    return Volume.from_array(pixels, voxel_size)


@pytest.mark.parametrize(("dtype", "code"), [("uint8", 2), ("uint16", 512), ("uint32", 768), ("float32", 16)])
def test_nifti_header_describes_the_pixels(tmp_path: Path, dtype: str, code: int) -> None:
    write_nifti(make_labels(dtype), tmp_path / "a.nii.gz")
    content = gzip.decompress((tmp_path / "a.nii.gz").read_bytes())
    assert struct.unpack_from("<i", content, 0) == (348,)
    assert struct.unpack_from("<4h", content, 40) == (3, 4, 3, 20)
    intent, datatype, bits = struct.unpack_from("<3h", content, 68)
    assert (intent, datatype, bits) == (1002 if dtype != "float32" else 0, code, 8 * np.dtype(dtype).itemsize)
    assert struct.unpack_from("<3f", content, 80) == (0.125, 0.25, 0.5)
    assert content[344:352] == b"n+1\0\0\0\0\0"
    assert np.array_equal(np.frombuffer(content[352:], dtype).reshape(20, 3, 4), make_labels(dtype).read_all()[0])


def test_nifti_orientation_is_not_mirrored_in_either_of_its_two_forms(tmp_path: Path) -> None:
    write_nifti(make_labels(), tmp_path / "a.nii.gz")
    content = gzip.decompress((tmp_path / "a.nii.gz").read_bytes())
    assert struct.unpack_from("<2h", content, 252) == (1, 1)
    # qfac, then the quaternion b, c, d and the offset: no rotation and no reflection.
    assert struct.unpack_from("<f", content, 76) == (1.0,)
    assert struct.unpack_from("<6f", content, 256) == (0.0,) * 6
    matrix = np.array(struct.unpack_from("<12f", content, 280)).reshape(3, 4)
    assert np.array_equal(matrix, np.hstack([np.diag([0.125, 0.25, 0.5]), np.zeros((3, 1))]))
    assert content[123] == 3


def test_nifti_without_a_voxel_size_has_no_unit(tmp_path: Path) -> None:
    write_nifti(make_labels(voxel_size=None), tmp_path / "a.nii.gz")
    content = gzip.decompress((tmp_path / "a.nii.gz").read_bytes())
    assert struct.unpack_from("<3f", content, 80) == (1, 1, 1)
    assert content[123] == 0


def test_npy_contains_the_first_channel(tmp_path: Path) -> None:
    pixels = np.arange(2 * 20 * 3 * 4, dtype=np.uint16).reshape(2, 20, 3, 4)
    write_npy(Volume.from_array(pixels), tmp_path / "a.npy")
    assert np.array_equal(np.load(tmp_path / "a.npy"), pixels[0])
