"""POST /inspect: what would be done with a file, without doing it."""

from __future__ import annotations

from functools import partial

import numpy as np
from fastapi import APIRouter, Request

from service.errors import RequestError
from service.routes.requests import (
    BODY,
    AdmittedQuery,
    RuntimeDependency,
    time_limit,
    while_connected,
    with_fields,
    work_folder,
)
from service.routes.threads import in_thread
from service.routes.uploads import receive
from service.schemas import Inspection
from service.volume import Array, Description, Volume

router = APIRouter(tags=["segmentation"])


@router.post("/inspect", openapi_extra=BODY)
async def inspect(request: Request, runtime: RuntimeDependency, query: AdmittedQuery) -> Inspection:
    """Say what was understood of a file (axes, voxel size, channels), what segmenting it would do and take.

    The same body and parameters as `/segment`; no pixel is decoded and the device is not used.
    """
    limits = runtime.settings.limits
    async with work_folder(runtime) as folder, time_limit(limits.request_seconds):
        upload = await receive(request, folder, limits.upload_bytes)
        query = with_fields(query, upload.fields)
        segmenter = runtime.segmenter(query.model)
        look = partial(runtime.inspect, upload.path, query.selection)
        file = await while_connected(request, in_thread(look, runtime.readers))
    spec = segmenter.spec
    output, estimate, problem = query.output, None, None
    try:
        output = segmenter.output(query.options)
        estimate = segmenter.estimate(_hollow(file), query.options)
    except RequestError as error:
        problem = str(error)
    return Inspection(
        file=file,
        model=spec.identifier,
        output=output,
        normalisation=spec.input.normalisation.model_dump(),
        estimate=estimate,
        problem=problem,
    )


def _hollow(file: Description) -> Volume:
    """A volume of the described shape whose pixels cannot be read."""

    def read(_z0: int, _z1: int) -> Array:
        raise RequestError("Only described, not read.")

    return Volume(file.shape, np.dtype(file.dtype), read, file.voxel_size, ("",) * file.shape[0])
