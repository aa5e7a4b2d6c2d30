"""/trainings: make models better by training them on annotated stacks, in the background."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from service.api.access.authentication import check_trainer, is_admin
from service.api.dependencies import RuntimeDependency, get_caller, get_trainings
from service.api.messages.learning import ID_PATTERN, TrainingList, TrainingReport, TrainingRequest, report_training
from service.core.errors import Cancelled, TooLarge, UnsupportedMedia
from service.serving.learning.trainings import NewTraining
from service.serving.parameters import describe_faults
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["learning"])

MAX_BODY_BYTES = 2**16
TrainingId = Annotated[str, Path(pattern=ID_PATTERN, description="The id of the training.")]

BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": TrainingRequest.model_json_schema()}}}
}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"description": "The training waits for its turn.", "model": TrainingReport}
}


@router.post("/trainings", status_code=202, responses=ACCEPTED, openapi_extra=BODY)
async def submit(request: Request, runtime: RuntimeDependency) -> Response:
    """Train a model on annotated stacks; it is served under its own name once it is done.

    One training runs at a time, with little priority, in a process of its own; requests go on meanwhile.
    """
    trainings, access = get_trainings(request), runtime.settings.access
    trainings.check_enabled()
    check_trainer(request, access)
    given = await _read_body(request)
    asked = NewTraining(**given.model_dump())
    work = partial(trainings.submit, asked, get_caller(request), admin=is_admin(request, access))
    record = await run_in_thread(work)
    report = await run_in_thread(partial(report_training, trainings, record))
    return JSONResponse(report.model_dump(mode="json"), 202, headers={"Location": f"/trainings/{report.id}"})


@router.get("/trainings")
async def list_trainings(request: Request, runtime: RuntimeDependency) -> TrainingList:
    """The caller's trainings, those of all keys for an admin, newest first."""
    trainings, everyone = get_trainings(request), is_admin(request, runtime.settings.access)
    caller = get_caller(request)

    def report_all() -> list[TrainingReport]:
        return [report_training(trainings, record) for record in trainings.queue.newest(caller, everyone=everyone)]

    return TrainingList(trainings=await run_in_thread(report_all))


@router.get("/trainings/{training}")
async def show(request: Request, runtime: RuntimeDependency, training: TrainingId) -> TrainingReport:
    """State and progress of a training, its curves, and whether the new model is better."""
    trainings, everyone = get_trainings(request), is_admin(request, runtime.settings.access)
    record = trainings.queue.find(training, get_caller(request), everyone=everyone)
    return await run_in_thread(partial(report_training, trainings, record))


@router.delete("/trainings/{training}", status_code=204)
async def cancel(request: Request, runtime: RuntimeDependency, training: TrainingId) -> None:
    """Cancel a training that waits or runs; forget one that is over. The model that it made stays."""
    everyone = is_admin(request, runtime.settings.access)
    await run_in_thread(partial(get_trainings(request).cancel, training, get_caller(request), everyone=everyone))


async def _read_body(request: Request) -> TrainingRequest:
    """Read the JSON body. Raises UnsupportedMedia, TooLarge, BadParameter, and Cancelled when the client hangs up."""
    # Other types need no leave of the service when a page of another host sends them.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia("A training is asked for as JSON, with Content-Type: application/json.")
    body, more = bytearray(), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("The client went away while sending.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"The request has more than {MAX_BODY_BYTES:,} bytes; train on fewer annotated stacks.")
    try:
        return TrainingRequest.model_validate_json(bytes(body))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise describe_faults(faults, TrainingRequest) from error
