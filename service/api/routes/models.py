"""/models: facts and state of the models that are served, and reading their folders again."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from service.api.access.authentication import check_admin, is_admin
from service.api.dependencies import AsyncJobsDependency, RuntimeDependency, get_caller, get_trainings
from service.api.schemas import Loaded, ModelInfo, ModelList, ModelReload
from service.api.threads import run_in_thread
from service.serving.devices.models.state import ModelState

router = APIRouter(tags=["models"])

SAMPLE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A TIFF.",
        "content": {"image/tiff": {"schema": {"type": "string", "format": "binary"}}},
    }
}

PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"description": "A PNG.", "content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}
}
# In the model's folder.
PICTURE_FILE = "example.png"


@router.get("/models")
async def list_models(request: Request, runtime: RuntimeDependency) -> ModelList:
    """Every model of the repository with its state; those that are not loaded are when they are first asked for."""
    models = [_describe(request, model) for model in runtime.models.states()]
    return ModelList(default=runtime.models.default, models=models)


@router.get("/models/{name}")
async def show_model(request: Request, name: str, runtime: RuntimeDependency) -> ModelInfo:
    """One model: its facts, and the engine, precision and memory format in use, with warnings."""
    return _describe(request, runtime.models.state(name))


@router.delete("/models/{name}", status_code=204)
async def remove(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, name: str) -> None:
    """Delete a model that a training has made, for the key that has trained it and for admins.

    Requests that compute with it finish. A model that a job, a training or the configuration needs is kept.
    """
    owner, everyone = _identify(request)
    if not runtime.settings.access.keys:
        check_admin(request, runtime.settings.access)
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


def _identify(request: Request) -> tuple[str | None, bool]:
    """Return the caller as the owner of models, None without keys, and whether it is an admin."""
    access = request.app.state.runtime.settings.access
    return get_caller(request) if access.keys else None, is_admin(request, access)


def _describe(request: Request, model: ModelState) -> ModelInfo:
    owner, everyone = _identify(request)
    removable = get_trainings(request).trained_models.may_remove(model, owner, everyone=everyone)
    spec, engine = model.spec, model.device_model.report() if model.device_model else None
    if spec is None:
        return ModelInfo(name=model.name, state=model.state, removable=removable, problem=model.problem)
    return ModelInfo(
        name=spec.name,
        state=model.state,
        version=spec.version,
        summary=spec.summary,
        picture=f"/models/{spec.name}/picture" if (spec.folder / PICTURE_FILE).is_file() else None,
        licence=spec.licence,
        training_data=spec.training_data,
        architecture=spec.network,
        input=spec.input,
        outputs=spec.outputs,
        decoding=spec.decoding.kind,
        lineage=spec.lineage,
        removable=removable,
        engine=engine,
        loaded=model.device_model is not None,
        devices=[
            Loaded(device=device, bytes=loaded_model.nbytes, used=datetime.fromtimestamp(loaded_model.used, UTC))
            for device, loaded_model in model.loaded.items()
        ],
        problem=model.problem,
    )
