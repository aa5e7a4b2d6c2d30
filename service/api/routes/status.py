"""GET /health, /gpu, /metrics, /status and /limits: the state of the service, and what the caller may do."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from fastapi import APIRouter, Request, Response

from service.api.access.authentication import check_admin, check_trainer, get_identity
from service.api.dependencies import (
    RuntimeDependency,
    get_annotations,
    get_caller,
    get_trainings,
)
from service.api.messages.learning import CallerLimits
from service.api.messages.models import report_models
from service.api.messages.status import (
    GpuReport,
    Health,
    Liveness,
    Status,
    report_disk_usage,
    report_hardware,
    report_health,
    report_learning,
    report_recent_segmentations,
    report_requests,
)
from service.api.requests.jobs import AsyncJobsDependency
from service.core.errors import FeatureDisabled, NotReady, Unauthorized
from service.core.hardware import gpus
from service.serving.metrics import CONTENT_TYPE
from service.serving.storage.threads import run_in_thread

router = APIRouter()
monitoring_router = APIRouter()

# Path prefixes of health checks. The prefixes with a version are those of other inference servers, so that probes for
# these servers also work here.
HEALTH_PREFIXES = ("", "/v1", "/v2")


@router.get("/limits", tags=["operation"])
async def get_limits(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency) -> CallerLimits:
    """Get the limits for annotated stacks, training, jobs and folders on the host.

    Reports the quota for annotated stacks, whether the caller may train models, whether jobs survive a restart, and the
    names of the folders on the host that the caller may use.
    """
    quota = runtime.settings.annotations.quota_bytes
    problem: str | None = None
    try:
        get_trainings(request).check_enabled()
        check_trainer(request, runtime.settings.access)
    except (FeatureDisabled, Unauthorized) as error:
        problem = str(error)
    inputs, outputs = runtime.host_files.list_roots(get_caller(request))
    return CallerLimits(
        corrections=quota > 0,
        annotations_bytes=quota,
        training=problem is None,
        training_problem=problem,
        training_minutes=runtime.settings.trainings.minutes,
        temporary_jobs=async_jobs.is_temporary,
        inputs=inputs,
        outputs=outputs,
    )


@monitoring_router.get("/health", tags=["health"])
async def get_health(runtime: RuntimeDependency, response: Response) -> Health:
    """Get the health of the service and the state of each model.

    Returns status 503 while the service is not ready.
    """
    report = report_health(runtime)
    if report.reasons:
        response.status_code = 503
    return report


async def check_liveness() -> Liveness:
    """Check that the process responds.

    Always returns status 200.
    """
    return Liveness()


async def check_readiness(runtime: RuntimeDependency) -> Liveness:
    """Check that the service is ready for requests.

    Returns status 200 once all startup models are ready. Until then, and during shutdown, returns status 503 with the
    reasons. The member `status` is `degraded` instead of `ready` if `/health` reports problems.
    """
    reasons = runtime.list_unready_reasons()
    if reasons:
        raise NotReady(" ".join(reasons))
    return Liveness(status="degraded" if runtime.list_degradations() else "ready")


for _prefix in HEALTH_PREFIXES:
    for _name, _endpoint in (("live", check_liveness), ("ready", check_readiness)):
        _path = f"{_prefix}/health/{_name}"
        monitoring_router.add_api_route(_path, _endpoint, include_in_schema=_prefix == "", tags=["health"])


@router.get("/gpu", tags=["operation"])
async def get_hardware(runtime: RuntimeDependency) -> GpuReport:
    """Get the state of the hardware and of the devices that the service uses.

    Reports the memory, load and temperature of each GPU, the CPU, the devices, and the engine of each loaded model.
    """
    return report_hardware(runtime, await asyncio.to_thread(gpus.query_gpus))


@monitoring_router.get(
    "/metrics", tags=["operation"], response_class=Response, responses={200: {"content": {"text/plain": {}}}}
)
async def get_metrics(runtime: RuntimeDependency) -> Response:
    """Get metrics in the Prometheus text format."""
    return Response(await asyncio.to_thread(runtime.metrics.format_exposition), media_type=CONTENT_TYPE)


@router.get("/status", tags=["operation"])
async def get_status(request: Request, runtime: RuntimeDependency) -> Status:
    """Get the complete state of the service.

    Requires admin rights. Includes the content of `/health`, `/gpu` and `/models`, running and waiting requests, the 50
    most recent segmentations (since the service started) with the duration of each stage, training runs, and disk
    usage. File names and names of API keys are not included.
    """
    access = runtime.settings.access
    check_admin(request, access)
    trainings = get_trainings(request)
    can_delete = partial(trainings.trained_models.can_delete, **get_identity(request, access)._asdict())
    return Status(
        health=report_health(runtime),
        hardware=report_hardware(runtime, await asyncio.to_thread(gpus.query_gpus)),
        models=report_models(runtime, can_delete),
        cpu_seconds=time.process_time(),
        requests=list(report_requests(runtime)),
        recent=report_recent_segmentations(runtime),
        learning=await run_in_thread(partial(report_learning, trainings, get_annotations(request))),
        disk=await run_in_thread(partial(report_disk_usage, runtime)),
    )
