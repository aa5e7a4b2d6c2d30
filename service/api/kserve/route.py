"""/v2: the Open Inference Protocol, for clients of Triton and KServe. The health endpoints are in `routes.status`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from service.api.dependencies import RuntimeDependency
from service.api.kserve import inference, messages

# The protocol has its own OpenAPI document, with which its clients are generated.
router = APIRouter(tags=["kserve"], include_in_schema=False)


@router.get("/v2")
async def describe_server() -> dict[str, Any]:
    """Describe the server."""
    return messages.describe_server()


@router.post("/v2/repository/index")
async def list_models(runtime: RuntimeDependency) -> list[dict[str, Any]]:
    """List the models."""
    return messages.describe_repository(runtime)


@router.get("/v2/models/{name}")
@router.get("/v2/models/{name}/versions/{version}")
async def describe_model(runtime: RuntimeDependency, name: str, version: str | None = None) -> dict[str, Any]:
    """Describe the input and the outputs of a model."""
    return messages.describe_model(runtime, messages.find_spec(runtime, name, version))


@router.get("/v2/models/{name}/config")
@router.get("/v2/models/{name}/versions/{version}/config")
async def describe_configuration(runtime: RuntimeDependency, name: str, version: str | None = None) -> dict[str, Any]:
    """Describe the configuration of a model."""
    return messages.describe_configuration(runtime, messages.find_spec(runtime, name, version))


@router.get("/v2/models/{name}/ready")
@router.get("/v2/models/{name}/versions/{version}/ready")
async def check_model(runtime: RuntimeDependency, name: str, version: str | None = None) -> dict[str, Any]:
    """Check that a model can be used. It may be loaded for the first request."""
    return {"name": messages.find_spec(runtime, name, version).name, "ready": True}


@router.post("/v2/models/{name}/infer")
@router.post("/v2/models/{name}/versions/{version}/infer")
async def infer(request: Request, runtime: RuntimeDependency, name: str, version: str | None = None) -> Response:
    """Segment a tensor, in the same way as `POST /segment`."""
    return await inference.infer(request, runtime, messages.find_spec(runtime, name, version))
