"""Filters that select objects of a stored result by the columns of its table, without a new segmentation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from service.core.buffers import allocate_on_disk
from service.core.errors import BadParameter
from service.core.files.zip_archive import add_file
from service.core.quantities import TimeRange, parse_float, parse_time
from service.core.types import Array, Segmentation, Selection, Volume
from service.formats.sandbox.reader import Reader
from service.formats.tiff import writer as tiff_writer
from service.serving.results.answers import LABELS_FILE, MEASUREMENTS_FILE, WARNING_FILE
from service.serving.results.conversion import LABEL_FORMATS, copy_member, name_part
from service.serving.results.media_types import ARCHIVE_TYPE, TABLE_TYPE, TIFF_TYPE
from service.serving.results.metadata import ResultMetadata

PARAMETER = "filter"
# Maximum number of limits in one request.
MAX_LIMITS = 32
_BOOLEANS = {"True": "1", "False": "0"}


class ColumnLimit(NamedTuple):
    """Range of the values of a column. Both ends are included."""

    column: str
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a limit such as `confidence:0.8:`. Raises BadParameter."""
        try:
            column, low, high = text.split(":")
            limit = cls(column, parse_float(low) if low else -math.inf, parse_float(high) if high else math.inf)
        except ValueError:
            limit = cls("", math.nan, math.nan)
        if not limit.column or not limit.low <= limit.high:
            raise BadParameter.for_parameter(
                PARAMETER,
                f"expected a column of the table with its lowest and highest value, such as confidence:0.8: or"
                f" area:10:500, not {text!r}.",
            )
        return limit

    def __str__(self) -> str:
        low, high = (f"{end!r}".removesuffix(".0") if math.isfinite(end) else "" for end in (self.low, self.high))
        return f"{self.column}:{low}:{high}"


@dataclass(frozen=True)
class ObjectFilter:
    """The limits that the objects of a result must satisfy. An object without a value in a column is not removed."""

    limits: tuple[ColumnLimit, ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self | None:
        """Parse the values of the parameter `filter`; None if there are none. Raises BadParameter."""
        if len(texts) > MAX_LIMITS:
            raise BadParameter.for_parameter(PARAMETER, f"at most {MAX_LIMITS} limits are allowed, not {len(texts)}.")
        return cls(tuple(map(ColumnLimit.parse, texts))) if texts else None

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))


class _ObjectTable(NamedTuple):
    """The table of a result: the names of its columns, and one line of comma-separated values per object."""

    names: list[str]
    lines: list[str]

    @classmethod
    def read(cls, file: BinaryIO, metadata: ResultMetadata) -> Self:
        """Read the table of a result. Raises BadParameter if the result has none."""
        if metadata.media_type == ARCHIVE_TYPE:
            with ZipFile(file) as archive:
                content = archive.read(MEASUREMENTS_FILE)
        elif metadata.media_type == TABLE_TYPE:
            content = file.read()
        else:
            raise BadParameter.for_parameter(
                PARAMETER,
                "this result has no table of objects, which filters refer to. Segment the stack with measurements=zip.",
            )
        header, *lines = content.decode().splitlines()
        return cls(header.split(","), lines)

    def get_column(self, name: str) -> NDArray[np.float64]:
        """Return the values of a column, 1 for True and 0 for False. Raises BadParameter if the table lacks it."""
        columns = [column for column in self.names if column != "unit"]
        if name not in columns:
            raise BadParameter.for_parameter(
                PARAMETER, f"the table has no column {name!r} with numbers. Its columns are {', '.join(columns)}."
            )
        index = self.names.index(name)
        cells = (line.split(",", index + 1)[index] for line in self.lines)
        return np.array([float(_BOOLEANS.get(cell, cell)) for cell in cells])

    def select(self, object_filter: ObjectFilter) -> _ObjectTable:
        """Return the objects within all limits. Raises BadParameter if the table lacks a column."""
        mask = np.ones(len(self.lines), np.bool_)
        for column, low, high in object_filter.limits:
            values = self.get_column(column)
            mask &= ~((values < low) | (values > high))
        return self._replace(lines=[self.lines[index] for index in np.flatnonzero(mask)])

    def count_objects(self) -> int:
        """Return the number of objects. A tracked object counts once."""
        return len(np.unique(self.get_column("track_id"))) if "track_id" in self.names else len(self.lines)

    def write(self, path: Path) -> None:
        path.write_text("".join(f"{line}\n" for line in (",".join(self.names), *self.lines)), encoding="utf-8")


class FilteredResult(NamedTuple):
    """A stored result, the media type in which a client gets it, and the filter of its objects."""

    file: BinaryIO
    metadata: ResultMetadata
    media_type: str
    object_filter: ObjectFilter


def convert_filtered_result(reader: Reader, result: FilteredResult, folder: Path) -> tuple[Path, ResultMetadata]:
    """Write the remaining objects of a result to an empty folder. Return the path and the new metadata.

    The labels of these objects do not change. The provenance of the labels contains the filter. The media type must
    come from `choose_media_type`. Raises BadParameter if the filter does not match the result, and the errors of
    `Reader.read`.
    """
    file, metadata, media_type, object_filter = result
    table = _ObjectTable.read(file, metadata).select(object_filter)
    # The confidence of the result is that of all objects.
    part = replace(name_part(metadata, media_type), objects=table.count_objects(), confidence=None)
    path = folder / "part"
    if media_type == TABLE_TYPE:
        table.write(path)
        return path, part
    segmentation, provenance = _read_objects(reader, file, metadata, table, folder)
    if media_type in LABEL_FORMATS:
        volume = Volume.from_array(segmentation.pixels[None], segmentation.voxel_size)
        LABEL_FORMATS[media_type].write(volume, path)
        return path, part
    provenance |= {"filter": f"{object_filter} ({part.objects} of {metadata.objects} objects)"}
    if media_type == TIFF_TYPE:
        tiff_writer.write(segmentation, path, provenance)
        return path, part
    tiff_writer.write(segmentation, folder / LABELS_FILE, provenance)
    table.write(folder / MEASUREMENTS_FILE)
    _pack_archive(file, path, (folder / LABELS_FILE, folder / MEASUREMENTS_FILE))
    return path, part


def _read_objects(
    reader: Reader, file: BinaryIO, metadata: ResultMetadata, table: _ObjectTable, folder: Path
) -> tuple[Segmentation, dict[str, str]]:
    """Return the labels of the objects in a table, in a memory-mapped file, and the provenance of the labels."""
    stored_path = folder / "stored.ome.tif"
    copy_member(file, LABELS_FILE, stored_path)
    provenance = tiff_writer.read_provenance(stored_path)
    labels = table.get_column("label").astype(np.int64)
    if metadata.time_points is None:
        volume = reader.read(stored_path, Selection(), folder)
        pixels = allocate_on_disk(volume.shape[1:], volume.dtype, folder)
        _copy_objects(volume, labels, pixels)
        return Segmentation(pixels, "labels", volume.voxel_size, metadata.objects), provenance
    times = table.get_column("time") - _get_first_time(provenance)
    description = reader.inspect(stored_path, Selection(time=0))
    pixels = allocate_on_disk((metadata.time_points[0], *description.shape[1:]), description.dtype, folder)
    for index, time_point in enumerate(pixels):
        _copy_objects(reader.read(stored_path, Selection(time=index), folder), labels[times == index], time_point)
    segmentation = Segmentation(
        pixels, "labels", description.voxel_size, metadata.objects, time_interval=description.time_interval
    )
    return segmentation, provenance


def _copy_objects(volume: Volume, labels: NDArray[np.int64], destination: Array) -> None:
    """Copy the voxels of some objects from a volume of labels to an array of zeros [Z, Y, X]."""
    # Higher labels than those of the objects are mapped to the last entry, the background.
    new_labels = np.zeros(int(labels.max(initial=0)) + 2, volume.dtype)
    new_labels[labels] = labels
    for z, plane in enumerate(destination):
        plane[...] = new_labels.take(volume.read(z, z + 1)[0, 0], mode="clip")


def _get_first_time(provenance: Mapping[str, str]) -> int:
    """Return the first time point of a series, from the parameters of its request."""
    time = parse_time(str(json.loads(provenance.get("parameters", "{}")).get("time", "all")))
    return time.first if isinstance(time, TimeRange) else time


def _pack_archive(original: BinaryIO, path: Path, files: tuple[Path, ...]) -> None:
    """Write an archive with some files, and with the warning of the original archive if it has one."""
    with ZipFile(path, "w", ZIP_STORED) as archive, ZipFile(original) as original_archive:
        for file in files:
            add_file(archive, file, file.name)
        if WARNING_FILE in original_archive.namelist():
            archive.writestr(ZipInfo(WARNING_FILE), original_archive.read(WARNING_FILE))
