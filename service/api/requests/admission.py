"""Admission of a request before its body is received: checks of the parameters, queue, model and host files.

Errors that can be detected this early are reported immediately, before the client uploads a stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.datastructures import QueryParams

from service.api.dependencies import RuntimeDependency, get_caller, get_quota_name
from service.api.http.uploads import is_multipart
from service.api.messages.headers import BINARY_CONTENT, OCTET_STREAM, get_list_header
from service.core.errors import BadParameter
from service.models.spec import ModelSpec
from service.serving.parameters import MAX_NAME_LENGTH, Query, describe_validation_errors
from service.serving.results.answers import check_host_files
from service.serving.runtime import Runtime
from service.serving.storage.threads import run_in_thread

# Maximum number of query strings whose parsed parameters are cached.
MAX_CACHED_QUERIES = 64
# Limits on a query string. Each parameter may occur once. The longest values have a thousand characters, each of which
# takes up to twelve bytes if it is percent-encoded.
MAX_PARAMETERS = 32
MAX_QUERY_BYTES = 44_000

RESPOND_ASYNC = "respond-async"

# Schemas of the parameters in a query string, and of the same parameters as form fields, which cannot be null.
_PARAMETER_SCHEMAS = {
    name: {key: value for key, value in schema.items() if key != "default"}
    for name, schema in Query.model_json_schema()["properties"].items()
}
_FORM_FIELDS = {
    name: {**schema["anyOf"][0], "description": schema["description"]} for name, schema in _PARAMETER_SCHEMAS.items()
}

# OpenAPI description of a request with a stack. FastAPI could derive the parameters from a pydantic model, but it would
# then also parse them for every request, which takes longer than all other steps before the body combined.
STACK_REQUEST: dict[str, Any] = {
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": schema["description"]}
        for name, schema in _PARAMETER_SCHEMAS.items()
    ],
    "requestBody": {
        "description": "The stack. Omit the body if `input` or `stack` selects a stack that the service can access.",
        "required": False,
        "content": {
            "image/tiff": BINARY_CONTENT,
            OCTET_STREAM: BINARY_CONTENT,
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "string", "format": "binary"}, **_FORM_FIELDS},
                    "additionalProperties": False,
                }
            },
        },
    },
}
PREFER_HEADER = {
    "name": "prefer",
    "in": "header",
    "required": False,
    "schema": {"anyOf": [{"type": "string"}, {"type": "null"}], "examples": [RESPOND_ASYNC]},
    "description": f"`{RESPOND_ASYNC}`: create a job and return its status immediately, without waiting for the result"
    " (RFC 7240).",
}


def prefers_async(request: Request) -> bool:
    """Return whether the client prefers a job to waiting for the result (RFC 7240)."""
    preferences = get_list_header(request.scope, b"prefer").split(",")
    return RESPOND_ASYNC in (preference.partition(";")[0].strip().lower() for preference in preferences)


class Admission(NamedTuple):
    """Parameters of an admitted request, and its model.

    query  parameters in the query string
    spec   selected model; None if a form field may still select a model
    """

    query: Query
    spec: ModelSpec | None


async def admit(request: Request, runtime: Runtime) -> Admission:
    """Check everything about a request that can be checked before its body is received.

    Raises BadParameter, UnknownModel, BrokenModel, NotReady, QueueFull and OutputExists.
    """
    query = parse_query(request)
    runtime.check_admission(get_caller(request))
    if is_multipart(request):
        return Admission(query, None)
    spec = select_model(runtime, query)
    await _check_host_files(request, runtime, query)
    return Admission(query, spec)


def parse_query(request: Request) -> Query:
    """Parse and validate the parameters in the query string of a request. Raises BadParameter."""
    return _parse_query_string(request.scope["query_string"])


async def admit_query(request: Request, runtime: RuntimeDependency) -> Query:
    """Admit a request, and return its parameters. Raises the same errors as `admit`."""
    return (await admit(request, runtime)).query


AdmittedQuery = Annotated[Query, Depends(admit_query)]


async def admit_form(request: Request, runtime: Runtime, query: Query, fields: Mapping[str, str]) -> Query:
    """Merge the parameters in the query string with the fields of a received form, and check the selected host files.

    Raises BadParameter and OutputExists.
    """
    query = merge_fields(query, fields)
    await _check_host_files(request, runtime, query)
    return query


def merge_fields(query: Query, fields: Mapping[str, str]) -> Query:
    """Merge the parameters in the query string with the fields of a form.

    Raises BadParameter for duplicate or invalid parameters.
    """
    if not fields:
        return query
    query_parameters = query.model_dump(exclude_unset=True)
    if duplicates := sorted(query_parameters.keys() & fields.keys()):
        raise BadParameter(
            f"The parameter {duplicates[0]} is given twice, in the URL and in the form. Remove one of the two values.",
            parameter=duplicates[0],
        )
    return _validate_parameters({**fields, **query_parameters})


def select_model(runtime: Runtime, query: Query) -> ModelSpec:
    """Return the selected model after checking that it produces the output that the request requires.

    Raises UnknownModel, BrokenModel, NotReady and BadParameter.
    """
    spec = runtime.models.get_spec(query.model)
    output_kind = runtime.get_estimator(spec).get_output_kind(query.options)
    if query.measurements is not None and output_kind != "labels":
        raise BadParameter(
            f"measurements: only labels can be measured, but this request returns {output_kind}. Choose output=labels,"
            " or a model that finds objects.",
            parameter="measurements",
        )
    if query.link is not None and output_kind != "labels":
        raise BadParameter(
            f"link: only labels can be linked across time points, but this request returns {output_kind}. Choose"
            " output=labels, or a model that finds objects.",
            parameter="link",
        )
    return spec


@lru_cache(maxsize=MAX_CACHED_QUERIES)
def _parse_query_string(query_string: bytes) -> Query:
    """Parse and validate the parameters of a query string. Raises BadParameter."""
    if len(query_string) > MAX_QUERY_BYTES or query_string.count(b"&") >= MAX_PARAMETERS:
        raise BadParameter(
            f"The query string has more than {MAX_PARAMETERS} parameters or {MAX_QUERY_BYTES:,} bytes. Shorten it."
        )
    parameters: dict[str, str] = {}
    for name, value in QueryParams(query_string).multi_items():
        if name in parameters:
            raise BadParameter(
                f"The parameter {name[:MAX_NAME_LENGTH]} is given twice. Remove one of the two values.",
                parameter=name[:MAX_NAME_LENGTH],
            )
        parameters[name] = value
    return _validate_parameters(parameters)


def _validate_parameters(parameters: Mapping[str, Any]) -> Query:
    """Validate a mapping from parameter names to values. Raises BadParameter."""
    try:
        return Query.model_validate(parameters)
    except ValidationError as error:
        validation_errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise describe_validation_errors(validation_errors) from error


async def _check_host_files(request: Request, runtime: Runtime, query: Query) -> None:
    """Check the host files that a query selects. Run the checks in a thread, because a file server may be slow."""
    if {"input", "glob", "format", "output_to", "overwrite"} & query.model_fields_set:
        kind = runtime.get_estimator(runtime.models.get_spec(query.model)).get_output_kind(query.options)
        threads = runtime.host_threads.for_client(get_quota_name(request))
        check = partial(check_host_files, runtime.host_files, query, get_caller(request), kind)
        await run_in_thread(check, threads)
