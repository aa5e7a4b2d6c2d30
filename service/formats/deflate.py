"""Compression of label planes to zlib streams in C++, in the caller's thread; the algorithm is in `deflate.cpp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.cpp_extension import FLAGS, CppExtension

SOURCE = Path(__file__).with_suffix(".cpp")

# Types of arguments and result, by the letters of `CppExtension`.
SIGNATURES = (("stackseg_deflate", "pqqqqpp", "-"),)

# Zlib's window is 32 KiB, and repetitions are looked for up to one line and one pixel back.
MAX_LINE_BYTES = 2**14


class Deflation(CppExtension):
    """Compressor of label planes, available once `prepare` has compiled it."""

    def __init__(self) -> None:
        super().__init__(SOURCE, FLAGS, SIGNATURES, "Small results are compressed several times as slowly")

    def compress(self, pixels: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """Compress unsigned planes [Z, Y, X] to zlib streams one after the other, and their ends, int64 [Z].

        Returns None before `prepare`, for other arrays, and for lines of more than `MAX_LINE_BYTES`.
        """
        if self._library is None or pixels.dtype.kind != "u" or pixels.ndim != 3 or not pixels.size:
            return None
        planes, rows, width = pixels.shape
        if width * pixels.itemsize > MAX_LINE_BYTES:
            return None
        pixels = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("="))
        # At most nine bits per byte, the frame of each stream, and eight bytes that are written ahead.
        streams = np.empty(planes * (pixels[0].nbytes * 9 // 8 + 24) + 8, np.uint8)
        ends = np.empty(planes, np.int64)
        self._functions.stackseg_deflate(
            *(pixels.ctypes.data, planes, rows, width, pixels.itemsize, streams.ctypes.data, ends.ctypes.data)
        )
        return streams[: ends[-1]], ends


deflation = Deflation()
"""Compressor of this process; the service prepares it at start."""
