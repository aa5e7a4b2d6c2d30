"""The files of an answer: the labels, a table of the objects, or both; and where they go."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

from pydantic import BaseModel

from service.core.errors import BadParameter, Cancelled, DoubtfulResult
from service.core.telemetry import Stages
from service.core.types import Segmentation, Volume
from service.formats.tiff import writer as tiff_writer
from service.inference import measurements
from service.serving.results.metadata import AnswerMetadata
from service.serving.results.provenance import describe_origin

if TYPE_CHECKING:
    from service.inference.types import Result, Table
    from service.serving.parameters import Query, SegmentationRequest
    from service.serving.storage.host_files import HostFiles

LABELS = "labels.ome.tif"
MEASUREMENTS = "measurements.csv"
WARNING = "warning.json"
ARCHIVE = "labels.zip"
RECEIPT = "saved.json"
# Folder in which a store is written.
IMAGE = "image.zarr"

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


class Answer(NamedTuple):
    """The file of an answer, or its content. `suffix` follows the stem of the input's name.

    seconds  by stage: measure, write, save
    """

    path: Path
    media_type: str
    suffix: str
    seconds: dict[str, float]
    content: bytes | None = None


def encode_small_answer(received: SegmentationRequest, result: Result) -> Answer | None:
    """Encode the labels in memory; None if they are large, not all of the answer, or go to the host."""
    if received.query.measurements is not None or received.query.output_to is not None:
        return None
    stages = Stages()
    with stages.measure("write"):
        content = tiff_writer.encode(result.segmentation, _origin(received, result))
    if content is None:
        return None
    return _label_answer(received.folder / LABELS, result.segmentation, stages, content)


def write_answer(
    host_files: HostFiles, received: SegmentationRequest, measured: Volume | None, result: Result
) -> Answer:
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


def _save(host_files: HostFiles, received: SegmentationRequest, answer: Answer, place: str) -> int:
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


def settle(host_files: HostFiles, received: SegmentationRequest) -> None:
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
            raise BadParameter.about(name, "it goes with an input that is a folder.")
    if query.output_to is None and query.overwrite is not None:
        raise BadParameter.about("overwrite", "it goes with output_to, which is not given.")
    is_zarr = query.output_to is not None and _is_zarr_output(host_files, query, query.output_to, caller)
    host_files.check(query.input, query.output_to, caller, overwrite=bool(query.overwrite), as_zarr=is_zarr)


def _is_zarr_output(host_files: HostFiles, query: Query, output: str, caller: str | None) -> bool:
    """Return whether labels are written as OME-Zarr. Raises BadParameter for a name that does not fit the result."""
    if query.measurements is None and host_files.is_zarr(output, caller):
        check_zarr_extra("output_to")
        return True
    suffixes = OUTPUT_SUFFIXES[MEDIA_TYPES[query.measurements]]
    if not output.lower().endswith(suffixes):
        # A mistake in `input` is reported first.
        host_files.check(query.input, None, caller)
        raise BadParameter.about("output_to", f"the name must end with {' or '.join(suffixes)}, after what is written.")
    return False


def _check_folder(query: Query) -> None:
    if query.output_to is None:
        raise BadParameter.about(
            "input", f"{query.input} is a folder; POST /jobs segments it, with output_to=, the folder for the results."
        )
    if query.measurements is not None:
        raise BadParameter.about(
            "measurements", "the table of a folder is objects.csv among its results; leave it out."
        )
    if query.format == "zarr":
        check_zarr_extra("format")


def check_zarr_extra(parameter: str) -> None:
    """Raise BadParameter where OME-Zarr cannot be written."""
    if find_spec("zarr") is None:
        raise BadParameter.about(parameter, "writing OME-Zarr needs the extra: pip install 'stackseg[zarr]'.")


def measure_objects(result: Result, measured: Volume | None) -> Table | None:
    """Measure the objects of a result in every channel of `measured`; those of a series are measured already.

    None if there are no labels, or nothing to measure them in.
    """
    if result.series is not None:
        return result.series.table
    if measured is None or result.segmentation.kind != "labels":
        return None
    return measurements.measure(result.segmentation, measured)


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


def _origin(received: SegmentationRequest, result: Result) -> dict[str, str]:
    return describe_origin(received.query, result, received.name, received.digest)


def _write_zarr(host_files: HostFiles, received: SegmentationRequest, result: Result, place: str) -> Answer:
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


def _write_files(received: SegmentationRequest, measured: Volume | None, result: Result) -> Answer:
    segmentation = result.segmentation
    folder, wanted, stages = received.folder, received.query.measurements, Stages()
    folder.mkdir(mode=0o700, exist_ok=True)
    labels, table = folder / LABELS, folder / MEASUREMENTS
    if wanted is not None:
        with stages.measure("measure"):
            rows = measure_objects(result, measured)
            assert rows is not None  # noqa: S101 - other outputs are refused
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
