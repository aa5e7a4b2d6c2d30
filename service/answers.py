"""What goes back for a finished segmentation: the label file, its objects' measurements, or both."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from zipfile import ZIP_STORED, ZipFile

from service.metrics import Stages
from service.repository import ModelSpec
from service.runtime import Runtime
from service.schemas import Query
from service.segmenter import Result
from service.store import Outcome
from service.volume import Segmentation, Volume

LABELS = "labels.ome.tif"
MEASUREMENTS = "measurements.csv"
ARCHIVE = "labels.zip"


class Answer(NamedTuple):
    """A file to send. `suffix` follows the stem of the input's name; `seconds` by stage: measure, write."""

    path: Path
    media_type: str
    suffix: str
    seconds: dict[str, float]


def write_answer(runtime: Runtime, query: Query, source: Path, volume: Volume, segmentation: Segmentation) -> Answer:
    """Write what the query asks for beside `source`, the uploaded file. Raises what reading and writing raise.

    Every channel of the file is measured, also where one of them was segmented.
    """
    folder, stages = source.parent, Stages()
    labels, table = folder / LABELS, folder / MEASUREMENTS
    if query.measurements is not None:
        with stages.measure("measure"):
            if query.channel is not None:
                volume = runtime.read(source, replace(query.selection, channel=None), folder)
            runtime.measure(segmentation, volume, table)
    if query.measurements == "csv":
        return Answer(table, "text/csv", f"_{MEASUREMENTS}", stages.seconds)
    with stages.measure("write"):
        runtime.write(segmentation, labels)
        if query.measurements == "zip":
            _pack(folder / ARCHIVE, (labels, table))
    if query.measurements == "zip":
        return Answer(folder / ARCHIVE, "application/zip", "_labels.zip", stages.seconds)
    return Answer(labels, "image/tiff", f"_{segmentation.kind}.ome.tif", stages.seconds)


def outcome_of(model: str, name: str, answer: Answer, result: Result, seconds: Mapping[str, float]) -> Outcome:
    """What is told beside the file. `model` with its version, `name` of the posted file, `seconds` of all stages."""
    return Outcome(
        model=model,
        media_type=answer.media_type,
        file_name=answer_name(name, answer.suffix),
        kind=result.segmentation.kind,
        seconds=dict(seconds),
        notes=result.notes,
        objects=result.segmentation.count,
        voxel_size=result.segmentation.voxel_size,
    )


def fingerprint(caller: str | None, digest: str, spec: ModelSpec, query: Query) -> str:
    """The same for requests that have the same answer: same caller, bytes, model and parameters. Hexadecimal."""
    parameters = query.model_dump(mode="json", exclude={"model"})
    facts = [caller, digest, spec.identifier, spec.weights.sha256, parameters]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def answer_name(name: str, suffix: str) -> str:
    """`embryo.ome.tif` -> `embryo_labels.ome.tif`; for the client's convenience only."""
    stem = re.sub(r"(\.ome)?\.tiff?$", "", name, flags=re.IGNORECASE) or "stack"
    return stem + suffix


def _pack(path: Path, files: tuple[Path, ...]) -> None:
    """Stored, not compressed: what is large in it is compressed already."""
    with ZipFile(path, "w", ZIP_STORED) as archive:
        for file in files:
            archive.write(file, file.name)
            file.unlink()
