"""Requests and responses for annotated stacks and trainings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from service.api.messages.text import Text
from service.serving.learning.annotation import Annotation
from service.serving.learning.training_record import TrainingRecord, TrainingStage, TrainingState
from service.serving.learning.trainings import TrainingManager

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
        "description": "The corrected labels of the whole stack as a TIFF or a .npy file with axes Z, Y, X, optionally"
        " compressed with gzip. Alternatively a form with the field `labels` and the stack itself in the field `file`.",
        "required": True,
        "content": {
            "image/tiff": _BINARY,
            "application/x-npy": _BINARY,
            "application/gzip": _BINARY,
            "multipart/form-data": _CORRECTION_FORM,
        },
    }
}
ANNOTATION_FILE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "An OME-TIFF with axes Z, Y, X.", "content": {"image/tiff": _BINARY}}
}


class CorrectionQuery(BaseModel):
    """Query parameters of `POST /annotations`."""

    stack: Annotated[
        str | None,
        Field(pattern=ID_PATTERN, description="Id of a stack uploaded with POST /stacks. By default, that of the job."),
    ] = None
    job: Annotated[str | None, Field(pattern=ID_PATTERN, description="Id of the job whose labels were corrected.")] = (
        None
    )
    name: Annotated[
        str, Field(max_length=200, description="Name of the annotated stack. By default, the name of the stack.")
    ] = ""
    region: Annotated[
        str | None,
        Field(max_length=80, description="Corrected region z0:z1,y0:y1,x0:x1. By default, the whole stack."),
    ] = None
    changes: Annotated[int | None, Field(ge=0, description="Number of corrections that the user made.")] = None
    channel: Annotated[
        str | None, Field(max_length=256, description="Channel, as in /segment. By default, that of the job.")
    ] = None
    time: Annotated[
        str | None, Field(max_length=32, description="Time point, as in /segment. By default, that of the job.")
    ] = None
    axes: Annotated[
        str | None, Field(max_length=16, description="Axes, as in /segment. By default, those of the job.")
    ] = None
    voxel_size: Annotated[
        str | None, Field(max_length=64, description="Voxel size, as in /segment. By default, that of the job.")
    ] = None


class AnnotationReport(BaseModel):
    """A stack with corrected labels, stored for training.

    - `shape`: number of planes, rows and columns.
    - `voxel_size`: Z, Y, X in micrometers; null if unknown.
    - `region`: the corrected region, in the format of the parameter; null for the whole stack.
    - `objects`: number of objects in the corrected region.
    - `base_model`: name and version of the model that made the labels before correction; null if unknown.
    - `diameter`: object diameter used by that model, in the format of the parameter `diameter`; null if none was used.
    - `changes`: number of corrections, if the client reported it.
    - `time`: index of the time point in the original series, counted from 0; null without a series.
    - `stack`, `job`: the stack and the job that it was made from. They may have been deleted.
    - `overlaps`: ids of the caller's annotated stacks with labels for the same region of the same image, newest first,
      at most 32. A training can use only one of them.
    - `bytes`: size on disk.
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
    """The caller's annotated stacks, newest first. Admins see those of all API keys."""

    annotations: list[AnnotationReport]


class CallerLimits(BaseModel):
    """What the caller may do in addition to segmenting.

    - `corrections`: whether the service stores annotated stacks.
    - `annotations_bytes`: disk quota for the annotated stacks of one API key.
    - `training`: whether the caller may train models.
    - `training_problem`: why the caller may not train models; null if it may.
    - `training_minutes`: maximum duration of a training.
    """

    corrections: bool
    annotations_bytes: int
    training: bool
    training_problem: str | None
    training_minutes: float


class TrainingRequest(BaseModel):
    """Parameters of a new training.

    - `model`: model to start from; the default model if not given.
    - `annotations`: ids of the annotated stacks to train on.
    - `minutes`: duration of the training.
    - `name`: name of the new model.
    """

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str | None, Field(max_length=64)] = None
    annotations: Annotated[list[Annotated[str, Field(pattern=ID_PATTERN)]], Field(min_length=1, max_length=100)]
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]


class TrainingReport(BaseModel):
    """A training of a model.

    - `name`: name of the new model. `model` has the same name while the new model is available.
    - `base_model`: name and version of the model that the training starts from.
    - `position`: position in the queue while the training is waiting; 1 is next.
    - `stage`: current stage of a running training. `scoring` evaluates the base model, `evaluating` the new model.
    - `steps`: planned number of training steps; null until the speed has been measured.
    - `seconds_left`: estimated remaining time of a running training, including evaluation; null if it takes longer than
      requested.
    - `loss`: pairs of step and training loss.
    - `validation`: pairs of step and validation loss. The first pair is from before the training.
    - `before`, `after`: F1 score of the base model and the new model on held-out parts of the annotated stacks, at an
      intersection over union of 0.5.
    - `better`: whether the new model scores higher than the base model.
    - `message`: the outcome in words, or why the training failed.
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
    """The caller's trainings, newest first. Admins see those of all API keys."""

    trainings: list[TrainingReport]


def describe_annotation(annotation: Annotation, overlaps: Sequence[Annotation]) -> dict[str, Any]:
    """Return the members of an `AnnotationReport` as a dictionary."""
    provenance, size = annotation.provenance, annotation.voxel_size
    return {
        "id": annotation.id,
        "name": annotation.name,
        "owner": annotation.owner,
        "shape": annotation.shape,
        "voxel_size": None if size is None else (size.z, size.y, size.x),
        "region": None if annotation.region is None else str(annotation.region),
        "objects": annotation.objects,
        "base_model": provenance.model,
        "diameter": provenance.diameter,
        "changes": provenance.changes,
        "time": provenance.time,
        "stack": provenance.stack,
        "job": provenance.job,
        "overlaps": [other.id for other in overlaps],
        "created": datetime.fromtimestamp(annotation.created, UTC),
        "bytes": annotation.nbytes,
    }


def report_training(trainings: TrainingManager, record: TrainingRecord) -> TrainingReport:
    """Report a training and, while it is available, its new model. Blocks while model folders are read."""
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
        started=_to_utc(record.started),
        ended=_to_utc(record.ended),
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
        model=trainings.trained_models.find_trained_model(record),
    )


def _to_utc(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
