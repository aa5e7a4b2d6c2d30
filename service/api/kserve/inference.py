"""Segment the tensor of an inference request along the path of `POST /segment`."""

from __future__ import annotations

import math
from functools import partial
from urllib.parse import urlencode

from fastapi import Request, Response

from service.api.kserve.body import BodyStream, TiffUpload, receive_json
from service.api.kserve.responses import build_inference_response, check_json_values
from service.api.requests.admission import admit
from service.api.requests.body import segment_stack
from service.core.errors import BadParameter
from service.core.quantities import TimeRange
from service.models.spec import ModelSpec
from service.serving.runtime import Runtime


async def infer(request: Request, runtime: Runtime, spec: ModelSpec) -> Response:
    """Receive a request for a model, and return the response with its output.

    Raises the errors of `receive_json`, `admit` and `segment_stack`.
    """
    stream = BodyStream(request)
    received = await receive_json(request, stream, runtime.settings.limits.upload_bytes)
    message, shape = received.message, received.message.input.shape
    parameters = {"model": spec.name} | message.segmentation_parameters
    if not message.is_output_binary and "axes" not in parameters:
        check_json_values(math.prod(shape[-3:]))
    stack_request = _make_stack_request(request, TiffUpload(request, stream, received), parameters)
    admission = await admit(stack_request, runtime)
    if isinstance(admission.query.selection.time, TimeRange):
        raise BadParameter("time: an output has one time point. Use POST /segment for several.", parameter="time")
    respond = partial(build_inference_response, request, runtime, message)
    return await segment_stack(stack_request, runtime, admission, respond)


def _make_stack_request(request: Request, upload: TiffUpload, parameters: dict[str, str]) -> Request:
    """Return the request to `/segment` that the same client would send with a TIFF. It is only passed to functions."""
    headers = [(b"content-type", b"image/tiff"), (b"content-length", str(upload.nbytes).encode())]
    scope = {**request.scope, "query_string": urlencode(parameters).encode(), "headers": headers}
    return Request(scope, upload.receive)
