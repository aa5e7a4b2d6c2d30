"""Arrays as bytes: NumPy's .npy, and a compressed form between processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from isal import isal_zlib
from numpy.typing import DTypeLike

from service.core.types import Array, Volume

SLAB_PLANES = 16


def write_npy(volume: Volume, path: Path) -> None:
    """Write the first channel as .npy, [Z, Y, X] in C order, little-endian."""
    dtype = volume.dtype.newbyteorder("<")
    with path.open("wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": volume.shape[1:]}
        np.lib.format.write_array_header_1_0(file, header)
        for slab in read_slabs(volume):
            file.write(np.ascontiguousarray(slab, dtype).data)


def read_slabs(volume: Volume) -> Iterator[Array]:
    """Yield a few planes of the first channel at a time, [z, Y, X]."""
    for z in range(0, volume.shape[1], SLAB_PLANES):
        yield volume.read(z, min(z + SLAB_PLANES, volume.shape[1]))[0]


def pack(array: Array) -> bytes:
    """Compress an array of labels, quickly: to a few percent."""
    return isal_zlib.compress(np.ascontiguousarray(array).data, 1)


def unpack(data: bytes, shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Invert `pack`."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(isal_zlib.decompress(data, bufsize=max(nbytes, 1)), dtype).reshape(shape)
