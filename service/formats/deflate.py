"""Planes of labels as zlib streams, compressed in C++ by the thread of the caller; `deflation.cpp` says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.cpp_extension import FLAGS, CppExtension

SOURCE = Path(__file__).with_suffix(".cpp")

# What each function takes and gives, as `CppExtension` says.
SIGNATURES = (("stackseg_deflate", "pqqqqpp", "-"),)

# A repetition lies less than 32 KiB back: one pixel more than a line of so many bytes.
LONGEST_LINE = 2**14


class Deflation(CppExtension):
    """The compiled function, once `prepare` has made it; without a compiler there is none."""

    def __init__(self) -> None:
        super().__init__(SOURCE, FLAGS, SIGNATURES, "Small results are compressed several times as slowly")

    def compress(self, pixels: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """The streams of planes [Z, Y, X], one after the other, and where each of them ends, int64 [Z].

        None where that is not for it: without the function, for anything but planes of unsigned integers, and for
        planes with lines that are too long.
        """
        if self._library is None or pixels.dtype.kind != "u" or pixels.ndim != 3 or not pixels.size:
            return None
        planes, rows, width = pixels.shape
        if width * pixels.itemsize > LONGEST_LINE:
            return None
        pixels = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder("="))
        # Nine bits for every byte at most, what frames a stream, and what is written ahead.
        streams = np.empty(planes * (pixels[0].nbytes * 9 // 8 + 24) + 8, np.uint8)
        ends = np.empty(planes, np.int64)
        self._functions.stackseg_deflate(
            *(pixels.ctypes.data, planes, rows, width, pixels.itemsize, streams.ctypes.data, ends.ctypes.data)
        )
        return streams[: ends[-1]], ends


deflation = Deflation()
"""The one of this process; a service prepares it when it starts."""
