"""Admit a request with a stack before its body is received: check parameters, queue, model and host files.

What is wrong already is answered at once, and the client need not upload a stack first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.datastructures import QueryParams

from service.api.dependencies import RuntimeDependency, get_caller
from service.api.http.uploads import is_multipart
from service.api.messages.headers import get_header
from service.core.errors import BadParameter
from service.models.spec import ModelSpec
from service.serving.parameters import MAX_NAME_LETTERS, Query, describe_faults
from service.serving.results.answers import check_host_files
from service.serving.runtime import Runtime
from service.serving.storage.threads import HOST_FILE_THREADS, run_in_thread

# Query strings whose parsed parameters are kept.
CACHED_QUERIES = 64
# A query string has each parameter once, the longest with a thousand letters, each of up to twelve bytes.
MAX_PARAMETERS = 32
MAX_QUERY_BYTES = 40_000

RESPOND_ASYNC = "respond-async"


# The parameters as the schemas of a query string, and as properties of a form, a field of which cannot be null.
_SCHEMAS = {
    name: {key: value for key, value in schema.items() if key != "default"}
    for name, schema in Query.model_json_schema()["properties"].items()
}
_FORM_FIELDS = {name: {**it["anyOf"][0], "description": it["description"]} for name, it in _SCHEMAS.items()}

# OpenAPI's description of a request with a stack. FastAPI would derive the parameters from a model, but would then also
# parse them at every request, which takes longer than all other work before the body.
REQUEST: dict[str, Any] = {
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": schema["description"]}
        for name, schema in _SCHEMAS.items()
    ],
    "requestBody": {
        "description": "The stack, unless input names one on the service's host.",
        "required": False,
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
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
PREFER = {
    "name": "prefer",
    "in": "header",
    "required": False,
    "schema": {"anyOf": [{"type": "string"}, {"type": "null"}], "examples": [RESPOND_ASYNC]},
    "description": f"{RESPOND_ASYNC}: answer with a job instead of waiting (RFC 7240).",
}


def prefers_async(request: Request) -> bool:
    """Return whether the client prefers a job to waiting for its answer (RFC 7240)."""
    preferences = get_header(request.scope, b"prefer").split(",")
    return RESPOND_ASYNC in (preference.partition(";")[0].strip().lower() for preference in preferences)


class Admission(NamedTuple):
    """Parameters, and the model that they select; None where a form may still bring another name."""

    query: Query
    spec: ModelSpec | None


async def admit(request: Request, runtime: Runtime) -> Admission:
    """Check all that is known before the body of a request.

    Raises BadParameter, UnknownModel, BrokenModel, NotReady, QueueFull and OutputExists.
    """
    query = _parse_query_string(request.scope["query_string"])
    runtime.check_admission(get_caller(request))
    if is_multipart(request):
        return Admission(query, None)
    spec = select_model(runtime, query)
    await _check_host_files(request, runtime, query)
    return Admission(query, spec)


async def admit_query(request: Request, runtime: RuntimeDependency) -> Query:
    """Return the parameters of a request that `admit` lets in."""
    return (await admit(request, runtime)).query


AdmittedQuery = Annotated[Query, Depends(admit_query)]


async def admit_form(request: Request, runtime: Runtime, query: Query, fields: Mapping[str, str]) -> Query:
    """Return the parameters of the query string and of a form that was received; check the host files they name.

    Raises BadParameter and OutputExists.
    """
    query = merge_fields(query, fields)
    await _check_host_files(request, runtime, query)
    return query


def merge_fields(query: Query, fields: Mapping[str, str]) -> Query:
    """Return the parameters of the query string together with those of a form. Raises BadParameter."""
    if not fields:
        return query
    given = query.model_dump(exclude_unset=True)
    if twice := sorted(given.keys() & fields.keys()):
        raise BadParameter(
            f"The parameter {twice[0]} is given twice, in the address and in the form.", parameter=twice[0]
        )
    return _validate({**fields, **given})


def select_model(runtime: Runtime, query: Query) -> ModelSpec:
    """Return the model, if it has the output that is asked for.

    Raises UnknownModel, BrokenModel, NotReady and BadParameter.
    """
    spec = runtime.models.spec(query.model)
    kind = runtime.estimator(spec).output(query.options)
    if query.measurements is not None and kind != "labels":
        raise BadParameter(
            f"measurements: only labels have objects to measure, and the answer would be {kind}.",
            parameter="measurements",
        )
    if query.link is not None and kind != "labels":
        raise BadParameter(f"link: only labels have objects to link, and the answer would be {kind}.", parameter="link")
    return spec


@lru_cache(maxsize=CACHED_QUERIES)
def _parse_query_string(query_string: bytes) -> Query:
    """Return the parameters of a query string. Raises BadParameter."""
    if len(query_string) > MAX_QUERY_BYTES or query_string.count(b"&") >= MAX_PARAMETERS:
        raise BadParameter(
            f"The address has more than {MAX_PARAMETERS} parameters, or {MAX_QUERY_BYTES} bytes of them."
        )
    given: dict[str, str] = {}
    for name, value in QueryParams(query_string).multi_items():
        if name in given:
            raise BadParameter(
                f"The parameter {name[:MAX_NAME_LETTERS]} is given twice.", parameter=name[:MAX_NAME_LETTERS]
            )
        given[name] = value
    return _validate(given)


def _validate(given: Mapping[str, Any]) -> Query:
    """Return parameters by name as a `Query`. Raises BadParameter."""
    try:
        return Query.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise describe_faults(faults) from error


async def _check_host_files(request: Request, runtime: Runtime, query: Query) -> None:
    """Check the host files that a query names, in a thread: a folder may lie on a server that is slow to answer."""
    if {"input", "glob", "format", "output_to", "overwrite"} & query.model_fields_set:
        await run_in_thread(
            partial(check_host_files, runtime.host_files, query, get_caller(request)), HOST_FILE_THREADS
        )
