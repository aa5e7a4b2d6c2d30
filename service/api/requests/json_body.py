"""JSON bodies of requests, with a limited size."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.core.errors import Cancelled, TooLarge, UnsupportedMedia
from service.serving.parameters import describe_validation_errors

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, model: type[M], max_bytes: int) -> M:
    """Read the JSON body of a request.

    Raises UnsupportedMedia for other media types, TooLarge for a body of more than `max_bytes`, BadParameter for an
    invalid body, and Cancelled if the client disconnects.
    """
    # Refuse other media types, because browsers send some of them to other origins without a CORS preflight request.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia("Send the parameters as JSON, with Content-Type: application/json.")
    body, has_more = bytearray(), True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("The client disconnected while it was sending the request.")
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise TooLarge(f"The body is larger than {max_bytes:,} bytes. Send the entries in several requests.")
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as error:
        validation_errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise describe_validation_errors(validation_errors, model) from error
