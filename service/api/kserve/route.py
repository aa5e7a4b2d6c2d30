"""/v2: the Open Inference Protocol, for clients of Triton and KServe. The health endpoints are in `routes.status`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from service.api.dependencies import RuntimeDependency
from service.api.kserve import messages
from service.api.kserve.body import BodyStream, TiffUpload, receive_json
from service.api.kserve.responses import build_inference_response, check_json_values
from service.api.requests.admission import admit
from service.api.requests.responses import segment_stack
from service.core.errors import BadParameter
from service.core.quantities import TimeRange

# The protocol has its own OpenAPI document, with which its clients are generated.
router = APIRouter(tags=["kserve"], include_in_schema=False)


@router.get("/v2")
async def describe_server() -> dict[str, Any]:
    """Describe the server."""
    return messages.describe_server()


@router.post("/v2/repository/index")
async def list_models(runtime: RuntimeDependency) -> list[dict[str, Any]]:
    """List the models."""
    return messages.describe_repository(runtime)


@router.get("/v2/models/{name}")
@router.get("/v2/models/{name}/versions/{version}")
async def describe_model(runtime: RuntimeDependency, name: str, version: str | None = None) -> dict[str, Any]:
    """Describe the input and the outputs of a model."""
    return messages.describe_model(runtime, messages.find_spec(runtime, name, version))


@router.get("/v2/models/{name}/config")
@router.get("/v2/models/{name}/versions/{version}/config")
async def describe_configuration(runtime: RuntimeDependency, name: str, version: str | None = None) -> dict[str, Any]:
    """Describe the configuration of a model."""
    return messages.describe_configuration(runtime, messages.find_spec(runtime, name, version))


@router.get("/v2/models/{name}/ready")
@router.get("/v2/models/{name}/versions/{version}/ready")
async def check_model(runtime: RuntimeDependency, name: str, version: str | None = None) -> dict[str, Any]:
    """Check that a model can be used. It may be loaded for the first request."""
    return {"name": messages.find_spec(runtime, name, version).name, "ready": True}


@router.post("/v2/models/{name}/infer")
@router.post("/v2/models/{name}/versions/{version}/infer")
async def infer(request: Request, runtime: RuntimeDependency, name: str, version: str | None = None) -> Response:
    """Segment a tensor, in the same way as `POST /segment`."""
    spec = messages.find_spec(runtime, name, version)
    stream = BodyStream(request)
    received = await receive_json(request, stream, runtime.settings.limits.upload_bytes)
    message, shape = received.message, received.message.input.shape
    parameters = {"model": spec.name} | message.segmentation_parameters
    if not message.is_output_binary and "axes" not in parameters:
        check_json_values(math.prod(shape[-3:]))
    upload = TiffUpload(request, stream, received)
    headers = [(b"content-type", b"image/tiff"), (b"content-length", str(upload.nbytes).encode())]
    scope = {**request.scope, "query_string": urlencode(parameters).encode(), "headers": headers}
    stack_request = Request(scope, upload.receive)
    admission = await admit(stack_request, runtime)
    if isinstance(admission.query.selection.time, TimeRange):
        raise BadParameter("time: an output has one time point. Use POST /segment for several.", parameter="time")
    respond = partial(build_inference_response, request, runtime, message)
    return await segment_stack(stack_request, runtime, admission, respond)
