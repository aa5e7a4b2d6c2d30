"""The compressions of a TIFF that are supported: those of imagecodecs, and padded strips, as libtiff writes them."""

from __future__ import annotations

import struct
import zlib
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, cast

import imagecodecs
from tifffile import COMPRESSION, TIFF, TiffFrame, TiffPage

from service.core.errors import BadFile
from service.formats.tiff.planes.page_loader import get_keyframe

# Compressions that can change pixel values: JPEG, JPEG XR, LERC, WebP, Jetraw and JPEG XL.
_LOSSY_COMPRESSIONS = frozenset((6, 7, 22610, 33007, 34887, 34892, 34927, 34934, 48124, 50001, 50002, 52546))
# JPEG 2000, which is lossless if its header says so.
_JPEG_2000_COMPRESSIONS = frozenset((33003, 33004, 33005, 34712))
# Header of a JPEG 2000 codestream (ISO/IEC 15444-1, annex A): the size of the image, other segments, and the coding
# style with the wavelet transform, which is 1 if it is reversible.
_JPEG_2000_START = b"\xff\x4f\xff\x51"
_CODING_STYLE = 0xFF52
_REVERSIBLE_TRANSFORM = 1
_HEADER_BYTES = 4096

_Codec = Callable[..., Any]
# Maximum number of bytes after the last row of a strip. Strips with more bytes are refused as damaged.
_MAX_PADDING_BYTES = 2**22


def check_compression(page: TiffPage) -> None:
    """Raise BadFile if the pixels of a page cannot be decompressed."""
    if page.compression != 1 and page.compression not in TIFF.DECOMPRESSORS:
        name = getattr(page.compression, "name", page.compression)
        raise BadFile(f"Compression {name} is not supported. Save the file uncompressed or with Deflate, LZW or Zstd.")


def check_lossless(page: TiffPage | TiffFrame) -> None:
    """Raise BadFile if the compression of a page can change pixel values."""
    compression = get_keyframe(page).compression
    is_jpeg_2000 = compression in _JPEG_2000_COMPRESSIONS
    if compression in _LOSSY_COMPRESSIONS or (is_jpeg_2000 and not _is_reversible(_read_header(page))):
        raise make_lossy_error(str(getattr(compression, "name", compression)))


def make_lossy_error(compression: str) -> BadFile:
    """Return the error for labels with a compression that can change pixel values."""
    return BadFile(
        f"The labels are compressed with {compression}, which can change label numbers. Save the labels uncompressed or"
        " with Deflate, LZW or Zstd."
    )


def _read_header(page: TiffPage | TiffFrame) -> bytes:
    """Return the first bytes of the first strip or tile of a page."""
    stream = page.parent.filehandle
    stream.seek(next(iter(page.dataoffsets), 0))
    return stream.read(_HEADER_BYTES)


def _is_reversible(data: bytes) -> bool:
    """Return whether data of JPEG 2000 has a header that specifies a reversible wavelet transform."""
    position = data.find(_JPEG_2000_START) + 2
    while 2 <= position <= len(data) - 14:
        marker, length = struct.unpack_from(">HH", data, position)
        if marker == _CODING_STYLE:
            return data[position + 13] == _REVERSIBLE_TRANSFORM
        position += 2 + max(length, 2)
    return False


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
