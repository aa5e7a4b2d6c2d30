"""Write a segmentation in the format that the suffix of its file name selects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from service.core.files.whole_file import write_whole
from service.core.types import Segmentation, Volume
from service.formats import npy_nifti
from service.formats.tiff import writer as tiff_writer
from service.formats.zarr.store import find_image

TIFF_SUFFIXES = (".tif", ".tiff")
# Forms of labels of one time point.
ARRAY_WRITERS = {".npy": npy_nifti.write_npy, ".nii.gz": npy_nifti.write_nifti}


def is_tiff(path: Path) -> bool:
    """Return whether `write` writes a TIFF."""
    return path.name.lower().endswith(TIFF_SUFFIXES)


def is_zarr(path: Path) -> bool:
    """Return whether `write` writes OME-Zarr: a store of its own, or among the labels of an image."""
    return path.name.lower().endswith(".zarr") or find_image(path) is not None


def write(segmentation: Segmentation, path: Path, origin: Mapping[str, str]) -> None:
    """Write OME-TIFF, OME-Zarr, .npy or NIfTI, depending on the suffix of the name.

    origin  describes how the segmentation was made; .npy and NIfTI have no place for it

    Raises BadParameter for OME-Zarr without the extra `zarr`, and OSError.
    """
    if is_tiff(path):
        tiff_writer.write(segmentation, path, origin)
    elif is_zarr(path):
        from service.formats.zarr import writer as zarr_writer  # noqa: PLC0415 - it needs the extra `zarr`

        zarr_writer.write(segmentation, path, origin)
    else:
        (write_array,) = (write for suffix, write in ARRAY_WRITERS.items() if path.name.lower().endswith(suffix))
        with write_whole(path) as partial:
            write_array(Volume.from_array(segmentation.pixels[None], segmentation.voxel_size), partial)
