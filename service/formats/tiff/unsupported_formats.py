"""Recognize unsupported file formats by their first bytes, and suggest how to convert them to TIFF."""

from __future__ import annotations

from typing import NamedTuple

# Number of bytes at the beginning of a file that `describe_file` needs.
HEAD_BYTES = 4096

FIJI_ADVICE = "Open it in Fiji with File > Import > Bio-Formats, and save it with File > Save As > OME-TIFF."
ACCEPTED_FORMATS_ADVICE = (
    "Send a TIFF (ImageJ, OME-TIFF, BigTIFF or plain pages), OME-Zarr or OIF in a zip archive, or a CZI, ND2, LIF, OIB"
    " or IMS file"
)


class _Format(NamedTuple):
    """A file format that is not supported.

    name        the vendor's name of the format
    signatures  alternative signatures and their positions in the file
    advice      how to convert the file to TIFF
    """

    name: str
    signatures: tuple[tuple[bytes, int], ...]
    advice: str


def _make_bioformats_advice(suffix: str, plugin: str | None = None) -> str:
    """Return the ways to convert a file in the format of a microscope vendor."""
    advice = f"{FIJI_ADVICE} Or convert it with Bio-Formats: bfconvert -series 0 stack.{suffix} stack.ome.tif"
    if plugin is None:
        return f"{advice}."
    install_command = f"pip install bioio bioio-ome-tiff {plugin}"
    return (
        f"{advice}, or in Python after `{install_command}`: import bioio;"
        f" bioio.BioImage('stack.{suffix}').save('stack.ome.tif')."
    )


def _make_python_advice(module: str, read_expression: str) -> str:
    """Return Python code that converts a file to TIFF. `read_expression` evaluates to an array [Z, Y, X]."""
    write_call = f"tifffile.imwrite('stack.tif', {read_expression}, imagej=True, metadata={{'axes': 'ZYX'}})"
    return f"Convert it in Python: import {module}, tifffile; {write_call}. Then set voxel_size=Z,Y,X in micrometers."


def _make_unpacking_advice(command: str) -> str:
    return f"Unpack it first: {command}."


_COMBINE_PLANES_ADVICE = (
    "Files of this type contain a single plane. Open the planes in Fiji with File > Import > Image Sequence, set the"
    " voxel size under Image > Properties, and save them as one TIFF."
)
_MATLAB_EXPRESSION = "scipy.io.loadmat('stack.mat')['NAME'].transpose(2, 0, 1).astype('float32')"
_MATLAB_73_EXPRESSION = "h5py.File('stack.mat')['NAME'][:].transpose(0, 2, 1).astype('float32')"
# End of the first name in a zip archive, if it has up to 100 characters.
_MAX_FIRST_NAME_END = 130
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"

_ROIS = _Format(
    "ImageJ ROI",
    ((b"Iout", 0),),
    "It contains only outlines. Open the stack and the ROIs in Fiji, convert the ROIs to a label image, for example"
    " with BIOP's ROIs to Label Image, and send the labels as TIFF.",
)
_FORMATS = (
    _ROIS,
    _Format("JPEG 2000 or an early Nikon ND2", ((b"jP  ", 4),), _make_bioformats_advice("nd2", "bioio-nd2")),
    _Format("Olympus OIR", ((b"OLYMPUSRAWFORMAT", 0),), _make_bioformats_advice("oir")),
    _Format(
        "Olympus OIF",
        ((b"\xff\xfe[\0", 0),),
        "It only describes the image. Put it and its folder NAME.oif.files in a zip archive, and send the archive.",
    ),
    _Format("DeltaVision", ((b"\xa0\xc0", 96), (b"\xc0\xa0", 96)), _make_bioformats_advice("dv", "bioio-dv")),
    _Format(
        "NIfTI",
        ((b"n+1\0", 344), (b"ni1\0", 344), (b"n+2\0", 4), (b"ni2\0", 4)),
        _make_python_advice("nibabel", "nibabel.load('stack.nii').get_fdata(dtype='float32').T"),
    ),
    _Format("NRRD", ((b"NRRD", 0),), _make_python_advice("nrrd", "nrrd.read('stack.nrrd')[0].T.astype('float32')")),
    _Format("MRC", ((b"MAP ", 208),), _make_python_advice("mrcfile", "mrcfile.read('stack.mrc').astype('float32')")),
    _Format("NumPy", ((b"\x93NUMPY", 0),), _make_python_advice("numpy", "numpy.load('stack.npy').astype('float32')")),
    _Format("DICOM", ((b"DICM", 128),), _make_bioformats_advice("dcm")),
    _Format(
        "MetaImage",
        ((b"ObjectType", 0), (b"NDims", 0)),
        _make_python_advice(
            "SimpleITK", "SimpleITK.GetArrayFromImage(SimpleITK.ReadImage('stack.mha')).astype('float32')"
        ),
    ),
    _Format("MATLAB", ((b"MATLAB 5.0 MAT-file", 0),), _make_python_advice("scipy.io", _MATLAB_EXPRESSION)),
    _Format("MATLAB 7.3", ((b"MATLAB 7.3 MAT-file", 0),), _make_python_advice("h5py", _MATLAB_73_EXPRESSION)),
    _Format("ICS", ((b"ics_version", 2),), _make_bioformats_advice("ics")),
    _Format("Olympus ETS", ((b"SIS\0", 0),), f"Open the VSI file instead: {_make_bioformats_advice('vsi')}"),
    _Format("Imspector OBF", ((b"OMAS_BF_", 0),), _make_bioformats_advice("msr")),
    _Format("PNG", ((b"\x89PNG\r\n\x1a\n", 0),), _COMBINE_PLANES_ADVICE),
    _Format("JPEG", ((b"\xff\xd8\xff", 0),), _COMBINE_PLANES_ADVICE),
    _Format("GIF", ((b"GIF87a", 0), (b"GIF89a", 0)), _COMBINE_PLANES_ADVICE),
    _Format("gzip", ((b"\x1f\x8b", 0),), _make_unpacking_advice("gunzip stack.gz")),
    _Format("bzip2", ((b"BZh", 0),), _make_unpacking_advice("bunzip2 stack.bz2")),
    _Format("xz", ((b"\xfd7zXZ\0", 0),), _make_unpacking_advice("unxz stack.xz")),
    _Format("Zstandard", ((b"\x28\xb5\x2f\xfd", 0),), _make_unpacking_advice("unzstd stack.zst")),
    _Format("zip", ((b"PK\x03\x04", 0),), _make_unpacking_advice("unzip stacks.zip")),
    _Format("tar", ((b"ustar", 257),), _make_unpacking_advice("tar -xf stacks.tar")),
    _Format(
        "AppleDouble",
        ((b"\0\x05\x16\x07", 0),),
        "It contains only attributes that macOS stores next to the image. Send the file without ._ before its name.",
    ),
    _Format(
        "Git LFS pointer",
        ((b"version https://git-lfs.github.com", 0),),
        "It only refers to the image. Download the image with git lfs pull.",
    ),
    _Format(
        "HTML",
        ((b"<!DOCTYPE", 0), (b"<!doctype", 0), (b"<html", 0)),
        "It is a web page, not a stack. Check the URL from which the file was downloaded.",
    ),
)
_NUMPY_ARCHIVE = _Format(
    "NumPy archive", (), _make_python_advice("numpy", "numpy.load('stack.npz')['arr_0'].astype('float32')")
)
_OTHER_HDF5 = _Format("HDF5", (), _make_python_advice("h5py", "h5py.File('stack.h5')['DATASET'][:].astype('float32')"))
_OME_XML = _Format("OME-XML", (), "It describes the image files in its folder. Export the image as one OME-TIFF.")


def describe_file(head: bytes) -> str:
    """Return a message that names the format of a file and explains how to convert it to TIFF.

    `head` contains the first `HEAD_BYTES` bytes of the file.
    """
    if not head:
        return f"The file is empty. {ACCEPTED_FORMATS_ADVICE}."
    file_format = _identify_format(head)
    if file_format is None:
        return (
            "The file is damaged or has an unknown format: it does not begin like a TIFF or another supported file, but"
            f" with {head[:4]!r}. {ACCEPTED_FORMATS_ADVICE}."
        )
    return f"The file has the format {file_format.name}, which is not supported. {file_format.advice}"


def _identify_format(head: bytes) -> _Format | None:
    if head.startswith(_HDF5_SIGNATURE):
        return _OTHER_HDF5
    if head.lstrip().startswith((b"<?xml", b"<OME")) and b"<OME" in head:
        return _OME_XML
    if head.startswith(b"PK\x03\x04"):
        for suffix, archive in ((b".npy", _NUMPY_ARCHIVE), (b".roi", _ROIS)):
            if suffix in head[:_MAX_FIRST_NAME_END]:
                return archive
    for file_format in _FORMATS:
        if any(head.startswith(signature, position) for signature, position in file_format.signatures):
            return file_format
    return None
