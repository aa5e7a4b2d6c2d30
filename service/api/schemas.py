"""Pydantic models of JSON answers. Dataclasses of lower layers appear in them unchanged."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from service.core.errors import without_folders
from service.core.hardware import CpuStatus, GpuStatus
from service.core.types import Description, OutputKind
from service.inference.types import EngineReport, Estimate
from service.models.spec import Input, Lineage
from service.serving.jobs.record import JobState
from service.serving.learning.training_record import TrainingStage, TrainingState


def _report_without_folders(report: EngineReport) -> EngineReport:
    trials = tuple(
        replace(trial, verdict=trial.verdict._replace(detail=without_folders(trial.verdict.detail)))
        for trial in report.trials
    )
    return replace(report, warnings=tuple(map(without_folders, report.warnings)), trials=trials)


# What may quote an error with paths of the host.
Text = Annotated[str, AfterValidator(without_folders)]
Report = Annotated[EngineReport, AfterValidator(_report_without_folders)]


class Inspection(BaseModel):
    """Facts about a file, and what segmenting it would take. `problem`: why it would be refused.

    diameter  of the objects: as stated, none, or auto where it is estimated once pixels are read; `estimate` then is
              that of the stack as it is sampled
    seconds   until the labels would be there, by the pace of earlier requests and with those before it; null before the
              model has segmented anything
    """

    file: Description
    model: str
    output: OutputKind | None
    normalisation: dict[str, Any]
    diameter: str | None
    estimate: Estimate | None
    seconds: float | None
    problem: Text | None


class JobProgress(BaseModel):
    """Progress in windows, done and all: decoding counts as many as are computed in the time that it takes."""

    done: int
    total: int


class JobProblem(BaseModel):
    """The reason why a job failed, as the problem document of its result says it."""

    type: str
    detail: Text


class JobReport(BaseModel):
    """A job.

    state         waiting, loading while it waits for its model to be loaded, running, done, failed, cancelled, or
                  expired once its result had to make room
    stage         that a job which runs is at: prepare, windows, decode, write
    position      1 for the job whose turn is next, only while it waits
    seconds_left  until the result is there, those before it included; null where that cannot be told yet
    seconds       by stage, as far as the job has come
    time_points   those that are done, of a series. The result of one that failed has them
    stacks        those that are done, of a folder; so is `progress` then. At the end those that have results
    confidence    in the result, 0 to 1, where the model knows; `doubt` says why it is low and what to try
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
                "stage": "windows",
                "position": None,
                "progress": {"done": 48, "total": 320},
                "time_points": None,
                "stacks": None,
                "seconds_left": 51.2,
                "seconds": {"receive": 0.4, "read": 1.2, "queue": 8.1},
                "confidence": None,
                "doubt": None,
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
    stage: str | None
    position: int | None
    progress: JobProgress
    time_points: JobProgress | None
    stacks: JobProgress | None
    seconds_left: float | None
    seconds: dict[str, float]
    confidence: float | None = None
    doubt: dict[str, Any] | None = None
    warnings: list[Text]
    diameter: str | None = None
    skipped: str | None = None
    objects: int | None = None
    result: str | None
    problem: JobProblem | None


class JobList(BaseModel):
    """The caller's jobs, newest first."""

    jobs: list[JobReport]


class StackReport(BaseModel):
    """A stack that is kept for later requests; `bytes` of its file."""

    id: str
    name: str
    bytes: int


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


class Loaded(BaseModel):
    """A model on one device: the memory that it takes there, and when a request last began or ended to use it."""

    device: str
    bytes: int
    used: datetime


class ModelInfo(BaseModel):
    """A model as it is served. `state`: unloaded until it is asked for, loading, ready, or failed, then with `problem`.

    removable  whether the caller may delete it: a model that was trained here, by the caller's key or for an admin
    picture  where what it finds in its sample is drawn; None without such a picture
    lineage  of a model that was trained here: its parent, and scores before and after
    devices  on which it is loaded
    """

    name: str
    state: str
    picture: str | None = None
    version: str | None = None
    summary: str | None = None
    licence: str | None = None
    training_data: str | None = None
    architecture: str | None = None
    input: Input | None = None
    outputs: tuple[str, ...] = ()
    decoding: str | None = None
    lineage: Lineage | None = None
    removable: bool = False
    engine: Report | None = None
    loaded: bool = False
    devices: list[Loaded] = []
    problem: Text | None = None


class ModelList(BaseModel):
    """All models; `default` answers requests that name none."""

    default: str | None
    models: list[ModelInfo]


class ModelReload(BaseModel):
    """Names of models that are new, changed or gone. `broken`: why one is not served as its folder has it, by name."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    broken: dict[str, Text]


class Health(BaseModel):
    """`status`: ok, unavailable with the `reasons`, or degraded: ready, though models or protection are missing."""

    status: str
    version: str
    uptime_seconds: float
    waiting: int
    models: dict[str, str]
    reasons: list[Text]
    degraded: list[Text]


class Liveness(BaseModel):
    """The process answers."""

    status: str = "alive"


class DeviceReport(BaseModel):
    """A device in use: requests that wait and run there, what is loaded, and the `problem` where it is unusable.

    host        of a device of a cluster, that it was seen on last; null for one of this host
    given_back  whether the cluster has it again, until there is work for it
    starting    whether the cluster was asked for it, and it has not answered yet
    """

    name: str
    host: str | None = None
    waiting: int
    running: int
    models: list[str]
    loaded_bytes: int
    problem: Text | None
    given_back: bool = False
    starting: bool = False


class HostReport(BaseModel):
    """Another host with devices of a cluster: its GPUs and its processor."""

    host: str
    gpus: list[GpuStatus]
    cpu: CpuStatus


class GpuReport(BaseModel):
    """The GPUs of the host (none is no error), its processor, the devices in use, and how each loaded model runs.

    hosts  the other hosts that have some of these devices
    """

    message: str
    gpus: list[GpuStatus]
    cpu: CpuStatus
    hosts: list[HostReport] = []
    devices: list[DeviceReport]
    models: dict[str, Report]


class RequestReport(BaseModel):
    """A request at a device. `state`: waiting, its file being read or its model loaded included, or running.

    seconds       that it has been in this state
    seconds_left  until it is done, those before it included; null where that cannot be told yet
    """

    device: str
    model: str
    state: str
    progress: JobProgress
    seconds: float
    seconds_left: float | None


class SegmentedReport(BaseModel):
    """A segmentation that has ended; `seconds` by stage, in their order."""

    ended: datetime
    model: str
    voxels: int
    objects: int | None
    seconds: dict[str, float]


class TrainingProgress(BaseModel):
    """A training that runs or waits. `name`: of the new model; `steps`: planned, null before that is measured."""

    name: str
    base_model: str
    state: TrainingState
    stage: TrainingStage | None
    step: int
    steps: int | None
    seconds_left: float | None


class LearningReport(BaseModel):
    """Annotated stacks, trainings and trained models of all keys.

    problem       why nobody can train here; null: those may who have the right
    trainings     the one that runs, then those that wait, in their turn
    annotations   number of annotated stacks
    models        number of trained models, of which there may be `models_limit`
    """

    problem: str | None
    trainings: list[TrainingProgress]
    annotations: int
    models: int
    models_limit: int


class DiskReport(BaseModel):
    """Bytes that files of one kind take, may take (null: no limit for all keys together), and that the disk has free.

    files  requests, results (kept for who asks again), jobs, stacks, annotations or trained-models
    """

    files: str
    used: int
    limit: int | None
    free: int
    total: int


class Status(BaseModel):
    """The service at this moment: what `/health`, `/gpu` and `/models` say, the requests, and the last results.

    cpu_seconds  of the processor that the service has taken, without the processes that read files
    requests     by device: those that run, then those that wait, in their turn
    recent       the last segmentations, newest first
    disk         by kind of files
    """

    health: Health
    hardware: GpuReport
    models: ModelList
    cpu_seconds: float
    requests: list[RequestReport]
    recent: list[SegmentedReport]
    learning: LearningReport
    disk: list[DiskReport]
