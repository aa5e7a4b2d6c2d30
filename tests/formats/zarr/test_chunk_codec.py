"""Refuse damaged chunks instead of decoding them to other pixels."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import numcodecs
import numpy as np
import pytest
from pixels import noise

from service.core.errors import BadFile
from service.formats.zarr.chunk_codec import ChunkCodec

PIXELS = np.repeat(noise(120), 2)
ENCODERS: dict[str, tuple[str | None, Callable[[Any], Any]]] = {
    "raw": (None, bytes),
    "zlib": ("zlib", zlib.compress),
    "gzip": ("gzip", gzip.compress),
    "bz2": ("bz2", bz2.compress),
    "zstd": ("zstd", numcodecs.Zstd().encode),
    "lz4": ("lz4", numcodecs.LZ4().encode),
    **{
        f"blosc with {name} at level {level}": ("blosc", numcodecs.Blosc(name, clevel=level).encode)
        for name in ("lz4", "zstd", "blosclz")
        for level in (0, 5)
    },
}


@pytest.mark.parametrize("name", ENCODERS)
def test_truncated_chunk_is_never_decoded_to_other_pixels(name: str) -> None:
    compressor, encode = ENCODERS[name]
    codec, encoded_chunk = ChunkCodec(PIXELS.dtype, (0,), compressor), bytes(encode(PIXELS.tobytes()))
    np.testing.assert_array_equal(codec.decode(encoded_chunk, PIXELS.shape), PIXELS)

    for length in range(len(encoded_chunk)):
        try:
            decoded = codec.decode(encoded_chunk[:length], PIXELS.shape)
        except BadFile:
            continue
        # The last bytes of some formats are only a checksum or an end mark.
        np.testing.assert_array_equal(decoded, PIXELS)
