"""GET /status: what the service does at the moment, for an admin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Request, Response

from service.api.access.authentication import check_admin
from service.api.dependencies import RuntimeDependency, get_annotations, get_trainings
from service.api.routes.hardware import gpu
from service.api.routes.health import health
from service.api.routes.models import list_models
from service.api.schemas import (
    DiskReport,
    JobProgress,
    LearningReport,
    RequestReport,
    SegmentedReport,
    Status,
    TrainingProgress,
)
from service.api.threads import run_in_thread
from service.core.errors import SwitchedOff
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.trainings import Trainings
from service.serving.runtime import Runtime

router = APIRouter(tags=["operation"])


@router.get("/status")
async def status(request: Request, runtime: RuntimeDependency) -> Status:
    """Everything about the service's state in one answer, for an admin: `/health`, `/gpu`, `/models` and more.

    That is the requests that run and wait, and the stages of the last 50 segmentations since the service was started,
    without names of files or keys, the trainings, and what is kept on disk.
    """
    check_admin(request, runtime.settings.access)
    return Status(
        # The state of health is no state of this answer.
        health=await health(runtime, Response()),
        hardware=await gpu(runtime),
        models=await list_models(request, runtime),
        cpu_seconds=time.process_time(),
        requests=list(_report_requests(runtime)),
        recent=[
            SegmentedReport(**segmented._asdict() | {"ended": datetime.fromtimestamp(segmented.ended, UTC)})
            for segmented in runtime.metrics.recent
        ],
        learning=await run_in_thread(partial(_report_learning, get_trainings(request), get_annotations(request))),
        disk=[
            DiskReport(files=kind, **usage._asdict())
            for kind, usage in (await run_in_thread(runtime.measure_disks)).items()
        ],
    )


def _report_learning(trainings: Trainings, annotations: AnnotationStore) -> LearningReport:
    try:
        trainings.check_enabled()
        problem = None
    except SwitchedOff as error:
        problem = str(error)
    running, waiting = trainings.queue.running_and_waiting()
    return LearningReport(
        problem=problem,
        trainings=[
            TrainingProgress(
                name=record.name,
                base_model=record.base_model,
                state=record.state,
                stage=record.stage if record.state == "running" else None,
                step=record.step,
                steps=record.steps,
                seconds_left=record.seconds_left,
            )
            for record in (*([] if running is None else [running]), *waiting)
        ],
        annotations=annotations.measure().stacks,
        models=trainings.trained_models.count(),
        models_limit=trainings.trained_models.most,
    )


def _report_requests(runtime: Runtime) -> Iterator[RequestReport]:
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
