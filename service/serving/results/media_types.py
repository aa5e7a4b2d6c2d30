"""Conversion of the result of a job to other media types: labels as TIFF, .npy, NIfTI or .ozx, or a table as CSV."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from zipfile import ZipFile

from service.core.errors import BadParameter
from service.core.files.atomic_files import make_descriptor_path
from service.core.types import Segmentation, Selection, Volume
from service.formats import npy_nifti
from service.serving.results.answers import LABELS_FILE, MEASUREMENTS_FILE, MEDIA_TYPES, check_zarr_extra
from service.serving.results.metadata import ResultMetadata

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader

ARCHIVE_TYPE = MEDIA_TYPES["zip"]
TABLE_TYPE = MEDIA_TYPES["csv"]
TIFF_TYPE = MEDIA_TYPES[None]
# Media type of the description of a result that was saved on the host.
RECEIPT_TYPE = "application/json"
MAX_QUOTED_CHARS = 200


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
    "application/x-npy": _LabelFormat(".npy", npy_nifti.write_npy),
    "application/x-nifti": _LabelFormat(".nii.gz", npy_nifti.write_nifti),
    "application/gzip": _LabelFormat(".nii.gz", npy_nifti.write_nifti),
    "application/x-ozx": _LabelFormat(".ozx", _write_ozx),
}


# Media ranges that accept any result, and those of errors, which clients often send by default.
_UNSPECIFIC_TYPES = frozenset(("", "*", "application/octet-stream"))
_ERROR_TYPES = frozenset(("application/json", "application/problem+json"))


def choose_media_type(accept_header: str, metadata: ResultMetadata) -> str:
    """Return the media type that is available for a result and preferred by an Accept header.

    Preferences follow RFC 9110, section 12.5.1. Among equal preferences, the first one in the header wins. If the
    header accepts none of the available media types, return the stored media type if the result is a receipt, or if
    the header contains an unspecific type, or types of errors and none of results. Otherwise, raise BadParameter.
    """
    available_types = _list_available_types(metadata)
    ranks = _parse_accept_header(accept_header)
    best_type = max(available_types, key=lambda media_type: _get_rank(media_type, ranks))
    if _get_rank(best_type, ranks) > _LOWEST_RANK:
        return best_type
    accepted_types = [name for name, (quality, _) in ranks.items() if quality > 0]
    names_result = not {ARCHIVE_TYPE, TABLE_TYPE, TIFF_TYPE, *LABEL_FORMATS}.isdisjoint(accepted_types)
    default_types = _UNSPECIFIC_TYPES if names_result else _UNSPECIFIC_TYPES | _ERROR_TYPES
    if metadata.media_type == RECEIPT_TYPE or not default_types.isdisjoint(accepted_types):
        return metadata.media_type
    raise _make_accept_error(accept_header, accepted_types, metadata, available_types)


def _list_available_types(metadata: ResultMetadata) -> list[str]:
    """Return the media types that a result has, or can be converted to."""
    available_types = [metadata.media_type]
    if metadata.media_type == ARCHIVE_TYPE:
        available_types += [TIFF_TYPE, TABLE_TYPE]
    # Files in the label formats have no time or channel axis.
    if (
        metadata.media_type in {ARCHIVE_TYPE, TIFF_TYPE}
        and metadata.time_points is None
        and metadata.kind != "probabilities"
    ):
        available_types += LABEL_FORMATS
    return available_types


def _make_accept_error(
    accept_header: str, accepted_types: Sequence[str], metadata: ResultMetadata, available_types: Sequence[str]
) -> BadParameter:
    """Return the error about an Accept header. It suggests a value of `measurements` that the header accepts."""
    message = (
        f"Accept: {accept_header[:MAX_QUOTED_CHARS]!r} accepts none of the formats of this result, which are"
        f" {', '.join(available_types)}."
    )
    values = {TABLE_TYPE: "csv", ARCHIVE_TYPE: "zip"}
    if metadata.media_type == TABLE_TYPE:
        # An archive contains both the labels and the table.
        label_formats = LABEL_FORMATS if metadata.time_points is None else ()
        values |= dict.fromkeys((TIFF_TYPE, *label_formats), "zip")
    value = next((values[name] for name in accepted_types if name in values), None)
    if value is None or metadata.kind != "labels":
        return BadParameter(f"{message} Accept one of these, or omit the header.")
    return BadParameter(
        f"{message} Segment the stack with measurements={value}, or accept one of these formats.",
        parameter="measurements",
        suggested={"measurements": value},
    )


_LOWEST_RANK = (0.0, 0)


def _parse_accept_header(accept_header: str) -> dict[str, tuple[float, int]]:
    """Return the rank of each media range: the quality from 0 to 1, and a number that is higher for earlier ranges."""
    ranks: dict[str, tuple[float, int]] = {}
    for position, element in enumerate(accept_header.split(",")):
        media_range, *parameters = (token.strip().lower() for token in element.split(";"))
        qualities = (token[2:] for token in parameters if token.startswith("q="))
        try:
            quality = float(next(qualities, "1"))
        except ValueError:
            quality = 1.0
        ranks.setdefault(media_range, (quality, -position))
    return ranks


def _get_rank(media_type: str, ranks: dict[str, tuple[float, int]]) -> tuple[float, int]:
    """Return the rank of the most specific media range that contains a media type."""
    main_type = media_type.partition("/")[0]
    rank = next((ranks[name] for name in (media_type, f"{main_type}/*", "*/*") if name in ranks), _LOWEST_RANK)
    return rank if rank[0] > 0 else _LOWEST_RANK


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
