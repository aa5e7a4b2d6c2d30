"""The parts and forms of a job's result: the labels as TIFF, .npy or NIfTI, the table, and the labels as a volume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import ZipFile

from service.core.errors import BadParameter
from service.core.volume import Selection, Volume
from service.formats import array_writer
from service.formats.sandbox import Reader, descriptor_path
from service.formats.sandbox_process import Cancelling, never
from service.serving.job_record import AnswerMetadata
from service.serving.results import LABELS, MEASUREMENTS, MEDIA_TYPES

ARCHIVE, TABLE, TIFF = MEDIA_TYPES["zip"], MEDIA_TYPES["csv"], MEDIA_TYPES[None]


class _Form(NamedTuple):
    suffix: str
    write: Callable[[Volume, Path], None]


# Forms of the labels beside the TIFF that is kept, by media type.
FORMS = {
    "application/x-npy": _Form(".npy", array_writer.write_npy),
    "application/x-nifti": _Form(".nii.gz", array_writer.write_nifti),
    "application/gzip": _Form(".nii.gz", array_writer.write_nifti),
}


def choose_media_type(accepted: str, metadata: AnswerMetadata) -> str:
    """Return the first media type of an Accept header that the result can be had as, else the one that is kept."""
    # Other forms have neither time nor channels.
    formed = (
        metadata.media_type in {ARCHIVE, TIFF} and metadata.time_points is None and metadata.kind != "probabilities"
    )
    inside = (TIFF, TABLE) if metadata.media_type == ARCHIVE else ()
    for part in accepted.split(","):
        wanted = part.partition(";")[0].strip().lower()
        if wanted == metadata.media_type or wanted in inside or (formed and wanted in FORMS):
            return wanted
    return metadata.media_type


def extract(
    reader: Reader, file: BinaryIO, metadata: AnswerMetadata, media_type: str, folder: Path
) -> tuple[Path, AnswerMetadata]:
    """Write the result, or a part of it, in another form into an empty folder, and describe it.

    `media_type` is one of `choose_media_type` other than that of the result. Raises what `Reader.read` raises.
    """
    stem = metadata.file_name.removesuffix("_labels.zip").removesuffix(".ome.tif")
    path = folder / "part"
    if media_type in {TIFF, TABLE}:
        name = MEASUREMENTS if media_type == TABLE else LABELS
        _copy_member(file, name, path)
        return path, replace(metadata, media_type=media_type, file_name=f"{stem}_{name}")
    form = FORMS[media_type]
    form.write(read_labels(reader, file, metadata, folder), path)
    stem = stem if metadata.media_type == TIFF else f"{stem}_labels"
    return path, replace(metadata, media_type=media_type, file_name=stem + form.suffix)


def read_labels(
    reader: Reader, file: BinaryIO, metadata: AnswerMetadata, folder: Path, cancelled: Cancelling = never
) -> Volume:
    """Read the labels of a result. Raises BadParameter for a table alone or a series, and what `Reader.read` raises."""
    if metadata.time_points is not None:
        raise BadParameter("The result of this job has several time points: it can be had as one TIFF alone.")
    read = partial(reader.read, selection=Selection(), scratch=folder, cancelled=cancelled)
    if metadata.media_type == TIFF:
        return read(descriptor_path(file.fileno()))
    if metadata.media_type != ARCHIVE:
        raise BadParameter("The result of this job has no labels: it was asked for a table alone, or saved elsewhere.")
    labels = folder / LABELS
    _copy_member(file, LABELS, labels)
    return read(labels)


def _copy_member(file: BinaryIO, name: str, path: Path) -> None:
    with ZipFile(file) as archive, archive.open(name) as member, path.open("wb") as output:
        shutil.copyfileobj(member, output, 2**20)
