"""/trainings: training runs, which improve models by training them on annotated stacks in the background."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from service.api.access.authentication import check_trainer, has_admin_rights
from service.api.dependencies import RuntimeDependency, get_caller, get_trainings
from service.api.messages.headers import make_url_path
from service.api.messages.learning import ID_PATTERN, TrainingList, TrainingReport, TrainingRequest, report_training
from service.api.requests.json_body import describe_json_body, read_json
from service.serving.learning.training_manager import NewTraining
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["learning"])

# Maximum size of the JSON body.
MAX_BODY_BYTES = 2**16
TrainingId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of the training run.")]

ACCEPTED_RESPONSES: dict[int | str, dict[str, Any]] = {
    202: {"description": "The training run has been accepted and is waiting in the queue.", "model": TrainingReport}
}


@router.post(
    "/trainings",
    status_code=202,
    responses=ACCEPTED_RESPONSES,
    openapi_extra=describe_json_body(TrainingRequest),
)
async def submit_training(request: Request, runtime: RuntimeDependency) -> Response:
    """Train a model on annotated stacks.

    The new model is available under its own name when the training run has ended. Only one training run is active at a
    time, in a separate process with low priority. The service continues to process other requests.
    """
    trainings, access = get_trainings(request), runtime.settings.access
    trainings.check_enabled()
    check_trainer(request, access)
    body = await read_json(request, TrainingRequest, MAX_BODY_BYTES)
    new_training = NewTraining(**body.model_dump())
    submit = partial(trainings.submit, new_training, get_caller(request), is_admin=has_admin_rights(request, access))
    record = await run_in_thread(submit)
    report = await run_in_thread(partial(report_training, trainings, record))
    return JSONResponse(
        report.model_dump(mode="json"),
        202,
        headers={"Location": make_url_path(request.scope, f"/trainings/{report.id}")},
    )


@router.get("/trainings")
async def list_trainings(request: Request, runtime: RuntimeDependency) -> TrainingList:
    """List the caller's training runs, newest first.

    For admins, the list contains the training runs of all API keys.
    """
    trainings, is_admin = get_trainings(request), has_admin_rights(request, runtime.settings.access)
    caller = get_caller(request)

    def report_all() -> list[TrainingReport]:
        return [
            report_training(trainings, record)
            for record in trainings.queue.list_newest_first(caller, is_admin=is_admin)
        ]

    return TrainingList(trainings=await run_in_thread(report_all))


@router.get("/trainings/{training}")
async def get_training(request: Request, runtime: RuntimeDependency, training: TrainingId) -> TrainingReport:
    """Get the state and progress of a training run.

    Includes the loss curves, and whether the new model is better than the base model.
    """
    trainings, is_admin = get_trainings(request), has_admin_rights(request, runtime.settings.access)
    record = trainings.queue.find(training, get_caller(request), is_admin=is_admin)
    return await run_in_thread(partial(report_training, trainings, record))


@router.delete("/trainings/{training}", status_code=204)
async def cancel_training(request: Request, runtime: RuntimeDependency, training: TrainingId) -> None:
    """Cancel or delete a training run.

    A waiting or running training run is cancelled. A training run that has ended is deleted, but its model is kept.
    """
    is_admin = has_admin_rights(request, runtime.settings.access)
    await run_in_thread(partial(get_trainings(request).cancel, training, get_caller(request), is_admin=is_admin))
