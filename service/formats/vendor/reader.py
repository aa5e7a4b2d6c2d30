"""Read files of microscope vendors: Zeiss CZI, Nikon ND2, Leica LIF, Olympus OIB and OIF, and Imaris IMS.

The libraries that read these formats belong to the extra `vendor`; CZI needs none of them. They are imported when the
first file of a format is opened, because some of them take longer to import than most files take to read.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import BinaryIO

from service.core.errors import UnsupportedMedia
from service.core.types import Selection
from service.formats.open_stack import OpenStack
from service.formats.tiff.unsupported_formats import FIJI_ADVICE
from service.formats.vendor import scene

EXTRA = "stackseg[vendor]"
# Number of bytes at the beginning of a file that are searched for a mark.
_HEAD_BYTES = 2**16


@dataclass(frozen=True)
class VendorFormat:
    """A file format of a microscope vendor.

    signature  first bytes of a file
    module     module of this package that reads the format
    mark       bytes near the beginning of a file, if files of other programs have the same signature
    """

    name: str
    signature: bytes
    module: str
    mark: bytes = b""


FORMATS = (
    VendorFormat("Zeiss CZI", b"ZISRAWFILE", "zeiss"),
    VendorFormat("Nikon ND2", b"\xda\xce\xbe\x0a", "nikon"),
    VendorFormat("Leica LIF", b"\x70\0\0\0", "leica"),
    VendorFormat("Olympus OIB", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "olympus"),
    VendorFormat("Olympus OIF", b"PK\x03\x04", "olympus", b".oif"),
    VendorFormat("Imaris IMS", b"\x89HDF\r\n\x1a\n", "imaris", b"ImarisDataSet"),
)


def find_format(stream: BinaryIO) -> VendorFormat | None:
    """Return the format of a file, or None for all other files. Rewind the stream."""
    head = stream.read(max(len(file_format.signature) for file_format in FORMATS))
    file_format = next((each for each in FORMATS if head.startswith(each.signature)), None)
    has_mark = file_format is None or not file_format.mark or file_format.mark in stream.read(_HEAD_BYTES)
    stream.seek(0)
    return file_format if has_mark else None


def open_stack(stream: BinaryIO, file_format: VendorFormat, selection: Selection, limit_bytes: int) -> OpenStack:
    """Open the selected scene of a file from a stream, which must stay open.

    Raises UnsupportedMedia if the libraries are not installed, BadFile, BadParameter, AmbiguousAxes, TooLarge.
    """
    try:
        module = importlib.import_module(f"service.formats.vendor.{file_format.module}")
    except ModuleNotFoundError as error:
        raise UnsupportedMedia(
            f"The file has the format {file_format.name}, which this installation cannot read. {FIJI_ADVICE} Or install"
            f" the libraries for this format where StackSeg runs: pip install '{EXTRA}'."
        ) from error
    with scene.translate_errors(file_format.name):
        return scene.open_scene(module.open_file(stream), selection, limit_bytes)
