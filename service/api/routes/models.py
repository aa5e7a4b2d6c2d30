"""/models: facts and state of the models that are served, and reading their folders again."""

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
SAMPLE: dict[int | str, dict[str, Any]] = {200: {"description": "A TIFF.", "content": {"image/tiff": _BINARY}}}
PICTURE: dict[int | str, dict[str, Any]] = {200: {"description": "A PNG.", "content": {"image/png": _BINARY}}}


@router.get("/models")
async def list_models(request: Request, runtime: RuntimeDependency) -> ModelList:
    """Every model of the repository with its state; those that are not loaded are when they are first asked for."""
    caller = identify(request, runtime.settings.access)
    return report_models(runtime, partial(get_trainings(request).trained_models.may_remove, **caller._asdict()))


@router.get("/models/{name}")
async def show_model(request: Request, name: str, runtime: RuntimeDependency) -> ModelInfo:
    """One model: its facts, and the engine, precision and memory format in use, with warnings."""
    caller, model = identify(request, runtime.settings.access), runtime.models.state(name)
    return report_model(
        model, removable=get_trainings(request).trained_models.may_remove(model, caller.owner, everyone=caller.everyone)
    )


@router.delete("/models/{name}", status_code=204)
async def remove(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, name: str) -> None:
    """Delete a model that a training has made, for the key that has trained it and for admins.

    Requests that compute with it finish. A model that a job, a training or the configuration needs is kept.
    """
    access = runtime.settings.access
    if not access.keys:
        check_admin(request, access)
    owner, everyone = identify(request, access)
    remove_model = get_trainings(request).trained_models.remove
    await run_in_thread(partial(remove_model, name, owner, everyone=everyone, has_jobs=async_jobs.uses))


@router.get("/models/{name}/sample", response_class=FileResponse, responses=SAMPLE)
async def sample(runtime: RuntimeDependency, name: str) -> FileResponse:
    """The stack that the model is tried with, as a TIFF. Models without one answer 404."""
    spec = runtime.models.spec(name)
    if spec.sample is None:
        raise HTTPException(404)
    return FileResponse(spec.folder / spec.sample.input, media_type="image/tiff", filename=f"{name}-sample.tif")


@router.get("/models/{name}/picture", response_class=FileResponse, responses=PICTURE)
async def picture(runtime: RuntimeDependency, name: str) -> FileResponse:
    """A picture of what the model finds in its sample, as a PNG. Models without one answer 404."""
    file = runtime.models.spec(name).folder / PICTURE_FILE
    if not file.is_file():
        raise HTTPException(404)
    return FileResponse(file, media_type="image/png")


@router.post("/models/reload")
async def reload_models(request: Request, runtime: RuntimeDependency) -> ModelReload:
    """Read the model folders again, for an admin: add, replace and remove models without a restart.

    The answer comes once models that were loaded and have changed are loaded anew. Requests that run keep the model
    that they have; where a new one is broken, the earlier one stays.
    """
    check_admin(request, runtime.settings.access)
    return ModelReload(**(await run_in_thread(runtime.models.reload))._asdict())
