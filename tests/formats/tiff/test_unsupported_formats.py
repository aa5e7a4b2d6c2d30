"""Unsupported formats are recognized by their content, and the error explains how to convert them."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imagecodecs import jpeg_encode, png_encode

from service.core.errors import UnsupportedMedia
from service.formats.tiff import ifd, unsupported_formats

PLANE = np.zeros((8, 9), np.uint8)


def make_zip(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    return stream.getvalue()


def make_tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("stack.tif"))
    return stream.getvalue()


def make_npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


FILES = {
    "JPEG 2000 or an early Nikon ND2": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(20), "File > Import > Bio-Formats"),
    "Olympus OIR": (b"OLYMPUSRAWFORMAT" + bytes(600), "bfconvert -series 0 stack.oir stack.ome.tif"),
    "Olympus OIF": ("[Acquisition Parameters Common]".encode("utf-16"), "in a zip archive"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(900), "h5py.File"),
    "NIfTI": (b"\x5c\1\0\0" + bytes(340) + b"n+1\0", "nibabel.load"),
    "PNG": (png_encode(PLANE), "Image Sequence"),
    "JPEG": (jpeg_encode(PLANE), "Image Sequence"),
    "zip": (make_zip("stack.tif"), "unzip"),
    "gzip": (gzip.compress(b"II*\0", mtime=0), "gunzip"),
    "tar": (make_tar(), "tar -xf"),
    "NumPy": (make_npy(np.zeros((2, 3, 4))), "numpy.load"),
    "HTML": (b"<!DOCTYPE html><html>", "not a stack"),
    "OME-XML": (b"<?xml version='1.0'?>\n<OME xmlns='...'>", "one OME-TIFF"),
}


@pytest.mark.parametrize("name", FILES)
def test_error_names_the_format_and_explains_the_conversion(name: str) -> None:
    content, advice = FILES[name]
    with pytest.raises(
        UnsupportedMedia, match=re.escape(f"The file has the format {name}, which is not supported. ")
    ) as caught:
        ifd.scan(io.BytesIO(content))
    assert advice in str(caught.value)


@pytest.mark.parametrize("content", [b"not a TIFF", b"ZISRAWFOLD", b"\xda\xce\xbe\x0b"])
def test_error_for_unknown_and_damaged_files_names_the_supported_formats(content: bytes) -> None:
    with pytest.raises(UnsupportedMedia, match=r"damaged or has an unknown format: .*CZI, ND2, LIF, OIB or IMS file"):
        ifd.scan(io.BytesIO(content))


def test_suggested_python_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("stack.npy", np.arange(24, dtype=np.uint16).reshape(2, 3, 4))
    for name in ("HDF5", "NIfTI", "NumPy"):
        line = re.findall(r"in Python: (import .*?\))\. Then", unsupported_formats.describe_file(FILES[name][0]))[0]
        code = compile(line, name, "exec")
    exec(code, {})
    assert ifd.scan(io.BytesIO(Path("stack.tif").read_bytes())).offsets
