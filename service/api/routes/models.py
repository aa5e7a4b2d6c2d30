"""/models: list, inspect, delete and reload the models of the service."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from service.api.access.authentication import check_admin, identify
from service.api.dependencies import AsyncJobsDependency, RuntimeDependency, get_trainings
from service.api.messages.models import PICTURE_FILE, ModelInfo, ModelList, ModelReload, report_model, report_models
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["models"])

_BINARY = {"schema": {"type": "string", "format": "binary"}}
SAMPLE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A TIFF.", "content": {"image/tiff": _BINARY}}
}
PICTURE_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"description": "A PNG.", "content": {"image/png": _BINARY}}}


@router.get("/models")
async def list_models(request: Request, runtime: RuntimeDependency) -> ModelList:
    """List all models with their state.

    A model that is not loaded yet is loaded by the first request that uses it.
    """
    caller = identify(request, runtime.settings.access)
    return report_models(runtime, partial(get_trainings(request).trained_models.can_delete, **caller._asdict()))


@router.get("/models/{name}")
async def show_model(request: Request, name: str, runtime: RuntimeDependency) -> ModelInfo:
    """Get a model.

    Returns its metadata, the engine, precision and memory format that it runs with, and warnings.
    """
    caller, model = identify(request, runtime.settings.access), runtime.models.get_state(name)
    return report_model(
        model, removable=get_trainings(request).trained_models.can_delete(model, caller.owner, is_admin=caller.is_admin)
    )


@router.delete("/models/{name}", status_code=204)
async def remove(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, name: str) -> None:
    """Delete a model that was trained on this service.

    Only the API key that trained the model and admins may delete it. Running requests finish. A model that is still
    used by a job, a training or the configuration cannot be deleted.
    """
    access = runtime.settings.access
    if not access.keys:
        check_admin(request, access)
    owner, everyone = identify(request, access)
    remove_model = get_trainings(request).trained_models.delete
    await run_in_thread(partial(remove_model, name, owner, is_admin=everyone, has_jobs=async_jobs.uses_model))


@router.get("/models/{name}/sample", response_class=FileResponse, responses=SAMPLE_RESPONSES)
async def sample(runtime: RuntimeDependency, name: str) -> FileResponse:
    """Download the sample stack of a model as a TIFF.

    Returns 404 if the model has none.
    """
    spec = runtime.models.get_spec(name)
    if spec.sample is None:
        raise HTTPException(404)
    return FileResponse(spec.folder / spec.sample.input, media_type="image/tiff", filename=f"{name}-sample.tif")


@router.get("/models/{name}/picture", response_class=FileResponse, responses=PICTURE_RESPONSES)
async def picture(runtime: RuntimeDependency, name: str) -> FileResponse:
    """Download an image of a model's result for its sample as a PNG.

    Returns 404 if the model has none.
    """
    file = runtime.models.get_spec(name).folder / PICTURE_FILE
    if not file.is_file():
        raise HTTPException(404)
    return FileResponse(file, media_type="image/png")


@router.post("/models/reload")
async def reload_models(request: Request, runtime: RuntimeDependency) -> ModelReload:
    """Reload the model folders.

    Adds, replaces and removes models without a restart. Only for admins. The response is sent when all loaded models
    that have changed are loaded again. Running requests continue with their current model. If a new version cannot be
    loaded, the previous version stays in use.
    """
    check_admin(request, runtime.settings.access)
    return ModelReload(**(await run_in_thread(runtime.models.reload))._asdict())
