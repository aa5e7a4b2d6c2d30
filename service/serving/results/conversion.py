"""Conversion of the result of a job to other media types: labels as TIFF, .npy, NIfTI or .ozx, or a table as CSV."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from zipfile import ZipFile

from service.core.errors import BadParameter
from service.core.files.atomic_files import make_descriptor_path
from service.core.types import Segmentation, Selection, Volume
from service.formats import npy_nifti_writer
from service.serving.results.answers import LABELS_FILE, MEASUREMENTS_FILE, check_zarr_extra
from service.serving.results.media_types import (
    ARCHIVE_TYPE,
    GZIP_TYPE,
    NIFTI_TYPE,
    NPY_TYPE,
    OZX_TYPE,
    TABLE_TYPE,
    TIFF_TYPE,
)
from service.serving.results.metadata import ResultMetadata

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader


class _LabelFormat(NamedTuple):
    suffix: str
    write: Callable[[Volume, Path], None]


def _write_ozx(volume: Volume, path: Path) -> None:
    """Write labels as a zipped OME-Zarr. Raises BadParameter if the `zarr` extra is not installed."""
    check_zarr_extra("Accept")
    from service.formats.zarr import writer as zarr_writer  # noqa: PLC0415 - requires the `zarr` extra

    zarr_writer.write_archive(Segmentation(volume.read_all()[0], "labels", volume.voxel_size), path)


# Formats to which stored labels can be converted, by media type.
LABEL_FORMATS = {
    NPY_TYPE: _LabelFormat(".npy", npy_nifti_writer.write_npy),
    NIFTI_TYPE: _LabelFormat(".nii.gz", npy_nifti_writer.write_nifti),
    GZIP_TYPE: _LabelFormat(".nii.gz", npy_nifti_writer.write_nifti),
    OZX_TYPE: _LabelFormat(".ozx", _write_ozx),
}


def convert_result(
    reader: Reader, file: BinaryIO, metadata: ResultMetadata, media_type: str, folder: Path
) -> tuple[Path, ResultMetadata]:
    """Write all or part of a result in a different format to an empty folder. Return the path and the new metadata.

    `media_type` must come from `choose_media_type` and differ from the stored media type. Raises the errors of
    `Reader.read`.
    """
    path = folder / "part"
    if media_type in {TIFF_TYPE, TABLE_TYPE}:
        copy_member(file, MEASUREMENTS_FILE if media_type == TABLE_TYPE else LABELS_FILE, path)
    else:
        read_file = partial(reader.read, selection=Selection(), scratch=folder)
        LABEL_FORMATS[media_type].write(read_labels(read_file, file, metadata, folder), path)
    return path, name_part(metadata, media_type)


def name_part(metadata: ResultMetadata, media_type: str) -> ResultMetadata:
    """Return the metadata of a part of a result, or of the result in another format, with its media type and name."""
    if media_type == metadata.media_type:
        return metadata
    stem = metadata.file_name.removesuffix("_labels.zip").removesuffix(".ome.tif")
    if media_type in {TIFF_TYPE, TABLE_TYPE}:
        file_name = f"{stem}_{MEASUREMENTS_FILE if media_type == TABLE_TYPE else LABELS_FILE}"
    else:
        stem = stem if metadata.media_type == TIFF_TYPE else f"{stem}_labels"
        file_name = stem + LABEL_FORMATS[media_type].suffix
    return replace(metadata, media_type=media_type, file_name=file_name)


def read_labels(read_file: Callable[[Path], Volume], file: BinaryIO, metadata: ResultMetadata, folder: Path) -> Volume:
    """Read the labels of a result with `read_file`.

    Raises BadParameter if the result has no labels, and the errors of `read_file`.
    """
    if metadata.media_type == TIFF_TYPE:
        return read_file(make_descriptor_path(file.fileno()))
    if metadata.media_type != ARCHIVE_TYPE:
        raise BadParameter(
            "The result of this job contains no labels, because the request was for a table, or because the result was"
            " saved to a file on the host."
        )
    labels_path = folder / LABELS_FILE
    copy_member(file, LABELS_FILE, labels_path)
    return read_file(labels_path)


def copy_member(file: BinaryIO, name: str, path: Path) -> None:
    """Copy a file from the archive of a result."""
    with ZipFile(file) as archive, archive.open(name) as member, path.open("wb") as output:
        shutil.copyfileobj(member, output, 2**20)
