"""Requests and responses for annotated stacks and training runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from service.api.messages.headers import BINARY_CONTENT, OCTET_STREAM
from service.api.messages.text import RedactedText
from service.models.spec import TargetName
from service.serving.learning.annotation import Annotation
from service.serving.learning.training_manager import TrainingManager
from service.serving.learning.training_record import TrainingRecord, TrainingStage, TrainingState
from service.serving.parameters import DecimalFloat, DecimalInteger

ID_PATTERN = "^[0-9a-f]{32}$"
_ANNOTATION_FORM = {
    "schema": {
        "type": "object",
        "properties": {"file": BINARY_CONTENT["schema"], "labels": BINARY_CONTENT["schema"]},
        "required": ["labels"],
    }
}
ANNOTATION_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "The corrected labels of the whole stack: a TIFF or .npy file with the axes Z, Y, X. The file"
        " may be compressed with gzip. Alternatively, send a form with the labels in the field `labels` and the stack"
        " in the field `file`.",
        "required": True,
        "content": {
            "image/tiff": BINARY_CONTENT,
            OCTET_STREAM: BINARY_CONTENT,
            "application/x-npy": BINARY_CONTENT,
            "application/gzip": BINARY_CONTENT,
            "multipart/form-data": _ANNOTATION_FORM,
        },
    }
}
ANNOTATION_FILE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An OME-TIFF file with the axes Z, Y, X.",
        "content": {"image/tiff": BINARY_CONTENT, OCTET_STREAM: BINARY_CONTENT},
    }
}


class AnnotationQuery(BaseModel):
    """Query parameters of `POST /annotations`."""

    stack: Annotated[
        str | None,
        Field(pattern=ID_PATTERN, description="Id of a stack uploaded to `/stacks`. Default: the stack of the job."),
    ] = None
    job: Annotated[
        str | None, Field(pattern=ID_PATTERN, description="Id of the job that returned the labels before correction.")
    ] = None
    name: Annotated[
        str, Field(max_length=200, description="Name of the annotated stack. Default: the name of the stack.")
    ] = ""
    region: Annotated[
        str | None,
        Field(
            max_length=80,
            description="Annotated region in voxels, as z0:z1,y0:y1,x0:x1. The planes, rows and columns at z1, y1 and"
            " x1 are not included. Default: the whole stack.",
        ),
    ] = None
    ignore_label: Annotated[
        DecimalInteger | None,
        Field(
            ge=1,
            lt=2**32,
            description="Label of voxels that are not annotated, such as the planes between annotated planes. They are"
            " excluded from training and scoring.",
        ),
    ] = None
    partial: Annotated[
        bool,
        Field(
            description="Whether only some of the objects are annotated. Voxels without a label are then unknown,"
            " except in a rim around the objects."
        ),
    ] = False
    changes: Annotated[DecimalInteger | None, Field(ge=0, description="Number of corrections that the user made.")] = (
        None
    )
    channel: Annotated[
        str | None, Field(max_length=256, description="Channel, as for `/segment`. Default: the channel of the job.")
    ] = None
    time: Annotated[
        str | None,
        Field(max_length=32, description="Time point, as for `/segment`. Default: the time point of the job."),
    ] = None
    scene: Annotated[
        str | None, Field(max_length=256, description="Image, as for `/segment`. Default: the image of the job.")
    ] = None
    axes: Annotated[
        str | None, Field(max_length=16, description="Axes, as for `/segment`. Default: the axes of the job.")
    ] = None
    allow_incomplete: Annotated[
        bool | None, Field(description="Use stacks with missing planes, as for `/segment`. Default: as in the job.")
    ] = None
    voxel_size: Annotated[
        str | None,
        Field(max_length=64, description="Voxel size, as for `/segment`. Default: the voxel size of the job."),
    ] = None


class AnnotationReport(BaseModel):
    """A stack with corrected labels, stored for training.

    - `shape`: number of planes, rows and columns.
    - `voxel_size`: voxel size along Z, Y and X in micrometers; null if unknown.
    - `owner`: name of the client that stored the annotated stack.
    - `region`: the annotated region, in the format of the parameter `region`; null for the whole stack.
    - `ignore_label`: label of voxels that are not annotated; null if there is no such label.
    - `partial`: whether only some of the objects are annotated, so that voxels without a label are unknown.
    - `objects`: number of objects in the annotated region.
    - `base_model`: name and version of the model that computed the labels before correction; null if unknown.
    - `diameter`: object diameter used by that model, in the format of the parameter `diameter`; null if none was used.
    - `changes`: number of corrections that the user made; null if unknown.
    - `time`: zero-based index of the time point in the original time series; null if there is no time series.
    - `stack`, `job`: ids of the uploaded stack and the job from which the annotated stack was created. The stack and
      the job may have been deleted.
    - `overlaps`: ids of the caller's annotated stacks with labels for the same region of the same image, newest first;
      at most 32. A training run can use only one of these annotated stacks.
    - `bytes`: size on disk, in bytes.
    """

    id: str
    name: str
    owner: str | None
    shape: tuple[int, int, int]
    voxel_size: tuple[float, float, float] | None
    region: str | None
    ignore_label: int | None
    partial: bool
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
    """The caller's annotated stacks, newest first. Admins see the annotated stacks of all API keys."""

    annotations: list[AnnotationReport]


class CallerLimits(BaseModel):
    """Permissions and limits of the caller: annotated stacks, training runs, jobs, and folders on the host.

    - `corrections`: whether the service stores annotated stacks.
    - `annotations_bytes`: disk quota for the annotated stacks of one API key.
    - `training`: whether the caller may train models.
    - `training_problem`: why the caller may not train models; null if the caller may train models.
    - `training_minutes`: maximum duration of a training run, in minutes.
    - `temporary_jobs`: whether the service deletes jobs, their results and uploaded stacks when it stops.
    - `inputs`, `outputs`: names of the folders on the host that the caller may read, and in which it may store results.
    """

    corrections: bool
    annotations_bytes: int
    training: bool
    training_problem: str | None
    training_minutes: float
    temporary_jobs: bool
    inputs: list[str]
    outputs: list[str]


class TrainingRequest(BaseModel):
    """Parameters of a new training run.

    - `model`: model to start from. Default: the default model.
    - `annotations`: ids of the annotated stacks to train on.
    - `minutes`: duration of the training run, in minutes.
    - `name`: name of the new model.
    - `partial`: whether only some objects of the stacks are annotated. Voxels without a label are then unknown, except
      in a rim around the objects.
    - `partial_planes`: whether only some planes of the stacks are annotated. All voxels of planes without labels are
      then unknown.
    - `target`: what the new model learns: `instances` for objects on a background, `boundaries` for objects that fill
      the stack, such as cells in a tissue, or `affinities` for boundaries with gaps, such as those in electron
      microscopy. Default: the same as `model`.
    """

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str | None, Field(max_length=64)] = None
    annotations: Annotated[list[Annotated[str, Field(pattern=ID_PATTERN)]], Field(min_length=1, max_length=100)]
    minutes: Annotated[DecimalFloat, Field(gt=0, allow_inf_nan=False)]
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]
    partial: bool = False
    partial_planes: bool = False
    target: TargetName | None = None


class TrainingReport(BaseModel):
    """A training run.

    - `name`: name of the new model.
    - `model`: the same name while the new model is available; otherwise null.
    - `owner`: name of the client that submitted the training run.
    - `base_model`: name and version of the model that the training run starts from.
    - `position`: position in the queue while the training run is waiting; 1 is next.
    - `stage`: current stage while the state is `running`; otherwise null. `scoring` evaluates the base model, and
      `evaluating` evaluates the new model.
    - `step`: number of completed training steps.
    - `steps`: expected number of training steps, which depends on the speed; null before the first step.
    - `seconds_left`: estimated remaining time in seconds while the state is `running`, including the evaluation; null
      if the training run takes longer than requested.
    - `loss`: pairs of a step and the training loss at this step.
    - `validation`: pairs of a step and the validation loss at this step. The first pair was measured before training.
    - `f1`: pairs of a step and the F1 score of the objects in the validation parts at this step, at an intersection
      over union (IoU) of 0.5.
    - `before`, `after`: F1 scores of the base model and the new model on held-out parts of the annotated stacks, at the
      same IoU.
    - `better`: whether the new model has a higher score than the base model, or for boundaries a higher F1 score minus
      the variation of information, which is part of `message`. If not, the state is `unimproved`, and
      there is no new model, unless the operator has set `trainings.keep_worse`.
    - `message`: the outcome as a sentence, or why the training run failed.
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
    f1: list[tuple[int, float]]
    before: float | None
    after: float | None
    better: bool | None
    message: RedactedText
    model: str | None


class TrainingList(BaseModel):
    """The caller's training runs, newest first. Admins see the training runs of all API keys."""

    trainings: list[TrainingReport]


def describe_annotation(annotation: Annotation, overlaps: Sequence[Annotation]) -> dict[str, Any]:
    """Return the members of the `AnnotationReport` for an annotated stack."""
    provenance, voxel_size = annotation.provenance, annotation.voxel_size
    return {
        "id": annotation.id,
        "name": annotation.name,
        "owner": annotation.owner,
        "shape": annotation.shape,
        "voxel_size": None if voxel_size is None else (voxel_size.z, voxel_size.y, voxel_size.x),
        "region": None if annotation.region is None else str(annotation.region),
        "ignore_label": annotation.ignored,
        "partial": annotation.is_partial,
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
    """Report a training run, including the name of the new model while that model is available.

    Blocks while model folders are read.
    """
    seconds_left = record.seconds_left
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
        position=trainings.queue.get_position(record),
        stage=record.stage if record.state == "running" else None,
        step=record.step,
        steps=record.steps,
        seconds_left=None if seconds_left is None else round(seconds_left, 1),
        loss=list(record.loss),
        validation=list(record.validation),
        f1=list(record.f1),
        before=record.before,
        after=record.after,
        better=record.better,
        message=record.message,
        model=trainings.trained_models.find_trained_model(record),
    )


def _to_utc(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else datetime.fromtimestamp(timestamp, UTC)
