"""Decode the chunks of Zarr arrays, and parse their codecs and pixel types.

Specifications: https://zarr-specs.readthedocs.io, and numcodecs for the codecs that are common in microscopy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import google_crc32c
import imagecodecs
import numpy as np

from service.core.errors import BadFile
from service.core.types import Array

_SUPPORTED_DTYPE_KINDS = "buif"
CHECKSUM_BYTES = 4
# Decoders that write to `out` and fail if the data does not fit.
_DECODERS: Mapping[str, Callable[..., Any]] = {
    "blosc": imagecodecs.blosc_decode,
    "bz2": imagecodecs.bz2_decode,
    "gzip": imagecodecs.gzip_decode,
    "lz4": partial(imagecodecs.lz4_decode, header=True),
    "zlib": imagecodecs.zlib_decode,
    "zstd": imagecodecs.zstd_decode,
}
_NUMCODECS_PREFIX = "numcodecs."
# Size of the header of a Blosc chunk. Its last four bytes contain the size of the chunk, including the header.
_BLOSC_HEADER_BYTES = 16
CODEC_ADVICE = "Save the image again without compression, or with blosc, gzip, zlib, lz4, bz2 or zstd."


@dataclass(frozen=True)
class ChunkCodec:
    """Encoding of the pixels in a chunk.

    dtype         dtype of the pixels, in the byte order of the file
    order         order of the stored dimensions, slowest first
    compressor    name in `_DECODERS`, or None for raw bytes
    has_checksum  whether a CRC-32C follows the data
    """

    dtype: np.dtype[Any]
    order: tuple[int, ...]
    compressor: str | None = None
    has_checksum: bool = False

    def decode(self, encoded_chunk: bytes, shape: Sequence[int]) -> Array:
        """Decode the bytes of a chunk. Raises BadFile if they do not match the shape or the checksum."""
        payload = verify_checksum(encoded_chunk, "A chunk") if self.has_checksum else encoded_chunk
        nbytes = math.prod(shape) * self.dtype.itemsize
        content: Any = payload
        if self.compressor == "blosc":
            _check_blosc_size(payload)
        if self.compressor is not None:
            content = bytearray(nbytes)
            try:
                content = _DECODERS[self.compressor](payload, out=content)
            except (RuntimeError, ValueError, TypeError) as error:
                raise BadFile(f"A chunk of the Zarr array cannot be decoded: {str(error)[:160]}") from error
        if len(content) != nbytes:
            raise BadFile(f"A chunk of the Zarr array decodes to {len(content)} bytes instead of {nbytes}.")
        stored_pixels = np.frombuffer(content, self.dtype).reshape([shape[axis] for axis in self.order])
        return stored_pixels.transpose(np.argsort(self.order))


def _check_blosc_size(payload: bytes) -> None:
    """Raise BadFile if a Blosc chunk is shorter than its header says. The decoder would read beyond its end."""
    declared_bytes = int.from_bytes(payload[_BLOSC_HEADER_BYTES - 4 : _BLOSC_HEADER_BYTES], "little")
    if not _BLOSC_HEADER_BYTES <= declared_bytes <= len(payload):
        raise BadFile(
            f"A chunk of the Zarr array is truncated: it has {len(payload)} bytes, but declares {declared_bytes}. Copy"
            " or export the store again."
        )


def verify_checksum(data: bytes, subject: str) -> bytes:
    """Verify and remove the CRC-32C at the end of the data. Raises BadFile if it does not match."""
    content, expected_checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if google_crc32c.value(content).to_bytes(CHECKSUM_BYTES, "little") != expected_checksum:
        raise BadFile(
            f"{subject} of the Zarr array does not match its checksum (CRC-32C). Copy or export the store again."
        )
    return content


def parse_codecs(codecs: Any, data_type: Any, dimension_count: int) -> ChunkCodec:
    """Parse a chain of codecs: an optional transposition, `bytes`, and an optional compressor and checksum."""
    codec_names = [codec["name"] for codec in codecs]
    order, remaining_codecs = tuple(range(dimension_count)), list(codecs)
    if codec_names[0] == "transpose":
        order = tuple(int(axis) for axis in remaining_codecs.pop(0)["configuration"]["order"])
    is_little_endian = remaining_codecs[0].get("configuration", {}).get("endian", "little") == "little"
    # zarr-python registers the codecs of numcodecs under names such as numcodecs.zlib.
    remaining_names = [codec["name"].removeprefix(_NUMCODECS_PREFIX) for codec in remaining_codecs[1:]]
    has_checksum = remaining_names[-1:] == ["crc32c"]
    compressors = remaining_names[:-1] if has_checksum else remaining_names
    if remaining_codecs[0]["name"] != "bytes" or len(compressors) > 1:
        raise BadFile(
            f"The Zarr array uses the codecs {format_names(codecs, 'name')}, which are not supported. {CODEC_ADVICE}"
        )
    dtype = parse_dtype(data_type).newbyteorder("<" if is_little_endian else ">")
    return ChunkCodec(dtype, order, check_compressor(compressors[0]) if compressors else None, has_checksum)


def format_names(codecs: Any, key: str) -> str:
    return ", ".join(str(codec[key])[:40] for codec in codecs)


def check_compressor(name: str) -> str:
    if name not in _DECODERS:
        raise BadFile(f"The Zarr array uses the codec {str(name)[:40]!r}, which is not supported. {CODEC_ADVICE}")
    return name


def parse_dtype(name: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in _SUPPORTED_DTYPE_KINDS or dtype.itemsize > 8:
        raise BadFile(
            f"The pixel type {str(name)[:40]} is not supported. Save the image as 8-, 16- or 32-bit integers or floats."
        )
    return dtype
