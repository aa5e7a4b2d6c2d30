"""Results of segmentations: their metadata, and labels that stay in memory or in a file."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import numpy as np
import tifffile
from numpy.typing import NDArray

from stackseg_client.errors import InvalidResponse
from stackseg_client.result_files import (
    MEDIA_TYPES,
    TIFF_MEDIA_TYPE,
    SavedFile,
    get_suffix,
    get_table_path,
    open_part,
)

Table = dict[str, NDArray[Any]]
VoxelSize = tuple[float, float, float]

_ZIP, _JSON = "application/zip", "application/json"
# Columns of tables that contain text, which may look like a number.
_TEXT_COLUMNS = frozenset({"stack", "group", "job", "model", "unit"})
# Maximum number of threads that decode labels.
MAX_THREADS = min(8, os.cpu_count() or 1)
_LABELS_FILE, _TABLE_FILE = "labels.ome.tif", "measurements.csv"


@dataclass(frozen=True)
class LowConfidence:
    """Why the labels may be wrong. `suggested` has the parameters to try: `client.segment(stack, **suggested)`."""

    detail: str
    suggested: dict[str, str]


# Equality of tables would be an array, so results are equal only if they are identical.
@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """The result of a segmentation.

    model           name and version of the model
    objects         number of objects, or of tracks with `link`; None for classes and probabilities
    voxel_size      Z, Y and X in micrometers; None if unknown
    diameter        object diameter, and whether it was specified or estimated; None if unknown
    confidence      confidence in the labels, 0 to 1; None if the model does not define it
    low_confidence  why confidence is low, and what to try; None if it is not low
    warnings        messages for the user, including `low_confidence.detail`
    table           measurements: one array per column, one row per object; None without `table=True`
    path            file in which the labels are saved; None if they are in memory
    saved           description of the file on the host of the server; None without `output_to`
    seconds         duration of each stage on the server, in seconds
    request_id      identifier of the request in the log of the server
    """

    model: str
    objects: int | None
    voxel_size: VoxelSize | None
    diameter: str | None
    confidence: float | None
    low_confidence: LowConfidence | None
    warnings: list[str]
    seconds: dict[str, float]
    request_id: str
    table: Table | None = None
    path: Path | None = None
    saved: dict[str, Any] | None = None
    _content: bytes = field(default=b"")
    _file: SavedFile | None = None

    def __repr__(self) -> str:
        where = f", path={str(self.path)!r}" if self.path is not None else ""
        warnings = f"{len(self.warnings)} warning{'s' if len(self.warnings) != 1 else ''}"
        return f"<Result of {self.model}: {self.objects} objects, {warnings}{where}>"

    @cached_property
    def labels(self) -> Any:
        """The labels [Z, Y, X] (uint16 or uint32), background 0; or the output that the request selected.

        Classes have the dtype uint8. Probabilities [C, Z, Y, X] have the dtype float32. Results with several time
        points have a first axis T. Labels in an `.npy` file are memory-mapped. Those in an `.ozx` file are a Zarr
        array, which decodes the blocks that are read. All others are decoded on the first access. Raises ValueError if
        the result has no labels that this client can read, or if its file has been changed, and ImportError for `.ozx`
        if the package zarr is missing.
        """
        if self._file is not None:
            return _open_labels(self._file.check())
        if not self._content:
            raise ValueError("The server saved this result on its own host: see `saved`.")
        return _decode_tiff(io.BytesIO(self._content))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001 - NumPy's protocol
        """Return the labels, for functions that accept arrays."""
        return np.array(self.labels, dtype, copy=copy)


class ResultReceiver:
    """Receives the response with a result. The file appears only when it is complete.

    headers  headers of the response
    save_to  file in which the labels are saved; None: the labels stay in memory

    Raises InvalidResponse if the response does not have the format of the file, or is damaged.
    """

    def __init__(self, headers: Mapping[str, str], save_to: Path | None) -> None:
        self._headers, self._save_to = headers, save_to
        self._media_type = headers.get("Content-Type", "").partition(";")[0].strip()
        expected = TIFF_MEDIA_TYPE if save_to is None else MEDIA_TYPES[get_suffix(save_to)]
        if self._media_type not in {expected, _JSON, _ZIP if expected == TIFF_MEDIA_TYPE else ""}:
            raise InvalidResponse(
                f"The server sent {self._media_type or 'a result without Content-Type'} instead of {expected}. If it is"
                " a StackSeg server: results with several time points, and probabilities, can be saved as .tif or .npy."
            )
        self._resources = ExitStack()
        self._file: BinaryIO = io.BytesIO()
        self._part: Path | None = None
        if save_to is not None and self._media_type != _JSON:
            self._part, self._file = open_part(save_to)
            self._resources.callback(self._part.unlink, missing_ok=True)
            self._resources.callback(self._file.close)

    def write(self, block: bytes) -> None:
        """Add a block of the response."""
        self._file.write(block)

    def finish(self) -> Result:
        """Return the result of a complete response. Blocks while files are written."""
        try:
            return self._finish()
        except (ValueError, KeyError, TypeError, BadZipFile) as error:
            raise InvalidResponse(f"The result is damaged, or not from a StackSeg server: {error}") from error

    def _finish(self) -> Result:
        content = self._file.getvalue() if isinstance(self._file, io.BytesIO) else b""
        self._file.close()
        metadata = _parse_headers(self._headers)
        if self._media_type == _JSON:
            return Result(**metadata, saved=self._parse_receipt(content))
        table = None
        if self._media_type == _ZIP:
            content, table_content = self._unpack(content)
            table = parse_table(table_content)
        saved_file = None
        if self._save_to is not None and self._part is not None:
            if self._save_to.suffix.lower() == ".npy":
                with self._replace_part() as path:
                    _decode_tiff(self._part, path)
            self._part.replace(self._save_to)
            saved_file = SavedFile.identify(self._save_to)
        return Result(**metadata, table=table, path=self._save_to, _content=content, _file=saved_file)

    def close(self) -> None:
        """Delete an incomplete file."""
        self._resources.close()

    def _parse_receipt(self, content: bytes) -> dict[str, Any]:
        """Return the description of a result that the server has saved on its own host."""
        receipt: dict[str, Any] = json.loads(content)
        output = receipt["output"]
        if self._save_to is not None:
            raise InvalidResponse(
                f"The server saved this result on its own host as {output}, so {self._save_to} was not written. Call"
                " this function without save_to."
            )
        return receipt

    @contextmanager
    def _replace_part(self) -> Iterator[Path]:
        """Yield the path of a new file, which replaces the part file at the end."""
        assert self._part is not None  # noqa: S101 - for type checkers
        path = self._part.with_name(f"{self._part.name}-new")
        self._resources.callback(path.unlink, missing_ok=True)
        yield path
        path.replace(self._part)

    def _unpack(self, content: bytes) -> tuple[bytes, bytes]:
        """Extract labels and table from an archive. Replace an archive on disk by the labels, and save the table."""
        if self._part is None or self._save_to is None:
            with ZipFile(io.BytesIO(content)) as archive:
                return archive.read(_LABELS_FILE), archive.read(_TABLE_FILE)
        with self._replace_part() as path, ZipFile(self._part) as archive:
            table_content = archive.read(_TABLE_FILE)
            with archive.open(_LABELS_FILE) as member, path.open("wb") as file:
                shutil.copyfileobj(member, file, 2**20)
        get_table_path(self._save_to).write_bytes(table_content)
        return b"", table_content


def _parse_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata of a result, as keyword arguments of `Result`."""
    low_confidence = _parse_warning(headers.get("X-StackSeg-Warning", "null"))
    notes = [low_confidence.detail] if low_confidence is not None else []
    if "X-StackSeg-Note" in headers:
        notes.append(headers["X-StackSeg-Note"])
    sizes = [float(size) for size in headers.get("X-StackSeg-Voxel-Size", "").split(",") if size]
    timing = re.findall(r"([\w-]+);dur=([\d.]+)", headers.get("Server-Timing", ""))
    return {
        "model": headers.get("X-StackSeg-Model", ""),
        "objects": int(headers["X-StackSeg-Objects"]) if "X-StackSeg-Objects" in headers else None,
        "voxel_size": (sizes[0], sizes[1], sizes[2]) if len(sizes) == 3 else None,
        "diameter": headers.get("X-StackSeg-Diameter"),
        "confidence": float(headers["X-StackSeg-Confidence"]) if "X-StackSeg-Confidence" in headers else None,
        "low_confidence": low_confidence,
        "warnings": notes,
        "seconds": {stage: float(milliseconds) / 1000 for stage, milliseconds in timing},
        "request_id": headers.get("X-Request-ID", ""),
    }


def _parse_warning(header: str) -> LowConfidence | None:
    warning = json.loads(header)
    if warning is None:
        return None
    suggested = re.findall(r"(\w+)=([^\s&;]+)", warning.get("try") or "")
    return LowConfidence(warning["detail"], dict(suggested))


def _decode_tiff(file: Path | BinaryIO, target: Path | None = None) -> NDArray[Any]:
    """Decode a result, in memory or into the `.npy` file `target`."""
    try:
        tiff = tifffile.TiffFile(file)
    except tifffile.TiffFileError as error:
        raise InvalidResponse(f"The labels are damaged, or not from a StackSeg server: {error}") from error
    with tiff:
        if not tiff.pages:
            raise InvalidResponse("The labels are damaged, or not from a StackSeg server: the TIFF has no pages.")
        series = tiff.series[0]
        # tifffile adds axes of length 1, and also removes those of the result when it squeezes.
        kept_axes = "CZYX" if series.name == "probabilities" else "ZYX"
        dimensions = zip(series.get_axes(squeeze=False), series.get_shape(squeeze=False), strict=True)
        shape = tuple(length for axis, length in dimensions if axis in kept_axes or length > 1)
        if target is None:
            decoded: NDArray[Any] = series.asarray(maxworkers=MAX_THREADS).reshape(shape)
            return decoded
        array = np.lib.format.open_memmap(target, "w+", series.dtype, shape)
        series.asarray(out=array.reshape(series.shape), maxworkers=MAX_THREADS)
        array.flush()
        return array


def _open_labels(path: Path) -> Any:
    suffix = get_suffix(path)
    if suffix == ".npy":
        return np.load(path, mmap_mode="r")
    if suffix == ".ozx":
        return _open_zarr(path)
    if suffix == ".nii.gz":
        raise ValueError(f"Read {path} with nibabel, or save the result as .tif, .npy or .ozx.")
    return _decode_tiff(path)


def _open_zarr(path: Path) -> Any:
    """Return the array at full resolution of an OME-Zarr in one file."""
    try:
        import zarr  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise ImportError(
            f"{path} is read with the package zarr: pip install zarr. Or save the result as .npy."
        ) from error
    return zarr.open_group(zarr.storage.ZipStore(path, mode="r"), mode="r")["0"]


def parse_table(content: bytes | bytearray) -> Table:
    """Return the columns of a CSV table."""
    header, *rows = csv.reader(io.StringIO(content.decode("utf-8")))
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return {
        name: np.array(column, np.str_) if name in _TEXT_COLUMNS else _parse_column(column)
        for name, column in zip(header, columns, strict=True)
    }


def _parse_column(values: tuple[str, ...]) -> NDArray[Any]:
    """Return the values of a column as integers, floats, booleans or strings. Missing values are NaN."""
    if values and set(values) <= {"True", "False"}:
        return np.array([value == "True" for value in values])
    for convert in (int, lambda text: float(text or "nan")):
        try:
            return np.array([convert(value) for value in values])
        except ValueError:
            continue
    return np.array(values)
