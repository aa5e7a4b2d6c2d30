"""What goes back for a finished segmentation: the label file, its objects' measurements, or both."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

from pydantic import BaseModel

from service.core.errors import BadParameter, Cancelled
from service.core.timing import Stages
from service.core.volume import Segmentation, Volume
from service.inference.result import Result
from service.serving.job_store import AnswerMetadata
from service.serving.parameters import Query
from service.serving.runtime import Runtime

LABELS = "labels.ome.tif"
MEASUREMENTS = "measurements.csv"
ARCHIVE = "labels.zip"
RECEIPT = "saved.json"

# Of the name of a posted file.
SUFFIX = re.compile(r"(\.ome)?\.tiff?$", re.IGNORECASE)

# What the name of a file that is written on the host ends with, by the media type of the answer.
SUFFIXES = {"image/tiff": (".tif", ".tiff"), "text/csv": (".csv",), "application/zip": (".zip",)}


class Saved(BaseModel):
    """What was written on the service's host. `output` is the `output_to` of the request."""

    output: str
    media_type: str
    bytes: int
    model: str
    objects: int | None


class ReceivedRequest(NamedTuple):
    """A request whose file is there.

    source    the file, in `folder` unless it was named
    folder    its own, to work in
    given_up  whether nobody wants the answer any more
    """

    query: Query
    source: Path
    folder: Path
    caller: str | None = None
    given_up: Callable[[], bool] = lambda: False


class Pixels(NamedTuple):
    """What is read of a file.

    segmented  the selected part
    measured   the same of every channel, where objects are measured
    """

    segmented: Volume
    measured: Volume


def read_pixels(runtime: Runtime, query: Query, source: Path | bytearray, folder: Path, caller: str | None) -> Pixels:
    """All that the query needs of the caller's file, before anything is computed: later it may be another one, or gone.

    Raises what `Runtime.read` raises.
    """
    shared = query.input is not None
    read = partial(runtime.read, source, scratch=folder, shared=shared, owner=caller)
    volume = read(query.selection)
    if query.measurements is None or query.channel is None:
        return Pixels(volume, volume)
    return Pixels(volume, read(replace(query.selection, channel=None)))


class Answer(NamedTuple):
    """A file to send, or what would be in it. `suffix` follows the stem of the input's name.

    seconds  by stage: measure, write
    """

    path: Path
    media_type: str
    suffix: str
    seconds: dict[str, float]
    content: bytes | None = None


def small_answer(runtime: Runtime, received: ReceivedRequest, result: Result) -> Answer | None:
    """What `write_answer` would write, in memory; None where that is large, or more than the labels, or to be kept."""
    if received.query.measurements is not None or received.query.output_to is not None:
        return None
    stages = Stages()
    with stages.measure("write"):
        content = runtime.encode(result.segmentation)
    if content is None:
        return None
    return _labels(received.folder / LABELS, result.segmentation, stages, content)


def write_answer(runtime: Runtime, received: ReceivedRequest, measured: Volume, result: Result, model: str) -> Answer:
    """Write what the query asks for, into the request's folder or where it says. Raises what reading and writing raise.

    Every channel of `measured` is, also where one of them was segmented. `model` with its version.
    """
    query, place = received.query, received.query.output_to
    answer = _write(runtime, received, measured, result.segmentation)
    if place is None:
        return answer
    if received.given_up():
        raise Cancelled("given up before its result was put in its place")
    stages = Stages()
    with stages.measure("save"):
        ticket = received.folder.name
        runtime.references.put(answer.path, place, received.caller, ticket, overwrite=bool(query.overwrite))
    receipt = Saved(
        output=place,
        media_type=answer.media_type,
        bytes=answer.path.stat().st_size,
        model=model,
        objects=result.segmentation.count,
    )
    answer.path.unlink()
    path = received.folder / RECEIPT
    path.write_text(receipt.model_dump_json(), encoding="utf-8")
    return Answer(path, "application/json", f"_{RECEIPT}", answer.seconds | stages.seconds)


def settle(runtime: Runtime, received: ReceivedRequest) -> None:
    """The answer of `write_answer` is on its way to the caller, or on record."""
    if received.query.output_to is not None:
        runtime.references.settle(received.query.output_to, received.caller, received.folder.name)


def check_places(runtime: Runtime, query: Query, caller: str | None) -> None:
    """Whether what the request names on the host can be used by this caller. Raises BadParameter, OutputExists."""
    if query.output_to is None and query.overwrite is not None:
        raise BadParameter("overwrite: it goes with output_to, which is not given.")
    if query.output_to is not None:
        suffixes = SUFFIXES[_MEDIA_TYPES[query.measurements]]
        if not query.output_to.lower().endswith(suffixes):
            raise BadParameter(f"output_to: the name must end with {' or '.join(suffixes)}, after what is written.")
    runtime.references.check(query.input, query.output_to, caller, overwrite=bool(query.overwrite))


_MEDIA_TYPES = {None: "image/tiff", "csv": "text/csv", "zip": "application/zip"}


def _write(runtime: Runtime, received: ReceivedRequest, measured: Volume, segmentation: Segmentation) -> Answer:
    query, folder, stages = received.query, received.folder, Stages()
    folder.mkdir(mode=0o700, exist_ok=True)
    labels, table = folder / LABELS, folder / MEASUREMENTS
    media_type = _MEDIA_TYPES[query.measurements]
    if query.measurements is not None:
        with stages.measure("measure"):
            runtime.measure(segmentation, measured, table)
    if query.measurements == "csv":
        return Answer(table, media_type, f"_{MEASUREMENTS}", stages.seconds)
    with stages.measure("write"):
        runtime.write(segmentation, labels)
        if query.measurements == "zip":
            _pack(folder / ARCHIVE, (labels, table))
    if query.measurements == "zip":
        return Answer(folder / ARCHIVE, media_type, "_labels.zip", stages.seconds)
    return _labels(labels, segmentation, stages)


def _labels(path: Path, segmentation: Segmentation, stages: Stages, content: bytes | None = None) -> Answer:
    return Answer(path, _MEDIA_TYPES[None], f"_{segmentation.kind}.ome.tif", stages.seconds, content)


def outcome_of(model: str, name: str, answer: Answer, result: Result, seconds: Mapping[str, float]) -> AnswerMetadata:
    """What is told beside the file. `model` with its version, `name` of the posted file, `seconds` of all stages."""
    return AnswerMetadata(
        model=model,
        media_type=answer.media_type,
        file_name=answer_name(name, answer.suffix),
        kind=result.segmentation.kind,
        seconds=dict(seconds),
        notes=result.notes,
        objects=result.segmentation.count,
        voxel_size=result.segmentation.voxel_size,
        diameter=result.width,
        skipped=None if result.skipped is None else str(result.skipped),
    )


def fingerprint(caller: str | None, digest: str, model: str, query: Query, manner: Mapping[str, Any]) -> str:
    """The same for requests that have the same answer: same caller, bytes, model, parameters and `Runtime.manner`.

    `model` as `Runtime.facts` has it. Hexadecimal.
    """
    facts = [caller, digest, model, query.canonical, manner]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def answer_name(name: str, suffix: str) -> str:
    """`embryo.ome.tif` -> `embryo_labels.ome.tif`; for the client's convenience only."""
    stem = SUFFIX.sub("", name) or "stack"
    return stem + suffix


def _pack(path: Path, files: tuple[Path, ...]) -> None:
    """Stored, not compressed: what is large in it is compressed already."""
    with ZipFile(path, "w", ZIP_STORED) as archive:
        for file in files:
            archive.write(file, file.name)
            file.unlink()
