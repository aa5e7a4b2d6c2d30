"""Responses about the service itself: health, hardware, and current activity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pydantic import BaseModel

from service.api.messages.jobs import JobProgress
from service.api.messages.models import ModelList, Report
from service.api.messages.text import Text
from service.core.errors import FeatureDisabled
from service.core.files.bundled import software_version
from service.core.hardware import host
from service.core.hardware.gpus import GpuStatus
from service.core.hardware.host import HostStatus
from service.serving.devices.device import Device, DeviceState, count_loaded_bytes
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.training_record import TrainingRecord, TrainingStage, TrainingState
from service.serving.learning.trainings import TrainingManager
from service.serving.runtime import Runtime


class Health(BaseModel):
    """Health of the service and the state of each model.

    - `status`: `ok`; `degraded` if the service is ready but has the problems in `degraded`, such as a broken model or
      missing sandboxing; or `unavailable` for the `reasons` listed.
    - `waiting`: number of waiting requests.
    """

    status: str
    version: str
    uptime_seconds: float
    waiting: int
    models: dict[str, str]
    reasons: list[Text]
    degraded: list[Text]


class Liveness(BaseModel):
    """Result of a liveness or readiness probe."""

    status: str = "alive"


class DeviceReport(BaseModel):
    """A device that the service uses.

    - `host`: for a device in a cluster, the host on which it was last seen; null for a device of this host.
    - `waiting`, `running`: number of requests.
    - `models`: names of the loaded models. `loaded_bytes` is their memory.
    - `problem`: why the device is unusable; null if it is usable.
    - `given_back`: whether the idle device was returned to the cluster. It is requested again when there is work.
    - `starting`: whether the device was requested from the cluster and has not responded yet.
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
    """GPUs and CPU of another host that has devices of the cluster."""

    host: str
    gpus: list[GpuStatus]
    cpu: HostStatus


class GpuReport(BaseModel):
    """Hardware of this host and the devices in use.

    - `gpus`: GPUs of this host. The list is empty without a GPU.
    - `hosts`: other hosts that have some of the devices.
    - `models`: how each loaded model runs (engine, precision and memory format).
    """

    message: str
    gpus: list[GpuStatus]
    cpu: HostStatus
    hosts: list[HostReport] = []
    devices: list[DeviceReport]
    models: dict[str, Report]


class RequestReport(BaseModel):
    """A request in the queue of a device.

    - `state`: `running`, or `waiting`, which includes reading its file and loading its model.
    - `seconds`: time in this state.
    - `seconds_left`: estimated time until the request is finished, including the queue; null if unknown.
    """

    device: str
    model: str
    state: str
    progress: JobProgress
    seconds: float
    seconds_left: float | None


class SegmentedReport(BaseModel):
    """A finished segmentation. `seconds` is the time per stage, in order."""

    ended: datetime
    model: str
    voxels: int
    objects: int | None
    seconds: dict[str, float]


class TrainingProgress(BaseModel):
    """A running or waiting training. `name` is the new model's name, and `steps` the planned steps, null if unknown."""

    name: str
    base_model: str
    state: TrainingState
    stage: TrainingStage | None
    step: int
    steps: int | None
    seconds_left: float | None


class LearningReport(BaseModel):
    """Annotated stacks, trainings and trained models of all API keys.

    - `problem`: why training is not available on this service; null if it is available.
    - `trainings`: the running training, then the waiting ones in queue order.
    - `annotations`: number of annotated stacks.
    - `models`: number of trained models. `models_limit` is the maximum.
    """

    problem: str | None
    trainings: list[TrainingProgress]
    annotations: int
    models: int
    models_limit: int


class DiskReport(BaseModel):
    """Disk usage of one kind of files, in bytes.

    - `files`: `requests`, `results` (cached results), `jobs`, `stacks`, `annotations` or `trained-models`.
    - `used`, `limit`: disk space used and allowed; `limit` is null if there is no common limit for all API keys.
    - `free`, `total`: free space and size of the disk.
    """

    files: str
    used: int
    limit: int | None
    free: int
    total: int


class Status(BaseModel):
    """The current state of the service. Includes the content of `/health`, `/gpu` and `/models`.

    - `cpu_seconds`: CPU time of the service process, without the processes that read files.
    - `requests`: requests by device: running ones first, then waiting ones in queue order.
    - `recent`: the most recent segmentations, newest first.
    - `disk`: disk usage by kind of files.
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
    """Report the health of the service and the state of each model."""
    reasons, degraded = list(runtime.unready_reasons()), list(runtime.degradations())
    return Health(
        status="unavailable" if reasons else "degraded" if degraded else "ok",
        version=software_version(),
        uptime_seconds=round(runtime.uptime_seconds, 1),
        waiting=runtime.devices.waiting_count,
        models={model.name: model.state for model in runtime.models.list_states()},
        reasons=reasons,
        degraded=degraded,
    )


def report_hardware(runtime: Runtime, gpus: Sequence[GpuStatus]) -> GpuReport:
    """Report the hardware and loaded models. `gpus` are the GPUs of this host, from `gpus.query_gpus`."""
    states = runtime.models.list_states()
    models = {state.name: state.device_model.report() for state in states if state.device_model is not None}
    message = (
        f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}." if gpus else "No NVIDIA GPU. Models run on the CPU."
    )
    hosts = [HostReport(host=host.host, gpus=list(host.gpus), cpu=host.cpu) for host in runtime.devices.host_statuses]
    devices = [_report_device(device) for device in runtime.devices.all]
    return GpuReport(
        message=message, gpus=list(gpus), cpu=host.query_host(), hosts=hosts, devices=devices, models=models
    )


def _report_device(device: Device) -> DeviceReport:
    queue = device.scheduler.queue
    return DeviceReport(
        name=device.name,
        host=device.host,
        waiting=queue.waiting_count,
        running=len(queue.running_jobs),
        models=sorted(device.loaded_models),
        loaded_bytes=count_loaded_bytes(device),
        problem=device.problem,
        given_back=device.state is DeviceState.GIVEN_BACK,
        starting=device.state is DeviceState.STARTING,
    )


def report_requests(runtime: Runtime) -> Iterator[RequestReport]:
    """Report the requests of every device: running ones first, then waiting ones."""
    for device in runtime.devices.all:
        queue = device.scheduler.queue
        for job in queue.jobs:
            state, progress = job.state, queue.get_progress(job)
            # The job may have ended in the meantime.
            if state in {"waiting", "running"}:
                yield RequestReport(
                    device=device.name,
                    model=job.name,
                    state=state,
                    progress=JobProgress(done=progress.done, total=progress.total),
                    seconds=job.seconds_waited if state == "waiting" else job.seconds_run,
                    seconds_left=queue.estimate_seconds_left(job),
                )


def report_recent(runtime: Runtime) -> list[SegmentedReport]:
    """Report the most recent segmentations, newest first."""
    return [
        SegmentedReport(**segmented._asdict() | {"ended": datetime.fromtimestamp(segmented.ended, UTC)})
        for segmented in runtime.metrics.recent_segmentations
    ]


def report_learning(trainings: TrainingManager, annotations: AnnotationStore) -> LearningReport:
    """Report trainings, annotated stacks and trained models. Blocks while folders are read."""
    try:
        trainings.check_enabled()
        problem = None
    except FeatureDisabled as error:
        problem = str(error)
    running, waiting = trainings.queue.running_and_waiting()
    records = [*([] if running is None else [running]), *waiting]
    return LearningReport(
        problem=problem,
        trainings=list(map(_report_progress, records)),
        annotations=annotations.measure().stacks,
        models=trainings.trained_models.count(),
        models_limit=trainings.trained_models.max_models,
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
    """Report the disk usage of each kind of files. Blocks while folders are read."""
    return [DiskReport(files=kind, **usage._asdict()) for kind, usage in runtime.measure_disks().items()]
