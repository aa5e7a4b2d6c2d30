"""Responses about the service itself: health, hardware, and current activity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pydantic import BaseModel

from service.api.messages.jobs import JobProgress
from service.api.messages.models import ModelList, RedactedEngineReport
from service.api.messages.text import RedactedText
from service.core.errors import FeatureDisabled
from service.core.files.bundled import get_software_version
from service.core.hardware import host
from service.core.hardware.gpus import GpuStatus
from service.core.hardware.host import HostStatus
from service.serving.devices.device import Device, DeviceState, count_loaded_bytes
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.training_manager import TrainingManager
from service.serving.learning.training_record import TrainingRecord, TrainingStage, TrainingState
from service.serving.runtime import Runtime


class Health(BaseModel):
    """Health of the service and the state of each model.

    - `status`: `ok`; `degraded` if the service is ready but has the problems listed in `degraded`, such as a broken
      model or a missing sandbox; or `unavailable` if the service is not ready, for the reasons listed in `reasons`.
    - `waiting`: number of waiting requests.
    - `models`: state of each model, by name.
    """

    status: str
    version: str
    uptime_seconds: float
    waiting: int
    models: dict[str, str]
    reasons: list[RedactedText]
    degraded: list[RedactedText]


class Liveness(BaseModel):
    """Result of a liveness or readiness probe."""

    status: str = "alive"


class DeviceReport(BaseModel):
    """A device that the service uses.

    - `host`: for a device in a cluster, the host on which the device was last seen; null for a device on this host.
    - `waiting`, `running`: number of waiting and running requests.
    - `models`: names of the loaded models. `loaded_bytes` is the total size of these models in memory.
    - `problem`: why the device cannot be used; null if it can be used.
    - `given_back`: whether the idle device was returned to the cluster. The service requests it again when there is
      work.
    - `starting`: whether the device has been requested from the cluster but has not responded yet.
    """

    name: str
    host: str | None = None
    waiting: int
    running: int
    models: list[str]
    loaded_bytes: int
    problem: RedactedText | None
    given_back: bool = False
    starting: bool = False


class HostReport(BaseModel):
    """GPUs and CPU of another cluster host on which the service uses devices."""

    host: str
    gpus: list[GpuStatus]
    cpu: HostStatus


class GpuReport(BaseModel):
    """Hardware of this host, and the devices that the service uses.

    - `message`: summary of the GPUs as a sentence.
    - `gpus`: GPUs of this host. The list is empty if there is no GPU.
    - `hosts`: other cluster hosts on which the service uses devices.
    - `models`: engine, precision and memory format of each loaded model, by name.
    """

    message: str
    gpus: list[GpuStatus]
    cpu: HostStatus
    hosts: list[HostReport] = []
    devices: list[DeviceReport]
    models: dict[str, RedactedEngineReport]


class RequestReport(BaseModel):
    """A request in the queue of a device.

    - `state`: `running`, or `waiting`, which includes the time for reading the file and loading the model.
    - `seconds`: time in this state, in seconds.
    - `seconds_left`: estimated time in seconds until the request is completed, including the time in the queue; null if
      unknown.
    """

    device: str
    model: str
    state: str
    progress: JobProgress
    seconds: float
    seconds_left: float | None


class SegmentationReport(BaseModel):
    """A completed segmentation. `seconds` is the duration of each stage in seconds, in the order of the stages."""

    ended: datetime
    model: str
    voxels: int
    objects: int | None
    seconds: dict[str, float]


class TrainingProgress(BaseModel):
    """A running or waiting training run.

    - `name`: name of the new model.
    - `steps`: expected number of training steps, which depends on the speed; null before the first step.
    """

    name: str
    base_model: str
    state: TrainingState
    stage: TrainingStage | None
    step: int
    steps: int | None
    seconds_left: float | None


class LearningReport(BaseModel):
    """Annotated stacks, training runs and trained models of all API keys.

    - `problem`: why training is not available on this service; null if it is available.
    - `trainings`: the training run in progress, followed by the waiting training runs in queue order.
    - `annotations`: number of annotated stacks.
    - `models`: number of trained models. `models_limit` is the maximum number.
    """

    problem: str | None
    trainings: list[TrainingProgress]
    annotations: int
    models: int
    models_limit: int


class DiskReport(BaseModel):
    """Disk usage of one kind of file, in bytes.

    - `files`: one of `requests`, `results` (cached results), `jobs`, `stacks`, `annotations` and `trained-models`.
    - `used`: disk space that these files use.
    - `limit`: maximum disk space for these files; null if there is no common limit for all API keys.
    - `free`, `total`: free space on the disk, and its total size.
    """

    files: str
    used: int
    limit: int | None
    free: int
    total: int


class Status(BaseModel):
    """Current state of the service, including the content of `/health`, `/gpu` and `/models`.

    - `cpu_seconds`: CPU time of the service process in seconds, not including the processes that read files.
    - `requests`: requests by device. For each device, running requests are followed by waiting ones in queue order.
    - `recent`: the most recent segmentations, newest first.
    - `disk`: disk usage by kind of file.
    """

    health: Health
    hardware: GpuReport
    models: ModelList
    cpu_seconds: float
    requests: list[RequestReport]
    recent: list[SegmentationReport]
    learning: LearningReport
    disk: list[DiskReport]


def report_health(runtime: Runtime) -> Health:
    """Report the health of the service and the state of each model."""
    reasons, degraded = list(runtime.list_unready_reasons()), list(runtime.list_degradations())
    return Health(
        status="unavailable" if reasons else "degraded" if degraded else "ok",
        version=get_software_version(),
        uptime_seconds=round(runtime.uptime_seconds, 1),
        waiting=runtime.devices.waiting_count,
        models={model.name: model.state for model in runtime.models.list_states()},
        reasons=reasons,
        degraded=degraded,
    )


def report_hardware(runtime: Runtime, gpus: Sequence[GpuStatus]) -> GpuReport:
    """Report the hardware and the loaded models. `gpus` are the GPUs of this host, as returned by `gpus.query_gpus`."""
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
    """Report the requests of every device: running requests, followed by waiting ones."""
    for device in runtime.devices.all:
        queue = device.scheduler.queue
        for job in queue.jobs:
            state, progress = job.state, queue.get_progress(job)
            # The job may have ended in the meantime.
            if state in {"waiting", "running"}:
                yield RequestReport(
                    device=device.name,
                    model=job.model_name,
                    state=state,
                    progress=JobProgress(done=progress.done, total=progress.total),
                    seconds=job.seconds_waited if state == "waiting" else job.seconds_run,
                    seconds_left=queue.estimate_seconds_left(job),
                )


def report_recent_segmentations(runtime: Runtime) -> list[SegmentationReport]:
    """Report the most recent segmentations, newest first."""
    return [
        SegmentationReport(**segmentation._asdict() | {"ended": datetime.fromtimestamp(segmentation.ended, UTC)})
        for segmentation in runtime.metrics.recent_segmentations
    ]


def report_learning(trainings: TrainingManager, annotations: AnnotationStore) -> LearningReport:
    """Report training runs, annotated stacks and trained models. Blocks while folders are read."""
    try:
        trainings.check_enabled()
        problem = None
    except FeatureDisabled as error:
        problem = str(error)
    running, waiting = trainings.queue.get_running_and_waiting()
    records = [*([] if running is None else [running]), *waiting]
    return LearningReport(
        problem=problem,
        trainings=list(map(_report_progress, records)),
        annotations=annotations.measure_usage().stack_count,
        models=trainings.trained_models.count_models().total(),
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


def report_disk_usage(runtime: Runtime) -> list[DiskReport]:
    """Report the disk usage of each kind of file. Blocks while folders are read."""
    return [DiskReport(files=kind, **usage._asdict()) for kind, usage in runtime.measure_disks().items()]
