"""/stacks and /inspect: stacks that are uploaded once and then used several times, and descriptions of stacks."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request

from service.api.dependencies import RuntimeDependency, get_caller, get_stacks
from service.api.messages.stacks import Inspection, StackReport
from service.api.requests.admission import STACK_REQUEST, AdmittedQuery
from service.api.requests.body import incoming_folder, receive_file
from service.api.requests.inspection import inspect_request
from service.api.requests.jobs import AsyncJobsDependency
from service.core.errors import BadParameter
from service.serving.parameters import Query as Parameters
from service.serving.storage.stack_store import StoredStack
from service.serving.storage.threads import run_in_thread

router = APIRouter(tags=["stacks"])

StackId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The id of the stack.")]
# The route itself refuses parameters, with advice.
UPLOAD_REQUEST = {"parameters": [], "requestBody": STACK_REQUEST["requestBody"]}


@router.post("/stacks", status_code=201, openapi_extra=UPLOAD_REQUEST)
async def upload_stack(request: Request, runtime: RuntimeDependency, async_jobs: AsyncJobsDependency) -> StackReport:
    """Upload a stack for later requests.

    Later requests select the stack with the parameter `stack` instead of sending a body. Accepts the same body as
    `/segment`. The file is not parsed until a request uses it. Stacks that have not been used for a while may be
    deleted.
    """
    runtime.check_admission(get_caller(request))
    if request.query_params:
        raise _make_parameters_error()
    query = Parameters()
    async with receive_file(request, query, incoming_folder(async_jobs)) as file:
        if file.request.query != query:
            raise _make_parameters_error()

        def store() -> StoredStack:
            digest = file.complete() or ""
            return async_jobs.stacks.add(file.request.source, file.name, file.request.caller, digest)

        stack = await run_in_thread(store)
    return _report_stack(stack)


@router.get("/stacks/{stack}")
async def get_stack(request: Request, stack: StackId) -> StackReport:
    """Get the name and size of an uploaded stack."""
    return _report_stack(await run_in_thread(partial(get_stacks(request).find, stack, get_caller(request))))


@router.delete("/stacks/{stack}", status_code=204)
async def delete_stack(request: Request, stack: StackId) -> None:
    """Delete an uploaded stack.

    Jobs that use the stack continue.
    """
    await run_in_thread(partial(get_stacks(request).delete, stack, get_caller(request)))


@router.post("/inspect", openapi_extra=STACK_REQUEST)
async def inspect_stack(request: Request, runtime: RuntimeDependency, query: AdmittedQuery) -> Inspection:
    """Inspect a stack without segmenting it.

    Reports the axes, voxel size and channels of the file, and estimates the time and memory that its segmentation would
    require. Accepts the same body and parameters as `/segment`. No pixels are decoded, and no device is used.
    """
    return await inspect_request(request, runtime, query)


def _make_parameters_error() -> BadParameter:
    return BadParameter("POST /stacks has no parameters. Set the parameters in the requests that use the stack.")


def _report_stack(stack: StoredStack) -> StackReport:
    return StackReport(id=stack.id, name=stack.name, bytes=stack.nbytes)
