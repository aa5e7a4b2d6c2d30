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
import tifffile
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


def make_npz(array: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, array)
    return stream.getvalue()


FILES = {
    "JPEG 2000 or an early Nikon ND2": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(20), "File > Import > Bio-Formats"),
    "Olympus OIR": (b"OLYMPUSRAWFORMAT" + bytes(600), "bfconvert -series 0 stack.oir stack.ome.tif"),
    "Olympus OIF": ("[Acquisition Parameters Common]".encode("utf-16"), "in a zip archive"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(900), "h5py.File"),
    "NIfTI": (b"\x5c\1\0\0" + bytes(340) + b"n+1\0", "nibabel.load"),
    "PNG": (png_encode(PLANE), "Image Sequence"),
    "JPEG": (jpeg_encode(PLANE), "Image Sequence"),
    "GIF": (b"GIF89a" + bytes(20), "Image Sequence"),
    "MetaImage": (b"ObjectType = Image\nNDims = 3\n", "SimpleITK.ReadImage"),
    "MATLAB": (b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + bytes(100), "scipy.io.loadmat"),
    "MATLAB 7.3": (b"MATLAB 7.3 MAT-file, Platform: GLNXA64" + bytes(600), "h5py.File"),
    "ICS": (b"\t\nics_version\t1.0\n", "bfconvert -series 0 stack.ics"),
    "Olympus ETS": (b"SIS\0" + bytes(60), "Open the VSI file"),
    "Imspector OBF": (b"OMAS_BF_\n" + bytes(60), "stack.msr"),
    "AppleDouble": (b"\0\x05\x16\x07\0\x02\0\0Mac OS X", "without ._ before its name"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "NumPy archive": (make_npz(np.zeros((2, 3, 4))), "numpy.load('stack.npz')['arr_0']"),
    "ImageJ ROI": (make_zip("0001-0012-0034.roi", "stack.tif"), "label image"),
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


def test_single_roi_is_named_like_a_set_of_rois() -> None:
    assert unsupported_formats.describe_file(b"Iout\0\xe3") == unsupported_formats.describe_file(FILES["ImageJ ROI"][0])


def test_suggested_python_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stack = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    np.save("stack.npy", stack)
    np.savez("stack.npz", stack)
    for name in ("HDF5", "NIfTI", "MetaImage", "MATLAB", "MATLAB 7.3", "NumPy", "NumPy archive"):
        line = re.findall(r"in Python: (import .*?\))\. Then", unsupported_formats.describe_file(FILES[name][0]))[0]
        code = compile(line, name, "exec")
        if name.startswith("NumPy"):
            exec(code, {})
            assert np.array_equal(tifffile.imread("stack.tif"), stack)
            Path("stack.tif").unlink()
