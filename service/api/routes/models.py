"""/models: list, inspect, delete and reload the models of the service."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from service.api.access.authentication import check_admin, get_identity
from service.api.dependencies import RuntimeDependency, get_quota_name, get_trainings
from service.api.messages.headers import BINARY_CONTENT, OCTET_STREAM
from service.api.messages.models import ModelInfo, ModelList, ModelReload, find_picture, report_model, report_models
from service.api.requests.downloads import DownloadResponse
from service.api.requests.jobs import AsyncJobsDependency
from service.api.requests.pictures import choose_view, draw_view
from service.api.requests.volumes import open_sample
from service.formats.writers import draw_plane
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["models"])

SAMPLE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A TIFF file.", "content": {"image/tiff": BINARY_CONTENT, OCTET_STREAM: BINARY_CONTENT}}
}
PICTURE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "A PNG file.", "content": {"image/png": BINARY_CONTENT, OCTET_STREAM: BINARY_CONTENT}}
}


@router.get("/models")
async def list_models(request: Request, runtime: RuntimeDependency) -> ModelList:
    """List all models and their states.

    A model that is not loaded yet will be loaded for the first request that uses it.
    """
    identity = get_identity(request, runtime.settings.access)
    return report_models(runtime, partial(get_trainings(request).trained_models.can_delete, **identity._asdict()))


@router.get("/models/{name}")
async def get_model(request: Request, name: str, runtime: RuntimeDependency) -> ModelInfo:
    """Get the metadata and state of a model.

    If the model is loaded, also returns its engine, precision and memory format, and warnings.
    """
    identity, model = get_identity(request, runtime.settings.access), runtime.models.get_state(name)
    return report_model(
        model,
        removable=get_trainings(request).trained_models.can_delete(model, identity.owner, is_admin=identity.is_admin),
    )


@router.delete("/models/{name}", status_code=204)
async def delete_model(
    request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency, name: str
) -> None:
    """Delete a model that was trained on this service.

    A model can be deleted with the API key of the client that trained it, or by an admin. Running requests for the
    model are still completed. A model that a job, a training run or the configuration needs cannot be deleted.
    """
    access = runtime.settings.access
    if not access.keys:
        check_admin(request, access)
    owner, is_admin = get_identity(request, access)
    delete = get_trainings(request).trained_models.delete
    await run_in_thread(partial(delete, name, owner, is_admin=is_admin, has_jobs=async_jobs.uses_model))


@router.get("/models/{name}/sample", response_class=FileResponse, responses=SAMPLE_RESPONSES)
async def download_sample(runtime: RuntimeDependency, name: str) -> FileResponse:
    """Download the sample stack of a model as a TIFF file.

    Returns status 404 if the model has no sample stack.
    """
    spec = runtime.models.get_spec(name)
    if spec.sample is None:
        raise HTTPException(404)
    path = spec.folder / spec.sample.input
    return DownloadResponse(path, media_type="image/tiff", filename=f"{name}-sample.tif", stat_result=path.stat())


@router.get("/models/{name}/picture", response_class=FileResponse, responses=PICTURE_RESPONSES)
async def download_picture(request: Request, runtime: RuntimeDependency, name: str) -> Response:
    """Download a picture of what a model segments as a PNG file.

    This is the picture in the model folder, or else the middle plane of the model's sample with the outlines of its
    labels. Returns status 404 if the model has neither a picture nor a sample.
    """
    spec = runtime.models.get_spec(name)
    if (file := find_picture(spec)) is not None:
        return DownloadResponse(file, media_type="image/png", stat_result=file.stat())
    if spec.sample is None:
        raise HTTPException(404)
    volumes = await open_sample(request, runtime, spec)
    picture = await draw_view(runtime, get_quota_name(request), volumes, choose_view(volumes[0]), draw_plane)
    return Response(picture, media_type="image/png")


@router.post("/models/reload")
async def reload_models(request: Request, runtime: RuntimeDependency) -> ModelReload:
    """Reload the model folders.

    Adds, replaces and removes models without a restart. Requires admin rights. The response is sent once every
    loaded model that has changed has been reloaded. Running requests continue with their current model. If a new
    version of a model cannot be loaded, the previous version stays in use.
    """
    check_admin(request, runtime.settings.access)
    return ModelReload(**(await run_in_thread(runtime.models.reload))._asdict())
