"""Write .npy and NIfTI-1 files, and compress arrays of labels that processes exchange."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from isal import isal_zlib
from numpy.typing import DTypeLike

from service.core.errors import BadParameter
from service.core.types import Array, Volume

# Codes of the NIfTI-1 standard, https://nifti.nimh.nih.gov/pub/dist/src/niftilib/nifti1.h
_DATATYPES = {"u1": 2, "i2": 4, "i4": 8, "f4": 16, "f8": 64, "i1": 256, "u2": 512, "u4": 768}
_INTENT_LABEL = 1002
_MICROMETER_UNIT = 3
_HEADER_BYTES = 352
_MAX_AXIS_LENGTH = 2**15 - 1
_SCANNER_COORDINATES = 1
# zlib's `wbits` argument for the gzip format with the largest window.
_GZIP_WBITS = 31
PLANES_PER_SLAB = 16


def write_npy(volume: Volume, path: Path) -> None:
    """Write the first channel as a little-endian .npy array [Z, Y, X] in C order."""
    dtype = volume.dtype.newbyteorder("<")
    with path.open("wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": volume.shape[1:]}
        np.lib.format.write_array_header_1_0(file, header)
        for slab in _read_slabs(volume):
            file.write(np.ascontiguousarray(slab, dtype).data)


def write_nifti(volume: Volume, path: Path) -> None:
    """Write the first channel as NIfTI-1 (.nii.gz), with the voxel size in micrometers.

    Integer volumes are marked as labels. An unknown voxel size is written as 1 along each axis. Raises BadParameter if
    an axis has more than 32767 voxels.
    """
    # In NIfTI files, x varies fastest, as in a C-ordered array [Z, Y, X].
    compressor = isal_zlib.compressobj(1, isal_zlib.DEFLATED, _GZIP_WBITS)
    with path.open("wb") as file:
        file.write(compressor.compress(make_nifti_header(volume)))
        for slab in _read_slabs(volume):
            file.write(compressor.compress(np.ascontiguousarray(slab, volume.dtype.newbyteorder("<")).tobytes()))
        file.write(compressor.flush())


def make_nifti_header(volume: Volume) -> bytes:
    """Return the NIfTI-1 header of a volume's first channel, including the four bytes for "no extension".

    Raises BadParameter if an axis is too long for the format.
    """
    z, y, x = volume.shape[1:]
    if max(z, y, x) > _MAX_AXIS_LENGTH:
        raise BadParameter(
            f"NIfTI supports up to {_MAX_AXIS_LENGTH} voxels along an axis, but the result has {max(z, y, x)}."
            " Download the result as TIFF instead."
        )
    voxel_size = volume.voxel_size
    step_z, step_y, step_x = (1.0, 1.0, 1.0) if voxel_size is None else voxel_size
    header = bytearray(_HEADER_BYTES)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into("<8h", header, 40, 3, x, y, z, 1, 1, 1, 1)
    intent = _INTENT_LABEL if volume.dtype.kind in "ui" else 0
    struct.pack_into("<4h", header, 68, intent, _DATATYPES[volume.dtype.str[1:]], 8 * volume.dtype.itemsize, 0)
    struct.pack_into("<8f", header, 76, 1.0, step_x, step_y, step_z, 1.0, 1.0, 1.0, 1.0)
    struct.pack_into("<3f", header, 108, _HEADER_BYTES, 1.0, 0.0)
    header[123] = 0 if voxel_size is None else _MICROMETER_UNIT
    # Both orientations, as a quaternion without rotation and as a matrix, because some programs read only one of them.
    # x, y and z increase with the indices. Programs based on nibabel therefore show the pixels in the stored order.
    struct.pack_into("<2h", header, 252, _SCANNER_COORDINATES, _SCANNER_COORDINATES)
    for row, step in enumerate((step_x, step_y, step_z)):
        struct.pack_into("<f", header, 280 + 20 * row, step)
    header[344:348] = b"n+1\0"
    return bytes(header)


def _read_slabs(volume: Volume) -> Iterator[Array]:
    """Yield slabs [z, Y, X] of up to `PLANES_PER_SLAB` planes of the first channel."""
    for z in range(0, volume.shape[1], PLANES_PER_SLAB):
        yield volume.read(z, min(z + PLANES_PER_SLAB, volume.shape[1]))[0]


def compress_array(array: Array) -> bytes:
    """Compress an array of labels with the fastest compression level."""
    return isal_zlib.compress(np.ascontiguousarray(array).data, 1)


def decompress_array(compressed_pixels: bytes, shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Decompress the pixels of an array that was compressed with `compress_array`."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(isal_zlib.decompress(compressed_pixels, bufsize=max(nbytes, 1)), dtype).reshape(shape)
