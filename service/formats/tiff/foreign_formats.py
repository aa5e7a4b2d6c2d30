"""Recognize unsupported file formats by their first bytes, and suggest how to convert them to TIFF."""

from __future__ import annotations

from typing import NamedTuple

# Number of bytes at the beginning of a file that `explain` needs.
HEAD_BYTES = 4096

ACCEPTED = "Send a TIFF (ImageJ, OME-TIFF, BigTIFF or plain pages), or OME-Zarr in a zip archive"


class _Format(NamedTuple):
    """A file format that is not supported.

    name    as its vendor calls it
    magic   alternative signatures: bytes, and their position in the file
    advice  how to convert the file to TIFF
    """

    name: str
    magic: tuple[tuple[bytes, int], ...]
    advice: str


def _convert_with_bioformats(suffix: str, plugin: str | None = None) -> str:
    """Return the commands that convert a file of a microscope vendor."""
    text = f"Convert it with Bio-Formats: bfconvert -series 0 stack.{suffix} stack.ome.tif"
    if plugin is None:
        return f"{text}."
    install = f"pip install bioio bioio-ome-tiff {plugin}"
    return (
        f"{text}, or in Python after `{install}`: import bioio; bioio.BioImage('stack.{suffix}').save('stack.ome.tif')."
    )


def _convert_with_python(modules: str, pixels: str) -> str:
    """Return the Python code that converts a file whose pixels another library reads as [Z, Y, X]."""
    write = f"tifffile.imwrite('stack.tif', {pixels}, imagej=True, metadata={{'axes': 'ZYX'}})"
    return f"Convert it in Python: import {modules}, tifffile; {write}. Then set voxel_size=Z,Y,X in micrometers."


def _unpack_with(command: str) -> str:
    return f"Unpack it first: {command}."


_COMBINE_PLANES = (
    "Such a file contains a single plane. Open the planes in Fiji with File > Import > Image Sequence, set the voxel"
    " size under Image > Properties, and save them as one TIFF."
)
_HDF5 = b"\x89HDF\r\n\x1a\n"

_FORMATS = (
    _Format("Zeiss CZI", ((b"ZISRAWFILE", 0),), _convert_with_bioformats("czi", "bioio-czi")),
    _Format("Nikon ND2", ((b"\xda\xce\xbe\x0a", 0),), _convert_with_bioformats("nd2", "bioio-nd2")),
    _Format("JPEG 2000 or an early Nikon ND2", ((b"jP  ", 4),), _convert_with_bioformats("nd2", "bioio-nd2")),
    _Format("Leica LIF", ((b"\x70\0\0\0", 0),), _convert_with_bioformats("lif", "bioio-lif")),
    _Format("Olympus OIR", ((b"OLYMPUSRAWFORMAT", 0),), _convert_with_bioformats("oir")),
    _Format("Olympus OIB or Zeiss ZVI", ((b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 0),), _convert_with_bioformats("oib")),
    _Format("DeltaVision", ((b"\xa0\xc0", 96), (b"\xc0\xa0", 96)), _convert_with_bioformats("dv", "bioio-dv")),
    _Format(
        "NIfTI",
        ((b"n+1\0", 344), (b"ni1\0", 344), (b"n+2\0", 4), (b"ni2\0", 4)),
        _convert_with_python("nibabel", "nibabel.load('stack.nii').get_fdata(dtype='float32').T"),
    ),
    _Format("NRRD", ((b"NRRD", 0),), _convert_with_python("nrrd", "nrrd.read('stack.nrrd')[0].T.astype('float32')")),
    _Format("MRC", ((b"MAP ", 208),), _convert_with_python("mrcfile", "mrcfile.read('stack.mrc').astype('float32')")),
    _Format("NumPy", ((b"\x93NUMPY", 0),), _convert_with_python("numpy", "numpy.load('stack.npy').astype('float32')")),
    _Format("DICOM", ((b"DICM", 128),), _convert_with_bioformats("dcm")),
    _Format("PNG", ((b"\x89PNG\r\n\x1a\n", 0),), _COMBINE_PLANES),
    _Format("JPEG", ((b"\xff\xd8\xff", 0),), _COMBINE_PLANES),
    _Format("gzip", ((b"\x1f\x8b", 0),), _unpack_with("gunzip stack.gz")),
    _Format("bzip2", ((b"BZh", 0),), _unpack_with("bunzip2 stack.bz2")),
    _Format("xz", ((b"\xfd7zXZ\0", 0),), _unpack_with("unxz stack.xz")),
    _Format("Zstandard", ((b"\x28\xb5\x2f\xfd", 0),), _unpack_with("unzstd stack.zst")),
    _Format("zip", ((b"PK\x03\x04", 0),), _unpack_with("unzip stacks.zip")),
    _Format("tar", ((b"ustar", 257),), _unpack_with("tar -xf stacks.tar")),
    _Format(
        "HTML",
        ((b"<!DOCTYPE", 0), (b"<!doctype", 0), (b"<html", 0)),
        "It is a web page instead of the stack. Check the address that the file was downloaded from.",
    ),
)
_IMARIS = _Format("Imaris IMS", (), _convert_with_bioformats("ims", "bioio-bioformats"))
_OTHER_HDF5 = _Format("HDF5", (), _convert_with_python("h5py", "h5py.File('stack.h5')['DATASET'][:].astype('float32')"))
_OME_XML = _Format("OME-XML", (), "It describes the image files in its folder. Export the image as one OME-TIFF.")


def explain(head: bytes) -> str:
    """Return what kind of file begins with these `HEAD_BYTES` bytes, and how to convert it."""
    if not head:
        return f"The file is empty. {ACCEPTED}."
    found = _identify(head)
    if found is None:
        return f"The file is not a TIFF: it begins with {head[:4]!r}. {ACCEPTED}."
    return f"This file is {found.name}, which is not supported. {found.advice}"


def _identify(head: bytes) -> _Format | None:
    if head.startswith(_HDF5):
        return _IMARIS if b"ImarisDataSet" in head else _OTHER_HDF5
    if head.lstrip().startswith((b"<?xml", b"<OME")) and b"<OME" in head:
        return _OME_XML
    for known in _FORMATS:
        if any(head.startswith(magic, position) for magic, position in known.magic):
            return known
    return None
