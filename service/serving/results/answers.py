"""The result files of a request: labels, a table of the objects, or both. The files are sent, or saved on the host."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

from pydantic import BaseModel

from service.core.errors import BadParameter, Cancelled, LowConfidenceResult
from service.core.telemetry import Stages
from service.core.types import OutputKind, Segmentation, Volume
from service.formats.tiff import writer as tiff_writer
from service.inference import measurements
from service.serving.results.media_types import MEDIA_TYPES, OUTPUT_SUFFIXES, ZARR_TYPE
from service.serving.results.metadata import ResultMetadata, make_answer_name
from service.serving.results.provenance import describe_provenance

if TYPE_CHECKING:
    from service.inference.types import Result, Table
    from service.serving.parameters import Query, SegmentationRequest
    from service.serving.storage.host_files import HostFiles

LABELS_FILE = "labels.ome.tif"
MEASUREMENTS_FILE = "measurements.csv"
WARNING_FILE = "warning.json"
ARCHIVE_FILE = "labels.zip"
RECEIPT_FILE = "saved.json"
# Folder to which an OME-Zarr result is written.
ZARR_FOLDER = "image.zarr"


class SavedResult(BaseModel):
    """A result that was saved on the host of the service. `output` is the parameter `output_to` of the request."""

    output: str
    media_type: str
    bytes: int
    model: str
    objects: int | None


class Answer(NamedTuple):
    """The file that is sent in response to a request, or the content of that file.

    suffix   appended to the stem of the input name
    seconds  duration of the stages measure, write and save
    content  content of the file if it was encoded in memory, else None
    """

    path: Path
    media_type: str
    suffix: str
    seconds: dict[str, float]
    content: bytes | None = None


def encode_small_answer(request: SegmentationRequest, result: Result) -> Answer | None:
    """Encode the labels of a result in memory.

    Return None if the labels are too large, or if the request specifies `measurements` or `output_to`.
    """
    if request.query.measurements is not None or request.query.output_to is not None:
        return None
    stages = Stages()
    with stages.measure("write"):
        content = tiff_writer.encode(result.segmentation, _make_provenance(request, result))
    if content is None:
        return None
    return _make_label_answer(request.folder / LABELS_FILE, result.segmentation, stages, content)


def write_answer(
    host_files: HostFiles, request: SegmentationRequest, measurement_input: Volume | None, result: Result
) -> Answer:
    """Write the requested files to the folder of the request, or to `output_to` on the host.

    Objects are measured in every channel of `measurement_input`, not only in the segmented channel. Raises Cancelled,
    OSError and the errors of `HostFiles.put`.
    """
    destination = request.query.output_to
    if destination is None:
        return _write_files(request, measurement_input, result)
    is_zarr = request.query.measurements is None and host_files.is_zarr(destination, request.caller)
    answer = (
        _write_zarr(host_files, request, result, destination)
        if is_zarr
        else _write_files(request, measurement_input, result)
    )
    if request.cancelled():
        raise Cancelled("The request was canceled before its result was moved to the destination.")
    stages = Stages()
    with stages.measure("save"):
        saved_bytes = _save_answer(host_files, request, answer, destination)
    receipt = SavedResult(
        output=destination,
        media_type=answer.media_type,
        bytes=saved_bytes,
        model=result.model,
        objects=result.segmentation.count,
    )
    path = request.folder / RECEIPT_FILE
    path.write_text(receipt.model_dump_json(), encoding="utf-8")
    return Answer(path, "application/json", f"_{RECEIPT_FILE}", answer.seconds | stages.seconds)


def _save_answer(host_files: HostFiles, request: SegmentationRequest, answer: Answer, destination: str) -> int:
    """Move a result to its destination, and return the size of the result in bytes."""
    caller, ticket, overwrite = request.caller, request.folder.name, bool(request.query.overwrite)
    if answer.media_type != ZARR_TYPE:
        host_files.put(answer.path, destination, caller, ticket, overwrite=overwrite)
        size = answer.path.stat().st_size
        answer.path.unlink()
        return size
    host_files.put_zarr(answer.path, destination, caller, ticket, overwrite=overwrite, cancelled=request.cancelled)
    size = sum(path.stat().st_size for path in answer.path.rglob("*") if path.is_file())
    shutil.rmtree(request.folder / ZARR_FOLDER)
    return size


def confirm_delivery(host_files: HostFiles, request: SegmentationRequest) -> None:
    """Confirm the delivery of a result by `write_answer`.

    For a synchronous request, call this before the response is sent. For a job, call it after the result has been
    recorded.
    """
    if request.query.output_to is not None:
        host_files.confirm_delivery(request.query.output_to, request.caller, request.folder.name)


def check_host_files(host_files: HostFiles, query: Query, caller: str | None, kind: OutputKind) -> None:
    """Raise BadParameter or OutputExists if the caller cannot use the files on the host that the query specifies.

    kind  kind of the result, which the model and the query determine
    """
    if query.input is not None and host_files.is_folder(query.input, caller):
        _check_folder_query(query)
        return
    for name in ("glob", "format"):
        if getattr(query, name) is not None:
            raise BadParameter.for_parameter(name, "this parameter is valid only if the input is a folder.")
    if query.output_to is None and query.overwrite is not None:
        raise BadParameter.for_parameter("overwrite", "this parameter is valid only together with output_to.")
    is_zarr = query.output_to is not None and _is_zarr_output(host_files, query, query.output_to, caller, kind)
    host_files.check_locations(query.input, query.output_to, caller, overwrite=bool(query.overwrite), is_zarr=is_zarr)


def _is_zarr_output(host_files: HostFiles, query: Query, output: str, caller: str | None, kind: OutputKind) -> bool:
    """Return whether the result is written as OME-Zarr. Raises BadParameter if it cannot be written to the location."""
    if query.measurements is None and host_files.is_zarr(output, caller):
        check_zarr_extra("output_to")
        if kind == "probabilities" and host_files.find_image_format(output, caller) is not None:
            raise BadParameter.for_parameter(
                "output_to",
                "the labels of an OME-Zarr image must be integers, not probabilities. Choose a separate store, such as"
                " probabilities.zarr.",
            )
        return True
    suffixes = OUTPUT_SUFFIXES[MEDIA_TYPES[query.measurements]]
    if not output.lower().endswith(suffixes):
        # Report errors in `input` first.
        host_files.check_locations(query.input, None, caller)
        raise BadParameter.for_parameter(
            "output_to", f"the name must end with {' or '.join(suffixes)} for this kind of result."
        )
    return False


def _check_folder_query(query: Query) -> None:
    if query.output_to is None:
        raise BadParameter.for_parameter(
            "input",
            f"{query.input} is a folder. Use POST /jobs for a folder, and set output_to to the folder for the results.",
        )
    if query.measurements is not None:
        raise BadParameter.for_parameter(
            "measurements",
            "omit this parameter if the input is a folder. The measurements are always written to objects.csv in the"
            " results folder.",
        )
    if query.format == "zarr":
        check_zarr_extra("format")


def check_zarr_extra(parameter: str) -> None:
    """Raise BadParameter if the `zarr` extra, which writes OME-Zarr, is not installed."""
    if find_spec("zarr") is None:
        raise BadParameter.for_parameter(
            parameter, "OME-Zarr output requires the zarr extra: pip install 'stackseg[zarr]'."
        )


def measure_objects(result: Result, measurement_input: Volume | None) -> Table | None:
    """Measure the objects of a result in every channel of `measurement_input`, and return the table of measurements.

    For a series, return the existing table. Return None if there are no labels or no pixels to measure.
    """
    if result.series is not None:
        return result.series.table
    if measurement_input is None or result.segmentation.kind != "labels":
        return None
    return measurements.measure_objects(result.segmentation, measurement_input)


def describe_answer(name: str, answer: Answer, result: Result, seconds: Mapping[str, float]) -> ResultMetadata:
    """Return the metadata of a result. `name` is the name of the uploaded file."""
    return ResultMetadata(
        model=result.model,
        media_type=answer.media_type,
        file_name=make_answer_name(name, answer.suffix),
        kind=result.segmentation.kind,
        seconds=dict(seconds),
        notes=result.notes,
        objects=result.segmentation.count,
        voxel_size=result.segmentation.voxel_size,
        diameter=result.diameter_text,
        skipped=None if result.skipped is None else str(result.skipped),
        time_points=None if result.series is None else (result.series.num_time_points, result.series.total),
        confidence=result.confidence,
        doubt=describe_low_confidence(result),
    )


def describe_low_confidence(result: Result) -> dict[str, Any] | None:
    """Return a warning with the members of a problem document if confidence in a result is low, else None."""
    if result.quality_warning is None:
        return None
    confidence, detail, suggestion = result.quality_warning
    return {
        "type": f"urn:stackseg:warning:{LowConfidenceResult.slug}",
        "title": "Low confidence",
        "detail": detail,
        "confidence": None if confidence is None else round(confidence, 3),
        "try": suggestion,
    }


def compute_fingerprint(
    caller: str | None, digest: str, spec_json: str, query: Query, execution_settings: Mapping[str, Any]
) -> str:
    """Return a hash of everything that determines a result. Requests with equal fingerprints have equal results.

    digest              digest of the file content
    spec_json           spec of the model from `ModelRegistry.spec_json`
    execution_settings  settings returned by `Runtime.get_execution_settings` for the model

    The hash is a SHA-256 hash in hexadecimal.
    """
    components = [caller, digest, spec_json, query.canonical_json, execution_settings]
    return hashlib.sha256(json.dumps(components).encode()).hexdigest()


def _make_provenance(request: SegmentationRequest, result: Result) -> dict[str, str]:
    return describe_provenance(request.query, result, request.name, request.digest)


def _write_zarr(host_files: HostFiles, request: SegmentationRequest, result: Result, destination: str) -> Answer:
    """Write an OME-Zarr store to the folder of the request, with the layout of the destination."""
    from service.formats.zarr import writer as zarr_writer  # noqa: PLC0415 - requires the `zarr` extra

    stages, image_folder, name = Stages(), request.folder / ZARR_FOLDER, destination.rpartition("/")[2]
    shutil.rmtree(image_folder, ignore_errors=True)
    image_folder.mkdir(mode=0o700, parents=True)
    path = image_folder / name
    if host_files.find_image_format(destination, request.caller) is not None:
        # The labels will be added to an existing image. Write a copy of its metadata in place of that image.
        host_files.copy_image_metadata(destination, request.caller, image_folder)
        path = image_folder / "labels" / name
    with stages.measure("write"):
        zarr_writer.write(result.segmentation, path, _make_provenance(request, result))
    return Answer(path, ZARR_TYPE, "", stages.seconds)


def _write_files(request: SegmentationRequest, measurement_input: Volume | None, result: Result) -> Answer:
    segmentation = result.segmentation
    folder, measurements_format, stages = request.folder, request.query.measurements, Stages()
    folder.mkdir(mode=0o700, exist_ok=True)
    labels_path, table_path = folder / LABELS_FILE, folder / MEASUREMENTS_FILE
    if measurements_format is not None:
        with stages.measure("measure"):
            table = measure_objects(result, measurement_input)
            assert table is not None  # noqa: S101 - measurements of outputs without objects are rejected at admission
            measurements.write_csv(table, table_path)
    if measurements_format == "csv":
        return Answer(table_path, MEDIA_TYPES[measurements_format], f"_{MEASUREMENTS_FILE}", stages.seconds)
    with stages.measure("write"):
        tiff_writer.write(segmentation, labels_path, _make_provenance(request, result))
        if measurements_format == "zip":
            warning_path = folder / WARNING_FILE
            if result.quality_warning is not None:
                warning_path.write_text(json.dumps(describe_low_confidence(result), indent=2) + "\n", encoding="utf-8")
            _pack_files(
                folder / ARCHIVE_FILE,
                (labels_path, table_path, *([warning_path] if result.quality_warning is not None else [])),
            )
    if measurements_format == "zip":
        return Answer(folder / ARCHIVE_FILE, MEDIA_TYPES[measurements_format], "_labels.zip", stages.seconds)
    return _make_label_answer(labels_path, segmentation, stages)


def _make_label_answer(path: Path, segmentation: Segmentation, stages: Stages, content: bytes | None = None) -> Answer:
    return Answer(path, MEDIA_TYPES[None], f"_{segmentation.kind}.ome.tif", stages.seconds, content)


def _pack_files(path: Path, files: tuple[Path, ...]) -> None:
    """Move files to a ZIP archive without compression, because the large files are already compressed."""
    with ZipFile(path, "w", ZIP_STORED) as archive:
        for file in files:
            archive.write(file, file.name)
            file.unlink()
