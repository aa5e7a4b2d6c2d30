"""Description of a file, and estimate of the time and memory that its segmentation requires."""

from __future__ import annotations

from fastapi import Request

from service.api.dependencies import get_caller
from service.api.http.waiting import run_while_connected
from service.api.messages.stacks import Inspection
from service.api.requests.admission import select_model
from service.api.requests.body import inspect_file, receive_file
from service.core.errors import OutOfMemory, RequestError
from service.core.hardware import host
from service.inference.runner.memory_errors import check_memory
from service.serving.parameters import Query
from service.serving.runtime import Runtime


async def inspect_request(request: Request, runtime: Runtime, query: Query) -> Inspection:
    """Inspect the file of an admitted request. Raises the errors of `receive_file` and `inspect_file`."""
    async with receive_file(request, query) as file:
        query = file.request.query
        spec = select_model(runtime, query)
        description = await run_while_connected(request, inspect_file(runtime, file))
    estimator = runtime.get_estimator(spec)
    estimate, seconds, problems = None, None, [description.problem]
    try:
        estimate = runtime.estimate(spec, description, query.options)
        windows = description.volume_count * estimate.windows
        seconds = runtime.estimate_seconds(spec.name, windows, get_caller(request))
        check_memory(estimate, host.query_available_memory())
    except (RequestError, OutOfMemory) as error:
        problems.append(str(error))
    return Inspection(
        file=description,
        model=spec.identifier,
        output=estimator.get_output_kind(query.options),
        normalisation=spec.input.model_dump()["normalisation"],
        diameter=str(estimator.get_diameter_setting(query.options)),
        estimate=estimate,
        seconds=None if seconds is None else round(seconds, 1),
        problem=" ".join(filter(None, problems)) or None,
    )
