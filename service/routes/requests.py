"""What `/segment` and `/inspect` share: a folder per request, its parameters, and work that ends with the client."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError

from service.errors import BadParameter, Cancelled, TimedOut
from service.jobs import Job
from service.routes.uploads import translated
from service.runtime import Runtime
from service.schemas import Query

T = TypeVar("T")

BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                    "additionalProperties": {"type": "string", "description": "any query parameter"},
                }
            },
        },
    }
}


def _runtime(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


RuntimeDependency = Annotated[Runtime, Depends(_runtime)]


@asynccontextmanager
async def work_folder(runtime: Runtime) -> AsyncIterator[Path]:
    """A folder for one request, deleted with everything in it at the end. A full disk raises OutOfStorage."""
    try:
        folder = Path(tempfile.mkdtemp(dir=runtime.scratch))
    except OSError as error:
        raise translated(error) from error
    try:
        yield folder
    except OSError as error:
        raise translated(error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_fields(query: Query, fields: dict[str, str]) -> Query:
    """The parameters of the query string, and those of a form where the query is silent. Raises BadParameter."""
    if not fields:
        return query
    try:
        return Query.model_validate({**fields, **query.model_dump(exclude_unset=True)})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise BadParameter(f"The form's fields are not understood: {faults}") from error


async def outcome(request: Request, job: Job[T], seconds: float) -> T:
    """The job's result. Raises what the job raised, Cancelled when the client hangs up, TimedOut after `seconds`.

    In both cases the job is cancelled: it stops before its next batch of windows.
    """
    work = asyncio.wrap_future(job.future)
    gone = asyncio.ensure_future(_disconnected(request))
    racers: set[asyncio.Future[Any]] = {work, gone}
    try:
        await asyncio.wait(racers, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if gone.done():
            raise Cancelled("the client hung up")
        raise TimedOut(f"The request was not finished within {seconds:g} s; send a smaller part of the volume.")
    finally:
        job.cancel()
        gone.cancel()
        work.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
