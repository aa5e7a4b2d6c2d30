"""Name the format of a file that is not read by its first bytes, and the command that makes a TIFF of it."""

from __future__ import annotations

from typing import NamedTuple

# As many of a file's first bytes as `explain` looks at.
HEAD_BYTES = 4096

ACCEPTED = "Send a TIFF: ImageJ, OME-TIFF, BigTIFF or plain pages; or OME-Zarr in a zip archive"


class _Format(NamedTuple):
    """A format that is no TIFF.

    name    as its makers call it
    magic   alternatives: bytes, and where in the file they stand
    advice  how to make a TIFF of such a file
    """

    name: str
    magic: tuple[tuple[bytes, int], ...]
    advice: str


def _microscope(suffix: str, plugin: str | None = None) -> str:
    """Return the commands that convert a microscope's file."""
    text = f"Convert it with Bio-Formats: bfconvert -series 0 stack.{suffix} stack.ome.tif"
    if plugin is None:
        return f"{text}."
    install = f"pip install bioio bioio-ome-tiff {plugin}"
    return (
        f"{text}, or in Python: import bioio; bioio.BioImage('stack.{suffix}').save('stack.ome.tif'), after {install}."
    )


def _python(modules: str, pixels: str) -> str:
    """Return the Python line that converts a file whose pixels another library reads as [Z, Y, X]."""
    write = f"tifffile.imwrite('stack.tif', {pixels}, imagej=True, metadata={{'axes': 'ZYX'}})"
    return f"Convert it in Python: import {modules}, tifffile; {write}; and state voxel_size=Z,Y,X in micrometres."


def _unpack(command: str) -> str:
    return f"Unpack it first: {command}."


_PLANES = (
    "One such file holds one plane: open the planes in Fiji with File > Import > Image Sequence and save them as one"
    " TIFF, with the voxel size under Image > Properties."
)
_HDF5 = b"\x89HDF\r\n\x1a\n"

_FORMATS = (
    _Format("Zeiss CZI", ((b"ZISRAWFILE", 0),), _microscope("czi", "bioio-czi")),
    _Format("Nikon ND2", ((b"\xda\xce\xbe\x0a", 0),), _microscope("nd2", "bioio-nd2")),
    _Format("JPEG 2000 or an early Nikon ND2", ((b"jP  ", 4),), _microscope("nd2", "bioio-nd2")),
    _Format("Leica LIF", ((b"\x70\0\0\0", 0),), _microscope("lif", "bioio-lif")),
    _Format("Olympus OIR", ((b"OLYMPUSRAWFORMAT", 0),), _microscope("oir")),
    _Format("Olympus OIB or Zeiss ZVI", ((b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 0),), _microscope("oib")),
    _Format("DeltaVision", ((b"\xa0\xc0", 96), (b"\xc0\xa0", 96)), _microscope("dv", "bioio-dv")),
    _Format(
        "NIfTI",
        ((b"n+1\0", 344), (b"ni1\0", 344), (b"n+2\0", 4), (b"ni2\0", 4)),
        _python("nibabel", "nibabel.load('stack.nii').get_fdata(dtype='float32').T"),
    ),
    _Format("NRRD", ((b"NRRD", 0),), _python("nrrd", "nrrd.read('stack.nrrd')[0].T.astype('float32')")),
    _Format("MRC", ((b"MAP ", 208),), _python("mrcfile", "mrcfile.read('stack.mrc').astype('float32')")),
    _Format("NumPy", ((b"\x93NUMPY", 0),), _python("numpy", "numpy.load('stack.npy').astype('float32')")),
    _Format("DICOM", ((b"DICM", 128),), _microscope("dcm")),
    _Format("PNG", ((b"\x89PNG\r\n\x1a\n", 0),), _PLANES),
    _Format("JPEG", ((b"\xff\xd8\xff", 0),), _PLANES),
    _Format("gzip", ((b"\x1f\x8b", 0),), _unpack("gunzip stack.gz")),
    _Format("bzip2", ((b"BZh", 0),), _unpack("bunzip2 stack.bz2")),
    _Format("xz", ((b"\xfd7zXZ\0", 0),), _unpack("unxz stack.xz")),
    _Format("Zstandard", ((b"\x28\xb5\x2f\xfd", 0),), _unpack("unzstd stack.zst")),
    _Format("zip", ((b"PK\x03\x04", 0),), _unpack("unzip stacks.zip")),
    _Format("tar", ((b"ustar", 257),), _unpack("tar -xf stacks.tar")),
    _Format("HTML", ((b"<!DOCTYPE", 0), (b"<!doctype", 0), (b"<html", 0)), "It is a web page in place of the stack."),
)
_IMARIS = _Format("Imaris IMS", (), _microscope("ims", "bioio-bioformats"))
_OTHER_HDF5 = _Format("HDF5", (), _python("h5py", "h5py.File('stack.h5')['DATASET'][:].astype('float32')"))
_OME_XML = _Format("OME-XML", (), "It describes files that lie beside it: export the image as one OME-TIFF.")


def explain(head: bytes) -> str:
    """Return what a file is, by its first `HEAD_BYTES`, and what to do to have it segmented."""
    if not head:
        return f"The file is empty. {ACCEPTED}."
    found = _identify(head)
    if found is None:
        return f"The file begins with {head[:4]!r}, which no TIFF does. {ACCEPTED}."
    return f"Send a TIFF; this file is {found.name}. {found.advice}"


def _identify(head: bytes) -> _Format | None:
    if head.startswith(_HDF5):
        return _IMARIS if b"ImarisDataSet" in head else _OTHER_HDF5
    if head.lstrip().startswith((b"<?xml", b"<OME")) and b"<OME" in head:
        return _OME_XML
    for known in _FORMATS:
        if any(head.startswith(magic, position) for magic, position in known.magic):
            return known
    return None
