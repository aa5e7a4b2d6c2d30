"""GET /health, /gpu, /metrics, /limits and /status: how the service is, and what it allows."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from fastapi import APIRouter, Request, Response

from service.api.access.authentication import check_admin, check_trainer, identify
from service.api.dependencies import RuntimeDependency, get_annotations, get_trainings
from service.api.messages.learning import Abilities
from service.api.messages.models import report_models
from service.api.messages.status import (
    GpuReport,
    Health,
    Liveness,
    Status,
    report_disks,
    report_hardware,
    report_health,
    report_learning,
    report_recent,
    report_requests,
)
from service.core.errors import NotReady, SwitchedOff, Unauthorized
from service.core.hardware import gpus
from service.serving.metrics import CONTENT_TYPE
from service.serving.storage.threads import run_in_thread

router = APIRouter()

# Paths of other inference servers too, so that existing probes work unchanged.
PREFIXES = ("", "/v1", "/v2")


@router.get("/limits", tags=["operation"])
async def limits(request: Request, runtime: RuntimeDependency) -> Abilities:
    """Whether corrected labels are kept, how much of them, and whether the caller may train on them, else why not."""
    quota = runtime.settings.annotations.quota_bytes
    problem: str | None = None
    try:
        get_trainings(request).check_enabled()
        check_trainer(request, runtime.settings.access)
    except (SwitchedOff, Unauthorized) as error:
        problem = str(error)
    return Abilities(
        corrections=quota > 0,
        annotations_bytes=quota,
        training=problem is None,
        training_problem=problem,
        training_minutes=runtime.settings.trainings.minutes,
    )


@router.get("/health", tags=["health"])
async def health(runtime: RuntimeDependency, response: Response) -> Health:
    """State of the service and of every model; 503 while it is not ready."""
    report = report_health(runtime)
    if report.reasons:
        response.status_code = 503
    return report


async def live() -> Liveness:
    """200 as long as the process answers."""
    return Liveness()


async def ready(runtime: RuntimeDependency) -> Liveness:
    """200 once the models that are loaded at start are warm; 503 with the reasons before that and while stopping.

    The status is `degraded` instead of `ready` where `/health` tells of something that is wrong nevertheless.
    """
    reasons = runtime.unready_reasons()
    if reasons:
        raise NotReady(" ".join(reasons))
    return Liveness(status="degraded" if runtime.degradations() else "ready")


for _prefix in PREFIXES:
    for _name, _endpoint in (("live", live), ("ready", ready)):
        _path = f"{_prefix}/health/{_name}"
        router.add_api_route(_path, _endpoint, include_in_schema=_prefix == "", tags=["health"])
        router.add_api_route(_path, _endpoint, methods=["HEAD"], include_in_schema=False)

# Many load balancers and `wget --spider` send HEAD and look at the status alone.
router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)


@router.get("/gpu", tags=["operation"])
async def gpu(runtime: RuntimeDependency) -> GpuReport:
    """Every GPU with its memory, load and temperature, the processor, the devices in use, and each loaded model."""
    return report_hardware(runtime, await asyncio.to_thread(gpus.query_gpus))


@router.get("/metrics", tags=["operation"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(runtime: RuntimeDependency) -> Response:
    """Counters and stage times in Prometheus's text format."""
    return Response(await asyncio.to_thread(runtime.metrics.exposition), media_type=CONTENT_TYPE)


@router.get("/status", tags=["operation"])
async def status(request: Request, runtime: RuntimeDependency) -> Status:
    """Everything about the service's state in one answer, for an admin: `/health`, `/gpu`, `/models` and more.

    That is the requests that run and wait, and the stages of the last 50 segmentations since the service was started,
    without names of files or keys, the trainings, and what is kept on disk.
    """
    access = runtime.settings.access
    check_admin(request, access)
    trainings = get_trainings(request)
    may_remove = partial(trainings.trained_models.may_remove, **identify(request, access)._asdict())
    return Status(
        health=report_health(runtime),
        hardware=report_hardware(runtime, await asyncio.to_thread(gpus.query_gpus)),
        models=report_models(runtime, may_remove),
        cpu_seconds=time.process_time(),
        requests=list(report_requests(runtime)),
        recent=report_recent(runtime),
        learning=await run_in_thread(partial(report_learning, trainings, get_annotations(request))),
        disk=await run_in_thread(partial(report_disks, runtime)),
    )
