"""Requests and answers about annotated stacks and trainings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from service.api.messages.text import Text
from service.serving.learning.annotation import Annotation
from service.serving.learning.training_record import TrainingRecord, TrainingStage, TrainingState
from service.serving.learning.trainings import Trainings

ID_PATTERN = "^[0-9a-f]{32}$"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_CORRECTION_FORM = {
    "schema": {
        "type": "object",
        "properties": {"file": _BINARY["schema"], "labels": _BINARY["schema"]},
        "required": ["labels"],
    }
}
CORRECTION_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "Labels of the whole stack: a TIFF, or .npy [Z, Y, X], which may be within gzip; or a form with"
        " `labels` and the stack itself, `file`.",
        "required": True,
        "content": {
            "image/tiff": _BINARY,
            "application/x-npy": _BINARY,
            "application/gzip": _BINARY,
            "multipart/form-data": _CORRECTION_FORM,
        },
    }
}
ANNOTATION_FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "An OME-TIFF ZYX.", "content": {"image/tiff": _BINARY}}
}


class CorrectionQuery(BaseModel):
    """Parameters of POST /annotations."""

    stack: Annotated[str | None, Field(pattern=ID_PATTERN, description="The stack, of POST /stacks; the job's.")] = None
    job: Annotated[str | None, Field(pattern=ID_PATTERN, description="The job whose labels were corrected.")] = None
    name: Annotated[str, Field(max_length=200, description="The name of the stack if not given.")] = ""
    region: Annotated[
        str | None, Field(max_length=80, description="The corrected part, z0:z1,y0:y1,x0:x1; all if not given.")
    ] = None
    changes: Annotated[int | None, Field(ge=0, description="Number of corrections.")] = None
    channel: Annotated[str | None, Field(max_length=256, description="As in /segment; the job's.")] = None
    time: Annotated[str | None, Field(max_length=32, description="As in /segment; the job's.")] = None
    axes: Annotated[str | None, Field(max_length=16, description="As in /segment; the job's.")] = None
    voxel_size: Annotated[str | None, Field(max_length=64, description="As in /segment; the job's.")] = None


class AnnotationReport(BaseModel):
    """A stack that is kept with corrected labels, to train on.

    shape       planes, rows and columns
    voxel_size  Z, Y, X in micrometres, null where it is not known
    region      the part that was corrected, as the parameter states it; null: all of it
    objects     in the labels, of that part
    base_model  that made the labels which were corrected, with its version; null where that is not known
    diameter    of the objects, as the parameter `diameter` takes it, where the labels were made with one
    changes     how many corrections there were, where the client says
    time        the time point of the series that it was made of, from 0; null where there is one alone
    stack, job  that it was made of, either of which may be gone
    overlaps    ids of those of the caller's that have labels for the same place of the same image, newest first, 32
                at most; of such only one can be trained on at a time
    bytes       on disk
    """

    id: str
    name: str
    owner: str | None
    shape: tuple[int, int, int]
    voxel_size: tuple[float, float, float] | None
    region: str | None
    objects: int
    base_model: str | None
    diameter: str | None
    changes: int | None
    time: int | None
    stack: str | None
    job: str | None
    overlaps: list[str]
    created: datetime
    bytes: int


class AnnotationList(BaseModel):
    """The caller's annotated stacks, those of all keys for an admin, newest first."""

    annotations: list[AnnotationReport]


class Abilities(BaseModel):
    """Rights of the caller beyond segmenting.

    corrections        whether annotated stacks are kept
    annotations_bytes  that one key's may take on disk
    training           whether the caller may train models on them
    training_problem   why not
    training_minutes   longest that a training may take
    """

    corrections: bool
    annotations_bytes: int
    training: bool
    training_problem: str | None
    training_minutes: float


class TrainingRequest(BaseModel):
    """A training to begin. `model`: to go on from, the default model if not given; `name`: of the new one."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str | None, Field(max_length=64)] = None
    annotations: Annotated[list[Annotated[str, Field(pattern=ID_PATTERN)]], Field(min_length=1, max_length=100)]
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]


class TrainingReport(BaseModel):
    """A training.

    name          of the new model; `model` has it while it is served
    base_model    that it goes on from, with its version
    position      1 for the one whose turn is next, only while it waits
    steps         planned, as many as the time allows; null before that is measured
    stage         what it does while it runs: `scoring` measures the base model, `evaluating` the new one
    seconds_left  while it runs, scoring included; null once it takes longer than was asked for
    loss          [step, training loss]
    validation    [step, loss on what is not trained on], the first before any step
    before, after  F1 at an intersection over union of 0.5 on the held-out part of the annotated stacks
    better        whether the new model is better there; `message` says it in words, or why the training failed
    """

    id: str
    state: TrainingState
    name: str
    owner: str | None
    base_model: str
    annotations: list[str]
    minutes: float
    created: datetime
    started: datetime | None
    ended: datetime | None
    position: int | None
    stage: TrainingStage | None
    step: int
    steps: int | None
    seconds_left: float | None
    loss: list[tuple[int, float]]
    validation: list[tuple[int, float]]
    before: float | None
    after: float | None
    better: bool | None
    message: Text
    model: str | None


class TrainingList(BaseModel):
    """The caller's trainings, those of all keys for an admin, newest first."""

    trainings: list[TrainingReport]


def describe_annotation(annotation: Annotation, overlaps: Sequence[Annotation]) -> dict[str, Any]:
    """Return the content of an `AnnotationReport`."""
    origin, size = annotation.origin, annotation.voxel_size
    return {
        "id": annotation.id,
        "name": annotation.name,
        "owner": annotation.owner,
        "shape": annotation.shape,
        "voxel_size": None if size is None else (size.z, size.y, size.x),
        "region": None if annotation.region is None else str(annotation.region),
        "objects": annotation.objects,
        "base_model": origin.model,
        "diameter": origin.diameter,
        "changes": origin.changes,
        "time": origin.time,
        "stack": origin.stack,
        "job": origin.job,
        "overlaps": [other.id for other in overlaps],
        "created": datetime.fromtimestamp(annotation.created, UTC),
        "bytes": annotation.nbytes,
    }


def report_training(trainings: Trainings, record: TrainingRecord) -> TrainingReport:
    """Report a training, with the place of its new model while that is served. Blocks while folders are read."""
    left = record.seconds_left
    return TrainingReport(
        id=record.id,
        state=record.state,
        name=record.name,
        owner=record.owner,
        base_model=record.base_model,
        annotations=record.annotations,
        minutes=record.minutes,
        created=datetime.fromtimestamp(record.created, UTC),
        started=_utc(record.started),
        ended=_utc(record.ended),
        position=trainings.queue.position(record),
        stage=record.stage if record.state == "running" else None,
        step=record.step,
        steps=record.steps,
        seconds_left=None if left is None else round(left, 1),
        loss=list(record.loss),
        validation=list(record.validation),
        before=record.before,
        after=record.after,
        better=record.better,
        message=record.message,
        model=trainings.trained_models.made_by(record),
    )


def _utc(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
