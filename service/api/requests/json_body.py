"""JSON bodies of requests, with a limited size."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.api.messages.headers import get_list_header
from service.core.errors import BadParameter, Cancelled, TooLarge, UnsupportedMedia
from service.serving.parameters import MAX_NAME_LENGTH, describe_validation_errors

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, model: type[M], max_bytes: int) -> M:
    """Read the JSON body of a request.

    Raises UnsupportedMedia for other media types and for compressed bodies, TooLarge for a body of more than
    `max_bytes`, BadParameter for an invalid body, and Cancelled if the client disconnects.
    """
    # Refuse other media types, because browsers send some of them to other origins without a CORS preflight request.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia("Send the parameters as JSON, with Content-Type: application/json.")
    encoding = get_list_header(request.scope, b"content-encoding")
    if encoding.lower() not in {"", "identity"}:
        raise UnsupportedMedia(f"Content-Encoding {encoding[:100]} is not supported. Send JSON without one.")
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
        parameters = model.model_validate_json(bytes(body))
    except ValidationError as error:
        validation_errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise describe_validation_errors(validation_errors, model) from error
    # pydantic uses the last one of several members with the same name. The values are not needed again.
    json.loads(body, object_pairs_hook=_refuse_repeated_members, parse_int=str, parse_float=str)
    return parameters


def _refuse_repeated_members(members: list[tuple[str, Any]]) -> None:
    """Raise BadParameter if a JSON object has two members with the same name."""
    for name, count in Counter(name for name, _ in members).items():
        if count > 1:
            shown_name = name[:MAX_NAME_LENGTH]
            raise BadParameter(
                f"The parameter {shown_name} is given {count} times. Send it once.", parameter=shown_name
            )


def describe_json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body for the argument `openapi_extra` of a route."""
    schema = model.model_json_schema()
    content = {"application/json": {"schema": _inline_definitions(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inline_definitions(node: Any, definitions: dict[str, Any]) -> Any:
    """Replace the references in a JSON schema, because they would not be valid within an OpenAPI document."""
    if isinstance(node, list):
        return [_inline_definitions(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline_definitions(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {name: _inline_definitions(value, definitions) for name, value in node.items()}
