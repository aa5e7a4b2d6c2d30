"""The JSON that the service speaks. Dataclasses of lower layers appear in it as they are."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from service.core.errors import BadParameter, fault_message
from service.core.hardware import CpuStatus, GpuStatus
from service.core.volume import Description, Options, OutputKind, Selection, VoxelSize, parse_grey, parse_size
from service.inference.estimate import Estimate
from service.inference.segmenter import EngineReport
from service.models.repository import Input
from service.store import JobState

PROBLEM_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An error as RFC 9457 has it. `type` is stable and may be matched; `detail` says what to do."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "type": "urn:stackseg:problem:ambiguous-axes",
                "title": "Ambiguous axes",
                "status": 422,
                "detail": "The file has 4 axes, 7x5x167x439, and does not say what they are; state them, axes=TZYX.",
                "instance": "urn:uuid:6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11",
            }
        },
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str


def problem_members(slug: str, status: int, detail: str, number: str) -> dict[str, Any]:
    """The members of a `Problem`, as JSON has them, in the answer to the request of that number."""
    return {
        "type": f"urn:stackseg:problem:{slug}",
        "title": slug.replace("-", " ").capitalize(),
        "status": status,
        "detail": detail,
        "instance": _urn(number),
    }


def _urn(number: str) -> str:
    """The number of a request as a URI; a client may have given it one that is no UUID."""
    try:
        return uuid.UUID(number).urn
    except ValueError:
        return f"urn:stackseg:request:{number}"


class Query(BaseModel):
    """Parameters of `/segment` and `/inspect`: which part of the file to read, what it does not say, what to do."""

    # Those of one address are one object, whoever sends it; and what is worked out of it stays with it, so it is never
    # copied with changes.
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str | None, Field(description="Name of the model; the default model if not given.")] = None
    channel: Annotated[
        str | None,
        Field(max_length=256, description="Channel to segment, by index from 0 or by name.", examples=["0", "DAPI"]),
    ] = None
    time: Annotated[int | None, Field(ge=0, description="Time point to segment, from 0.")] = None
    axes: Annotated[
        str | None,
        Field(
            max_length=16,
            description="One letter of T, Z, C, Y, X, S per stored dimension; overrides the file.",
            examples=["ZYX", "TZCYX"],
        ),
    ] = None
    voxel_size: Annotated[
        str | None,
        Field(description="Voxel size Z,Y,X in micrometres; overrides the file.", examples=["0.5,0.2,0.2"]),
    ] = None
    sw_batch_size: Annotated[int | None, Field(ge=1, description="Windows per call of the network.")] = None
    overlap: Annotated[
        float | None, Field(ge=0, lt=1, description="Share of a window that it has in common with the next one.")
    ] = None
    diameter: Annotated[
        str | None,
        Field(
            max_length=64,
            description="Width of the objects in the plane, or along Z,Y,X, in voxels (px) or micrometres (um); the "
            "stack is resampled to the width at which the model works best. auto: the width is estimated from the "
            "stack; none: the stack is used as it is sampled. What the model's file says if not given.",
            examples=["15px", "7,15,15px", "6.5um", "auto"],
        ),
    ] = None
    skip_below: Annotated[
        str | None,
        Field(
            max_length=64,
            description="Windows without any voxel above this grey value of the stack are not computed, and count as "
            "background. auto: above the stack's background; none: all windows are computed. What the operator has set "
            "if not given.",
            examples=["120", "auto"],
        ),
    ] = None
    output: Annotated[
        OutputKind | None,
        Field(description="labels: one number per object; classes: one per class; probabilities: float32 per output."),
    ] = None

    measurements: Annotated[
        Literal["csv", "zip"] | None,
        Field(description="csv: a table of the objects instead of the labels; zip: both files in an archive."),
    ] = None

    input: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="A file of the service's host instead of a body: a folder that the operator has named, and the "
            "way from there.",
            examples=["scans/2026/stack.tif"],
        ),
    ] = None
    output_to: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="Where on the service's host the result goes; the answer then only says what was written.",
            examples=["results/2026/stack_labels.tif"],
        ),
    ] = None
    overwrite: Annotated[
        bool | None, Field(description="With output_to: whether a file that is there already is replaced.")
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, given: Any) -> Any:
        """A browser sends the fields of a form that were left empty."""
        return {name: value for name, value in given.items() if value != ""} if isinstance(given, Mapping) else given

    @field_validator("voxel_size")
    @classmethod
    def _three_lengths(cls, text: str | None) -> str | None:
        if text is not None:
            _voxel_size(text)
        return text

    @field_validator("diameter", "skip_below")
    @classmethod
    def _understood(cls, text: str | None, field: ValidationInfo) -> str | None:
        if text is not None:
            try:
                (parse_size if field.field_name == "diameter" else parse_grey)(text)
            except BadParameter as error:
                raise ValueError(str(error)) from None
        return text

    @cached_property
    def selection(self) -> Selection:
        channel = int(self.channel) if self.channel is not None and self.channel.isdecimal() else self.channel
        size = None if self.voxel_size is None else _voxel_size(self.voxel_size)
        return Selection(channel, self.time, self.axes.upper() if self.axes else None, size)

    @cached_property
    def canonical(self) -> str:
        """All but the model as JSON, the same for the same parameters."""
        return self.model_dump_json(exclude={"model"})

    @cached_property
    def options(self) -> Options:
        diameter = None if self.diameter is None else parse_size(self.diameter)
        skip_below = None if self.skip_below is None else parse_grey(self.skip_below)
        return Options(self.output, self.sw_batch_size, self.overlap, diameter, skip_below)


def explain(faults: Iterable[Mapping[str, Any]]) -> str:
    """What pydantic found wrong with parameters, in sentences that name them."""
    sentences = []
    for fault in faults:
        name = str(fault["loc"][-1]) if fault["loc"] else "parameters"
        if fault["type"] == "extra_forbidden":
            sentences.append(f"There is no parameter {name!r}; there are {', '.join(Query.model_fields)}.")
        else:
            sentences.append(f"{name}: {fault_message(fault)}.")
    return " ".join(sentences)


def _voxel_size(text: str) -> VoxelSize:
    try:
        z, y, x = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError("three positive numbers Z,Y,X in micrometres are expected, such as 0.5,0.2,0.2") from None
    try:
        return VoxelSize(z, y, x)
    except BadParameter as error:
        raise ValueError(f"{error} Z,Y,X are expected, such as 0.5,0.2,0.2") from None


class Inspection(BaseModel):
    """What was understood of a file, and what segmenting it would take. `problem`: why it would be refused.

    diameter  of the objects: as stated, none, or auto where it is estimated once pixels are read; `estimate` then is
              that of the stack as it is sampled
    """

    file: Description
    model: str
    output: OutputKind | None
    normalisation: dict[str, Any]
    diameter: str | None
    estimate: Estimate | None
    problem: str | None


class Saved(BaseModel):
    """What was written on the service's host. `output` is the `output_to` of the request."""

    output: str
    media_type: str
    bytes: int
    model: str
    objects: int | None


class JobProgress(BaseModel):
    """Windows that are done, of how many."""

    done: int
    total: int


class JobProblem(BaseModel):
    """Why a job failed, as the problem document of its result says it."""

    type: str
    detail: str


class JobReport(BaseModel):
    """A job.

    state         waiting, loading while it waits for its model to be loaded, running, done, failed, cancelled, or
                  expired once its result had to make room
    position      1 for the job whose turn is next, only while it waits
    seconds_left  until the result is there, those before it included; null where that cannot be told yet
    seconds       by stage, as far as the job has come
    warnings      what a user should know about the result
    diameter      of the objects, and whether it was stated or estimated
    skipped       windows that were not computed because nothing is in them, where such were looked for
    expires       when the job and its result are deleted
    """

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21",
                "state": "running",
                "model": "nuclei",
                "name": "embryo.tif",
                "parameters": {"overlap": 0.5},
                "created": "2026-03-01T10:00:00Z",
                "started": "2026-03-01T10:00:09Z",
                "ended": None,
                "expires": None,
                "position": None,
                "progress": {"done": 48, "total": 320},
                "seconds_left": 51.2,
                "seconds": {"receive": 0.4, "read": 1.2, "queue": 8.1},
                "warnings": [],
                "diameter": None,
                "skipped": None,
                "objects": None,
                "result": None,
                "problem": None,
            }
        }
    )

    id: str
    state: JobState | Literal["loading"]
    model: str
    name: str
    parameters: dict[str, Any]
    created: datetime
    started: datetime | None
    ended: datetime | None
    expires: datetime | None
    position: int | None
    progress: JobProgress
    seconds_left: float | None
    seconds: dict[str, float]
    warnings: list[str]
    diameter: str | None
    skipped: str | None
    objects: int | None
    result: str | None
    problem: JobProblem | None


class JobList(BaseModel):
    """The caller's jobs, newest first."""

    jobs: list[JobReport]


class Loaded(BaseModel):
    """A model on one device: the memory that it takes there, and when a request last began or ended to use it."""

    device: str
    bytes: int
    used: datetime


class ModelInfo(BaseModel):
    """A model as it is served. `state`: unloaded until it is asked for, loading, ready, or failed, then with `problem`.

    devices  on which it is loaded
    """

    name: str
    state: str
    version: str | None = None
    summary: str | None = None
    licence: str | None = None
    training_data: str | None = None
    architecture: str | None = None
    input: Input | None = None
    outputs: tuple[str, ...] = ()
    decoding: str | None = None
    engine: EngineReport | None = None
    loaded: bool = False
    devices: list[Loaded] = []
    problem: str | None = None


class ModelList(BaseModel):
    """All models; `default` answers requests that name none."""

    default: str | None
    models: list[ModelInfo]


class Health(BaseModel):
    """`status`: ok, or unavailable with the `reasons`."""

    status: str
    version: str
    uptime_seconds: float
    waiting: int
    models: dict[str, str]
    reasons: list[str]


class Liveness(BaseModel):
    """The process answers."""

    status: str = "alive"


class DeviceReport(BaseModel):
    """A device in use: requests that wait and run there, what is loaded, and the `problem` where it is unusable."""

    name: str
    waiting: int
    running: int
    models: list[str]
    loaded_bytes: int
    problem: str | None


class GpuReport(BaseModel):
    """The GPUs of the host (none is no error), its processor, the devices in use, and how each loaded model runs."""

    message: str
    gpus: list[GpuStatus]
    cpu: CpuStatus
    devices: list[DeviceReport]
    models: dict[str, EngineReport]
