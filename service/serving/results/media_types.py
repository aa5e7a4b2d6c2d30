"""The parts and forms of a job's result: labels as TIFF, .npy, NIfTI or .ozx, the table, and labels as a volume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import ZipFile

from service.core.errors import BadParameter
from service.core.files.whole_file import descriptor_path
from service.core.types import Cancelling, Segmentation, Selection, Volume, never
from service.formats import npy_nifti
from service.formats.sandbox.reader import Reader
from service.serving.results.answers import LABELS, MEASUREMENTS, MEDIA_TYPES, check_zarr_extra
from service.serving.results.metadata import AnswerMetadata

ARCHIVE, TABLE, TIFF = MEDIA_TYPES["zip"], MEDIA_TYPES["csv"], MEDIA_TYPES[None]


class _Form(NamedTuple):
    suffix: str
    write: Callable[[Volume, Path], None]


def _write_ozx(volume: Volume, path: Path) -> None:
    """Write labels as OME-Zarr in an archive. Raises BadParameter without the extra `zarr`."""
    check_zarr_extra("Accept")
    from service.formats.zarr import writer as zarr_writer  # noqa: PLC0415 - it needs the extra

    zarr_writer.write_archive(Segmentation(volume.array()[0], "labels", volume.voxel_size), path)


# Forms of the labels beside the TIFF that is kept, by media type.
FORMS = {
    "application/x-npy": _Form(".npy", npy_nifti.write_npy),
    "application/x-nifti": _Form(".nii.gz", npy_nifti.write_nifti),
    "application/gzip": _Form(".nii.gz", npy_nifti.write_nifti),
    "application/x-ozx": _Form(".ozx", _write_ozx),
}


def choose_media_type(accepted: str, metadata: AnswerMetadata) -> str:
    """Return the media type that a result can be had as and that an Accept header prefers, else the one that is kept.

    Preferences are those of RFC 9110, section 12.5.1; among equal ones the first of the header is chosen.
    """
    offers = [metadata.media_type]
    if metadata.media_type == ARCHIVE:
        offers += [TIFF, TABLE]
    # Other forms have neither time nor channels.
    if metadata.media_type in {ARCHIVE, TIFF} and metadata.time_points is None and metadata.kind != "probabilities":
        offers += FORMS
    ranges = _parse_accept(accepted)
    chosen = max(offers, key=lambda offer: _rate(offer, ranges))
    return chosen if _rate(chosen, ranges) > _UNWANTED else metadata.media_type


_UNWANTED = (0.0, 0)


def _parse_accept(accepted: str) -> dict[str, tuple[float, int]]:
    """Return by media range its quality, 0 to 1, and the higher a number the earlier it is in the header."""
    ranges: dict[str, tuple[float, int]] = {}
    for place, part in enumerate(accepted.split(",")):
        media_range, *parameters = (word.strip().lower() for word in part.split(";"))
        stated = (word[2:] for word in parameters if word.startswith("q="))
        try:
            quality = float(next(stated, "1"))
        except ValueError:
            quality = 1.0
        ranges.setdefault(media_range, (quality, -place))
    return ranges


def _rate(offer: str, ranges: dict[str, tuple[float, int]]) -> tuple[float, int]:
    """Return how much a media type is wanted, by the most specific range that it is in."""
    kind = offer.partition("/")[0]
    found = next((ranges[name] for name in (offer, f"{kind}/*", "*/*") if name in ranges), _UNWANTED)
    return found if found[0] > 0 else _UNWANTED


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


def read_labels(  # noqa: PLR0913
    reader: Reader,
    file: BinaryIO,
    metadata: AnswerMetadata,
    folder: Path,
    *,
    time: int | None = None,
    cancelled: Cancelling = never,
) -> Volume:
    """Read the labels of a result, of a series those of one of its time points.

    Raises BadParameter for a table alone, and what `Reader.read` raises.
    """
    read = partial(reader.read, selection=Selection(time=time), scratch=folder, cancelled=cancelled)
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
