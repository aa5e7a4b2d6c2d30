"""What `/segment` and `/inspect` share: admission, a folder per request, time and the client's patience."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.datastructures import QueryParams

from service.api.headers import stated
from service.api.threads import NAMED_FILES, in_thread
from service.api.uploads import is_multipart
from service.core.errors import BadParameter
from service.inference.estimate import Estimator
from service.models.spec import ModelSpec
from service.serving.async_jobs import AsyncJobs
from service.serving.parameters import Query, explain
from service.serving.results import check_host_files
from service.serving.runtime import Runtime

T = TypeVar("T")

# Of so many addresses the parameters are remembered.
ADDRESSES = 64


def _fields() -> dict[str, Any]:
    """The parameters of a query as fields of a form, where none can be null."""
    properties = Query.model_json_schema()["properties"]
    return {name: {**it["anyOf"][0], "description": it["description"]} for name, it in properties.items()}


def _parameters() -> list[dict[str, Any]]:
    """The same as parameters of an address."""
    properties = Query.model_json_schema()["properties"]
    schemas = {name: {key: value for key, value in it.items() if key != "default"} for name, it in properties.items()}
    return [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": schema["description"]}
        for name, schema in schemas.items()
    ]


# Of a request with a stack, in the OpenAPI document. The framework would document parameters of a model by itself, but
# then also take each out of the address at every request, which takes it longer than all that follows until the body.
REQUEST: dict[str, Any] = {
    "parameters": _parameters(),
    "requestBody": {
        "description": "The stack, unless input names one on the service's host.",
        "required": False,
        "content": {
            "image/tiff": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "string", "format": "binary"}, **_fields()},
                    "additionalProperties": False,
                }
            },
        },
    },
}


async def runtime_of(request: Request) -> Runtime:
    """What answers the request."""
    runtime: Runtime = request.app.state.runtime
    return runtime


RuntimeDependency = Annotated[Runtime, Depends(runtime_of)]


async def async_jobs_of(request: Request) -> AsyncJobs:
    """What keeps the request's job."""
    async_jobs: AsyncJobs = request.app.state.async_jobs
    return async_jobs


AsyncJobsDependency = Annotated[AsyncJobs, Depends(async_jobs_of)]

RESPOND_ASYNC = "respond-async"

PREFER = {
    "name": "prefer",
    "in": "header",
    "required": False,
    "schema": {"anyOf": [{"type": "string"}, {"type": "null"}], "examples": [RESPOND_ASYNC]},
    "description": f"{RESPOND_ASYNC}: answer with a job instead of waiting (RFC 7240).",
}


def wants_a_job(request: Request) -> bool:
    """Whether the client would rather come back for its answer."""
    prefer = stated(request.scope, b"prefer")
    return RESPOND_ASYNC in (wish.partition(";")[0].strip().lower() for wish in prefer.split(","))


def caller_of(request: Request) -> str | None:
    """Whose request this is, where callers are told apart; what is kept for one caller is hidden from others."""
    caller: str | None = request.scope.get("state", {}).get("caller")
    return caller


class Admission(NamedTuple):
    """Parameters, and the model, if it can give what they ask for; None while a form may bring more of them."""

    query: Query
    spec: ModelSpec | None

    def model(self, runtime: Runtime, query: Query) -> ModelSpec:
        """That of these parameters, all of which have come by now. Raises what `check_output` raises."""
        return self.spec if self.spec is not None and query is self.query else check_output(runtime, query)


async def admission(request: Request, runtime: Runtime) -> Admission:
    """As `admitted`."""
    query = _asked(request.scope["query_string"])
    runtime.check_admission()
    if is_multipart(request):
        return Admission(query, None)
    spec = check_output(runtime, query)
    await check_files(request, runtime, query)
    return Admission(query, spec)


async def admitted(request: Request, runtime: RuntimeDependency) -> Query:
    """The parameters, if the request stands a chance: whatever is wrong already is said before the body is received."""
    return (await admission(request, runtime)).query


@lru_cache(maxsize=ADDRESSES)
def _asked(address: bytes) -> Query:
    """The parameters in the part of an address behind the question mark. Raises BadParameter."""
    return validated(_once(QueryParams(address).multi_items()))


def _once(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names and values of parameters. Raises BadParameter for one that is given twice."""
    given: dict[str, str] = {}
    for name, value in items:
        if name in given:
            raise BadParameter(f"The parameter {name} is given twice.")
        given[name] = value
    return given


def validated(given: Mapping[str, Any]) -> Query:
    """Raises BadParameter."""
    try:
        return Query.model_validate(given)
    except ValidationError as error:
        raise BadParameter(explain(error.errors())) from error


async def check_files(request: Request, runtime: Runtime, query: Query) -> None:
    """In a thread: the folders may lie on a server that is slow to answer."""
    if query.input is not None or query.output_to is not None or query.overwrite is not None:
        await in_thread(partial(check_host_files, runtime.host_files, query, caller_of(request)), NAMED_FILES)


def check_output(runtime: Runtime, query: Query) -> ModelSpec:
    """The model, if it can give what is asked for. Raises UnknownModel, NotReady, BadParameter."""
    spec = runtime.models.spec(query.model)
    kind = Estimator(spec, runtime.settings).output(query.options)
    if query.measurements is not None and kind != "labels":
        raise BadParameter(f"measurements: only labels have objects to measure, and the answer would be {kind}.")
    return spec


AdmittedQuery = Annotated[Query, Depends(admitted)]
