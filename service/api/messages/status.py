"""Answers about the service itself: health, hardware, and what it does at the moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pydantic import BaseModel

from service.api.messages.jobs import JobProgress
from service.api.messages.models import ModelList, Report
from service.api.messages.text import Text
from service.core.errors import SwitchedOff
from service.core.files.bundled import software_version
from service.core.hardware import host
from service.core.hardware.gpus import GpuStatus
from service.core.hardware.host import CpuStatus
from service.serving.devices.device import Device, DeviceState, loaded_bytes
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.training_record import TrainingRecord, TrainingStage, TrainingState
from service.serving.learning.trainings import Trainings
from service.serving.runtime import Runtime


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


def report_health(runtime: Runtime) -> Health:
    """Report whether the service is ready, and the state of every model."""
    reasons, degraded = list(runtime.unready_reasons()), list(runtime.degradations())
    return Health(
        status="unavailable" if reasons else "degraded" if degraded else "ok",
        version=software_version(),
        uptime_seconds=round(runtime.uptime_seconds, 1),
        waiting=runtime.devices.waiting,
        models={model.name: model.state for model in runtime.models.states()},
        reasons=reasons,
        degraded=degraded,
    )


def report_hardware(runtime: Runtime, gpus: Sequence[GpuStatus]) -> GpuReport:
    """Report the GPUs of this host, which `gpus.query_gpus` returns, its processor, devices, and loaded models."""
    states = runtime.models.states()
    models = {state.name: state.device_model.report() for state in states if state.device_model is not None}
    message = (
        f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}." if gpus else "No NVIDIA GPU; models run on the CPU."
    )
    hosts = [HostReport(host=host.host, gpus=list(host.gpus), cpu=host.cpu) for host in runtime.devices.hosts]
    devices = [_report_device(device) for device in runtime.devices.all]
    return GpuReport(
        message=message, gpus=list(gpus), cpu=host.query_cpu(), hosts=hosts, devices=devices, models=models
    )


def _report_device(device: Device) -> DeviceReport:
    queue = device.scheduler.queue
    return DeviceReport(
        name=device.name,
        host=device.host,
        waiting=queue.waiting,
        running=len(queue.running),
        models=sorted(device.loaded_models),
        loaded_bytes=loaded_bytes(device),
        problem=device.problem,
        given_back=device.state is DeviceState.GIVEN_BACK,
        starting=device.state is DeviceState.STARTING,
    )


def report_requests(runtime: Runtime) -> Iterator[RequestReport]:
    """Report the requests at every device: those that run, then those that wait."""
    for device in runtime.devices.all:
        queue = device.scheduler.queue
        for job in queue.jobs:
            state, progress = job.state, queue.progress(job)
            # Others have ended meanwhile.
            if state in {"waiting", "running"}:
                yield RequestReport(
                    device=device.name,
                    model=job.name,
                    state=state,
                    progress=JobProgress(done=progress.done, total=progress.total),
                    seconds=job.seconds_waited if state == "waiting" else job.seconds_run,
                    seconds_left=queue.seconds_left(job),
                )


def report_recent(runtime: Runtime) -> list[SegmentedReport]:
    """Report the last segmentations, newest first."""
    return [
        SegmentedReport(**segmented._asdict() | {"ended": datetime.fromtimestamp(segmented.ended, UTC)})
        for segmented in runtime.metrics.recent
    ]


def report_learning(trainings: Trainings, annotations: AnnotationStore) -> LearningReport:
    """Report trainings, annotated stacks and trained models. Blocks while folders are read."""
    try:
        trainings.check_enabled()
        problem = None
    except SwitchedOff as error:
        problem = str(error)
    running, waiting = trainings.queue.running_and_waiting()
    records = [*([] if running is None else [running]), *waiting]
    return LearningReport(
        problem=problem,
        trainings=list(map(_report_progress, records)),
        annotations=annotations.measure().stacks,
        models=trainings.trained_models.count(),
        models_limit=trainings.trained_models.most,
    )


def _report_progress(record: TrainingRecord) -> TrainingProgress:
    return TrainingProgress(
        name=record.name,
        base_model=record.base_model,
        state=record.state,
        stage=record.stage if record.state == "running" else None,
        step=record.step,
        steps=record.steps,
        seconds_left=record.seconds_left,
    )


def report_disks(runtime: Runtime) -> list[DiskReport]:
    """Report the disk space that files of each kind take. Blocks while folders are read."""
    return [DiskReport(files=kind, **usage._asdict()) for kind, usage in runtime.measure_disks().items()]
