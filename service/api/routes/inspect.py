"""POST /inspect: describe a file, and estimate what segmenting it would take."""

from __future__ import annotations

import threading

from fastapi import APIRouter, Request

from service.api.admission import REQUEST, AdmittedQuery, select_model
from service.api.cancellation import run_while_connected
from service.api.dependencies import RuntimeDependency, get_caller
from service.api.request_body import ReceivedFile, receive_file
from service.api.schemas import Inspection
from service.api.threads import run_in_thread
from service.core import host
from service.core.errors import OutOfMemory, RequestError
from service.core.timing import Stages
from service.core.types import Description
from service.inference.runner.estimator import Estimator
from service.inference.runner.memory_errors import check_memory
from service.serving.runtime import Runtime

router = APIRouter(tags=["segmentation"])


async def inspect_file(runtime: Runtime, file: ReceivedFile) -> Description:
    """Complete the file and describe it, in a thread that reads. Raises what `Reader.inspect` raises."""
    cancelled = threading.Event()

    def complete_and_inspect() -> Description:
        file.complete()
        selection = file.received.query.selection
        return runtime.reader.inspect(file.source, selection, shared=file.shared, cancelled=cancelled.is_set)

    return await run_in_thread(complete_and_inspect, runtime.read_threads.of(file.space.client), cancelled)


@router.post("/inspect", openapi_extra=REQUEST)
async def inspect(request: Request, runtime: RuntimeDependency, query: AdmittedQuery) -> Inspection:
    """Say what was understood of a file (axes, voxel size, channels), what segmenting it would do and take.

    The same body and parameters as `/segment`; no pixel is decoded and the device is not used.
    """
    async with receive_file(request, runtime, query, Stages()) as received:
        query = received.received.query
        spec = select_model(runtime, query)
        file = await run_while_connected(request, inspect_file(runtime, received))
    estimator = Estimator(spec, runtime.settings)
    estimate, seconds, problems = None, None, [file.problem]
    try:
        estimate = runtime.estimate(spec, file, query.options)
        windows = file.volumes * estimate.windows
        seconds = runtime.estimate_seconds(spec.name, windows, get_caller(request))
        check_memory(estimate, host.available_memory())
    except (RequestError, OutOfMemory) as error:
        problems.append(str(error))
    return Inspection(
        file=file,
        model=spec.identifier,
        output=estimator.output(query.options),
        normalisation=spec.input.normalisation.model_dump(),
        diameter=str(estimator.object_size(query.options)),
        estimate=estimate,
        seconds=None if seconds is None else round(seconds, 1),
        problem=" ".join(filter(None, problems)) or None,
    )
