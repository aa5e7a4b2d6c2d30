"""The files of an answer: the labels, a table of the objects, or both; and where they go."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

from pydantic import BaseModel

from service.core.errors import BadParameter, Cancelled, DoubtfulResult
from service.core.quantities import TimeRange
from service.core.timing import Stages
from service.core.types import Description, Extent, Segmentation, Volume
from service.formats.sandbox.parent import Reader, Source
from service.formats.sandbox.process import Cancelling, never
from service.formats.tiff import writer as tiff_writer
from service.inference import measurements
from service.inference.series.time_points import Series
from service.inference.types import Result
from service.serving.parameters import Query
from service.serving.results.metadata import AnswerMetadata
from service.serving.results.provenance import describe_origin
from service.serving.storage.host_files import HostFiles

LABELS = "labels.ome.tif"
MEASUREMENTS = "measurements.csv"
WARNING = "warning.json"
ARCHIVE = "labels.zip"
RECEIPT = "saved.json"
# Folder in which a store is written.
IMAGE = "image.zarr"

# Of one voxel of a series, as far as objects are numbered by 16 bits.
_LABEL_BYTES = 2

TIFF_SUFFIX = re.compile(r"(\.ome)?\.tiff?$", re.IGNORECASE)
# What is cut off the name of a posted file.
_STACK_SUFFIX = re.compile(r"(\.ome)?\.(tiff?|ozx|zarr|zarr\.zip|zip)$", re.IGNORECASE)

# By the parameter `measurements`.
MEDIA_TYPES = {None: "image/tiff", "csv": "text/csv", "zip": "application/zip"}
# Allowed ends of the name of a result that is written on the host, by media type.
OUTPUT_SUFFIXES = {"image/tiff": (".tif", ".tiff", ".zarr"), "text/csv": (".csv",), "application/zip": (".zip",)}
ZARR = "application/vnd+zarr"


class Saved(BaseModel):
    """A file written on the service's host. `output` is the `output_to` of the request."""

    output: str
    media_type: str
    bytes: int
    model: str
    objects: int | None


class ReceivedRequest(NamedTuple):
    """A request whose file has arrived.

    source     the file, in `folder` unless the request names one of the host
    folder     the request's own folder
    cancelled  whether nobody wants the answer any more
    name       of the file for the record, "" where the result may answer a request with the same file of another name
    digest     of the file, None where it is not known
    """

    query: Query
    source: Path
    folder: Path
    caller: str | None = None
    cancelled: Cancelling = never
    name: str = ""
    digest: str | None = None


class Pixels(NamedTuple):
    """The volumes that are read from a file.

    segmented  the selected part, [C, Z, Y, X], or the time points of a series
    measured   the same part with all channels, if objects are measured; None for a series, which measures them itself
    """

    segmented: Volume | Series
    measured: Volume | None


class LargePixels(NamedTuple):
    """A file of which not much is decoded yet.

    segmented  the selected part
    nbytes     of all that is to be decoded
    """

    segmented: Extent
    nbytes: int


class Answer(NamedTuple):
    """The file of an answer, or its content. `suffix` follows the stem of the input's name.

    seconds  by stage: measure, write, save
    """

    path: Path
    media_type: str
    suffix: str
    seconds: dict[str, float]
    content: bytes | None = None


def read_pixels(  # noqa: PLR0913
    reader: Reader, query: Query, source: Source, folder: Path, cancelled: Cancelling, *, large: bool
) -> Pixels | LargePixels:
    """Read all that the query needs before anything is computed: later the file may be gone, or another one.

    Unless `large`, decode only what is small. Of several time points nothing is decoded before their turn: the source
    has to be there until the series is over. Raises what `Reader.read` raises.
    """
    shared = query.input is not None
    if isinstance(query.selection.time, TimeRange):
        return _read_series(reader, query, source, folder, cancelled, large=large)
    read: Callable[..., Volume | Description] = reader.read if large else reader.read_small
    read = partial(read, source, scratch=folder, shared=shared, cancelled=cancelled)
    segmented = measured = read(query.selection)
    if query.measurements is not None and query.selection.channel is not None:
        measured = read(replace(query.selection, channel=None))
    if isinstance(segmented, Volume) and isinstance(measured, Volume):
        return Pixels(segmented, measured)
    return LargePixels(segmented, measured.nbytes + (0 if measured is segmented else segmented.nbytes))


def _read_series(  # noqa: PLR0913
    reader: Reader, query: Query, source: Source, folder: Path, cancelled: Cancelling, *, large: bool
) -> Pixels | LargePixels:
    """Return the time points of a file that the query asks for, or what they take on disk unless `large`."""
    shared, selection = query.input is not None, query.selection
    description = reader.inspect(source, selection, shared=shared, cancelled=cancelled)
    every_channel = len(description.channels) if query.measurements is not None else 1
    read = partial(reader.read, source, scratch=folder, shared=shared, cancelled=cancelled)

    def read_point(time: int) -> tuple[Volume, Volume | None]:
        try:
            volume = measured = read(replace(selection, time=time))
            if query.measurements is not None and selection.channel is not None:
                measured = read(replace(selection, time=time, channel=None))
            return volume, None if query.measurements is None else measured
        finally:
            # Whoever gave up may have deleted the folder before this has made it again.
            if cancelled():
                shutil.rmtree(folder, ignore_errors=True)

    series = Series.of(description, read_point, query.link)
    if large:
        return Pixels(series, None)
    return LargePixels(series, description.nbytes * every_channel + _LABEL_BYTES * series.voxels)


def encode_small_answer(received: ReceivedRequest, result: Result) -> Answer | None:
    """Encode the labels in memory; None if they are large, not all of the answer, or go to the host."""
    if received.query.measurements is not None or received.query.output_to is not None:
        return None
    stages = Stages()
    with stages.measure("write"):
        content = tiff_writer.encode(result.segmentation, _origin(received, result))
    if content is None:
        return None
    return _label_answer(received.folder / LABELS, result.segmentation, stages, content)


def write_answer(host_files: HostFiles, received: ReceivedRequest, measured: Volume | None, result: Result) -> Answer:
    """Write the files that the query asks for into the request's folder, or where it says on the host.

    Objects are measured in every channel of `measured`, whichever was segmented. Raises Cancelled, and what
    `HostFiles.put` and writing raise.
    """
    place = received.query.output_to
    if place is None:
        return _write_files(received, measured, result)
    is_zarr = received.query.measurements is None and host_files.is_zarr(place, received.caller)
    answer = _write_zarr(host_files, received, result, place) if is_zarr else _write_files(received, measured, result)
    if received.cancelled():
        raise Cancelled("given up before its result was put in its place")
    stages = Stages()
    with stages.measure("save"):
        saved_bytes = _save(host_files, received, answer, place)
    receipt = Saved(
        output=place,
        media_type=answer.media_type,
        bytes=saved_bytes,
        model=result.model,
        objects=result.segmentation.count,
    )
    path = received.folder / RECEIPT
    path.write_text(receipt.model_dump_json(), encoding="utf-8")
    return Answer(path, "application/json", f"_{RECEIPT}", answer.seconds | stages.seconds)


def _save(host_files: HostFiles, received: ReceivedRequest, answer: Answer, place: str) -> int:
    """Put an answer in its place, delete it here, and return its bytes."""
    caller, ticket, overwrite = received.caller, received.folder.name, bool(received.query.overwrite)
    if answer.media_type != ZARR:
        host_files.put(answer.path, place, caller, ticket, overwrite=overwrite)
        size = answer.path.stat().st_size
        answer.path.unlink()
        return size
    host_files.put_zarr(answer.path, place, caller, ticket, overwrite=overwrite, cancelled=received.cancelled)
    size = sum(path.stat().st_size for path in answer.path.rglob("*") if path.is_file())
    shutil.rmtree(received.folder / IMAGE)
    return size


def settle(host_files: HostFiles, received: ReceivedRequest) -> None:
    """Note that the answer of `write_answer` is on its way to the caller, or on record."""
    if received.query.output_to is not None:
        host_files.settle(received.query.output_to, received.caller, received.folder.name)


def check_host_files(host_files: HostFiles, query: Query, caller: str | None) -> None:
    """Raise BadParameter or OutputExists if the caller may not use the files that the query names on the host."""
    if query.input is not None and host_files.is_folder(query.input, caller):
        _check_folder(query)
        return
    for name in ("glob", "format"):
        if getattr(query, name) is not None:
            raise BadParameter(f"{name}: it goes with an input that is a folder.")
    if query.output_to is None and query.overwrite is not None:
        raise BadParameter("overwrite: it goes with output_to, which is not given.")
    is_zarr = False
    if query.output_to is not None:
        suffixes = OUTPUT_SUFFIXES[MEDIA_TYPES[query.measurements]]
        is_zarr = query.measurements is None and host_files.is_zarr(query.output_to, caller)
        if not is_zarr and not query.output_to.lower().endswith(suffixes):
            host_files.check(query.input, None, caller)
            raise BadParameter(f"output_to: the name must end with {' or '.join(suffixes)}, after what is written.")
        if is_zarr:
            check_zarr_extra("output_to")
    host_files.check(query.input, query.output_to, caller, overwrite=bool(query.overwrite), as_zarr=is_zarr)


def _check_folder(query: Query) -> None:
    if query.output_to is None:
        raise BadParameter(
            f"input: {query.input} is a folder; POST /jobs segments it, with output_to=, the folder for the results."
        )
    if query.measurements is not None:
        raise BadParameter("measurements: the table of a folder is objects.csv among its results; leave it out.")
    if query.format == "zarr":
        check_zarr_extra("format")


def check_zarr_extra(parameter: str) -> None:
    """Raise BadParameter where OME-Zarr cannot be written."""
    if find_spec("zarr") is None:
        raise BadParameter(f"{parameter}: writing OME-Zarr needs the extra: pip install 'stackseg[zarr]'.")


def describe_answer(name: str, answer: Answer, result: Result, seconds: Mapping[str, float]) -> AnswerMetadata:
    """Return the metadata of an answer; `name` is that of the posted file."""
    return AnswerMetadata(
        model=result.model,
        media_type=answer.media_type,
        file_name=answer_name(name, answer.suffix),
        kind=result.segmentation.kind,
        seconds=dict(seconds),
        notes=result.notes,
        objects=result.segmentation.count,
        voxel_size=result.segmentation.voxel_size,
        diameter=result.width,
        skipped=None if result.skipped is None else str(result.skipped),
        time_points=None if result.series is None else (result.series.points, result.series.total),
        confidence=result.confidence,
        doubt=describe_doubt(result),
    )


def describe_doubt(result: Result) -> dict[str, Any] | None:
    """Return why a result is not to be trusted, with the members of a problem document; None: it may be."""
    if result.doubt is None:
        return None
    confidence, detail, attempt = result.doubt
    return {
        "type": f"urn:stackseg:warning:{DoubtfulResult.slug}",
        "title": "Doubtful result",
        "detail": detail,
        "confidence": None if confidence is None else round(confidence, 3),
        "try": attempt,
    }


def fingerprint(caller: str | None, digest: str, spec: str, query: Query, execution: Mapping[str, Any]) -> str:
    """Hash all that decides about an answer: requests with equal fingerprints have equal answers.

    digest     of the bytes of the file
    spec       `ModelRegistry.spec_json` of the model
    execution  `Runtime.execution_settings` of the model
    Returns SHA-256 in hexadecimal.
    """
    parts = [caller, digest, spec, query.canonical, execution]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def answer_name(name: str, suffix: str) -> str:
    """Name an answer after its input: `embryo.ome.tif` -> `embryo_labels.ome.tif`."""
    return (_STACK_SUFFIX.sub("", name) or "stack") + suffix


def _origin(received: ReceivedRequest, result: Result) -> dict[str, str]:
    return describe_origin(received.query, result, received.name, received.digest)


def _write_zarr(host_files: HostFiles, received: ReceivedRequest, result: Result, place: str) -> Answer:
    """Write a store of OME-Zarr into the request's folder, as it will lie in its place."""
    from service.formats.zarr import writer as zarr_writer  # noqa: PLC0415 - it needs the extra `zarr`

    stages, image, name = Stages(), received.folder / IMAGE, place.rpartition("/")[2]
    shutil.rmtree(image, ignore_errors=True)
    image.mkdir(mode=0o700, parents=True)
    path, version = image / name, host_files.find_image(place, received.caller)
    if version is not None:
        # A group without an image, in place of the one whose labels these are.
        image.joinpath("zarr.json" if version == 3 else ".zgroup").write_text("{}", encoding="utf-8")
        path = image / "labels" / name
    with stages.measure("write"):
        zarr_writer.write(result.segmentation, path, _origin(received, result))
    return Answer(path, ZARR, "", stages.seconds)


def _write_files(received: ReceivedRequest, measured: Volume | None, result: Result) -> Answer:
    segmentation = result.segmentation
    folder, wanted, stages = received.folder, received.query.measurements, Stages()
    folder.mkdir(mode=0o700, exist_ok=True)
    labels, table = folder / LABELS, folder / MEASUREMENTS
    if wanted is not None:
        with stages.measure("measure"):
            rows = result.series.table if result.series else None
            if rows is None:
                assert measured is not None  # noqa: S101 - only a series has measured its objects already
                rows = measurements.measure(segmentation, measured)
            measurements.write_csv(rows, table)
    if wanted == "csv":
        return Answer(table, MEDIA_TYPES[wanted], f"_{MEASUREMENTS}", stages.seconds)
    with stages.measure("write"):
        tiff_writer.write(segmentation, labels, _origin(received, result))
        if wanted == "zip":
            doubt = folder / WARNING
            if result.doubt is not None:
                doubt.write_text(json.dumps(describe_doubt(result), indent=2) + "\n", encoding="utf-8")
            _pack(folder / ARCHIVE, (labels, table, *([doubt] if result.doubt is not None else [])))
    if wanted == "zip":
        return Answer(folder / ARCHIVE, MEDIA_TYPES[wanted], "_labels.zip", stages.seconds)
    return _label_answer(labels, segmentation, stages)


def _label_answer(path: Path, segmentation: Segmentation, stages: Stages, content: bytes | None = None) -> Answer:
    return Answer(path, MEDIA_TYPES[None], f"_{segmentation.kind}.ome.tif", stages.seconds, content)


def _pack(path: Path, files: tuple[Path, ...]) -> None:
    """Move files into an archive that does not compress: the large ones are compressed already."""
    with ZipFile(path, "w", ZIP_STORED) as archive:
        for file in files:
            archive.write(file, file.name)
            file.unlink()
