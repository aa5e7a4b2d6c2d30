"""The compressions of a TIFF that are supported: those of imagecodecs, and padded strips, as libtiff writes them."""

from __future__ import annotations

import zlib
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, cast

import imagecodecs
from tifffile import COMPRESSION, TIFF, TiffPage

from service.core.errors import BadFile

# Compressions that change pixel values: JPEG and WebP.
_LOSSY_COMPRESSIONS = frozenset((6, 7, 33007, 34892, 34927, 50001))

_Codec = Callable[..., Any]
# Maximum number of bytes after the last row of a strip. Strips with more bytes are refused as damaged.
_MAX_PADDING_BYTES = 2**22


def check_compression(page: TiffPage) -> None:
    """Raise BadFile if the pixels of a page cannot be decompressed."""
    if page.compression != 1 and page.compression not in TIFF.DECOMPRESSORS:
        name = getattr(page.compression, "name", page.compression)
        raise BadFile(f"Compression {name} is not supported. Save the file uncompressed or with Deflate, LZW or Zstd.")


def check_lossless(page: TiffPage) -> None:
    """Raise BadFile if the compression of a page changes pixel values."""
    if page.compression in _LOSSY_COMPRESSIONS:
        name = getattr(page.compression, "name", page.compression)
        raise BadFile(
            f"The labels are compressed with {name}, which changes label numbers. Save the labels uncompressed or with"
            " Deflate, LZW or Zstd."
        )


def ignore_padding() -> None:
    """Make tifffile ignore bytes after the last row of strips with Deflate and PackBits, as it does with LZW."""
    codecs: dict[int, _Codec] = {
        COMPRESSION.ADOBE_DEFLATE: partial(_decode, "deflate_decode", _inflate),
        COMPRESSION.DEFLATE: partial(_decode, "deflate_decode", _inflate),
        COMPRESSION.PACKBITS: partial(_decode, "packbits_decode", imagecodecs.packbits_decode),
    }
    TIFF.DECOMPRESSORS = ChainMap(codecs, cast(MutableMapping[int, _Codec], TIFF.DECOMPRESSORS))


def _decode(codec_name: str, decode_all: _Codec, data: bytes, out: int) -> bytes:
    """Decode a strip of `out` bytes with a codec of imagecodecs. If it fails, use `decode_all` and remove padding."""
    try:
        return cast(bytes, getattr(imagecodecs, codec_name)(data, out=out))
    except RuntimeError:
        content = decode_all(data, out=out + _MAX_PADDING_BYTES)
        # Otherwise, the strip is damaged or truncated.
        if not out < len(content) < out + _MAX_PADDING_BYTES:
            raise
        return bytes(content[:out])


def _inflate(data: bytes, out: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, out)
    except zlib.error:
        return b""
