"""GET /status: what the service does at the moment, for an admin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from service.api.auth import check_admin
from service.api.dependencies import RuntimeDependency
from service.api.routes.hardware import gpu
from service.api.routes.health import health
from service.api.routes.models import list_models
from service.api.schemas import JobProgress, RequestReport, SegmentedReport, Status
from service.serving.runtime import Runtime

router = APIRouter(tags=["operation"])


@router.get("/status")
async def status(request: Request, runtime: RuntimeDependency) -> Status:
    """Everything about the service's state in one answer, for an admin: `/health`, `/gpu`, `/models` and more.

    That is the requests that run and wait, and the stages of the last 50 segmentations since the service was started,
    without names of files or keys.
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
    )


def _report_requests(runtime: Runtime) -> Iterator[RequestReport]:
    for worker in runtime.device_workers:
        queue = worker.queue
        for job in queue.jobs:
            state, progress = job.state, queue.progress(job)
            # Others have ended meanwhile.
            if state in {"waiting", "running"}:
                yield RequestReport(
                    device=worker.name,
                    model=job.name,
                    state=state,
                    progress=JobProgress(done=progress.done, total=progress.total),
                    seconds=job.seconds_waited if state == "waiting" else job.seconds_run,
                    seconds_left=queue.seconds_left(job),
                )
