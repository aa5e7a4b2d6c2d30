"""GET /health: alive as long as the process answers, ready once the models that are loaded at start are warm."""

from __future__ import annotations

from fastapi import APIRouter, Response

from service.api.dependencies import RuntimeDependency
from service.api.schemas import Health, Liveness
from service.core.bundled import software_version
from service.core.errors import NotReady

router = APIRouter(tags=["health"])

# Paths of other inference servers too, so that existing probes work unchanged.
PREFIXES = ("", "/v1", "/v2")


@router.get("/health")
async def health(runtime: RuntimeDependency, response: Response) -> Health:
    """State of the service and of every model; 503 while it is not ready."""
    reasons, degraded = list(runtime.unready_reasons()), list(runtime.degradations())
    if reasons:
        response.status_code = 503
    return Health(
        status="unavailable" if reasons else "degraded" if degraded else "ok",
        version=software_version(),
        uptime_seconds=round(runtime.uptime_seconds, 1),
        waiting=runtime.devices.waiting,
        models={model.name: model.state for model in runtime.models.states()},
        reasons=reasons,
        degraded=degraded,
    )


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
        router.add_api_route(f"{_prefix}/health/{_name}", _endpoint, include_in_schema=_prefix == "")
        router.add_api_route(f"{_prefix}/health/{_name}", _endpoint, methods=["HEAD"], include_in_schema=False)

# Many load balancers and `wget --spider` send HEAD and look at the status alone.
router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
