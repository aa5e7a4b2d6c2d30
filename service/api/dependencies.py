"""FastAPI dependencies: the objects shared by all requests to an application, the caller, and checks of the query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, get_origin

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel

from service.api.messages.headers import ANONYMOUS
from service.core.errors import BadParameter
from service.serving.learning.annotations import AnnotationStore
from service.serving.learning.training_manager import TrainingManager
from service.serving.parameters import MAX_NAME_LENGTH
from service.serving.runtime import Runtime
from service.serving.storage.stack_store import StackStore


async def get_runtime(request: Request) -> Runtime:
    """Return the runtime of the application."""
    runtime: Runtime = request.app.state.runtime
    return runtime


def get_stacks(request: Request) -> StackStore:
    """Return the store of uploaded stacks."""
    stacks: StackStore = request.app.state.async_jobs.stacks
    return stacks


def get_annotations(request: Request) -> AnnotationStore:
    """Return the store of annotated stacks."""
    annotations: AnnotationStore = request.app.state.annotations
    return annotations


def get_trainings(request: Request) -> TrainingManager:
    """Return the manager of training runs."""
    trainings: TrainingManager = request.app.state.trainings
    return trainings


RuntimeDependency = Annotated[Runtime, Depends(get_runtime)]


def get_quota_name(request: Request) -> str:
    """Return the name of the client whose quotas apply to a request.

    This is the name of the API key or, if the service has no keys, the client's address.
    """
    caller = get_caller(request)
    if caller not in {None, ANONYMOUS} or request.client is None:
        return caller or ANONYMOUS
    return request.client.host


def get_caller(request: Request) -> str | None:
    """Return the name of the caller, which identifies the owner of jobs and files; None if the caller is unknown."""
    caller: str | None = request.scope.get("state", {}).get("caller")
    return caller


async def check_query(request: Request) -> None:
    """Raise BadParameter if the query has a parameter that the route does not have, or one of them several times.

    FastAPI ignores unknown parameters, so that the response to a misspelled one would be silently wrong. Routes that
    list parameters in `openapi_extra` check them themselves.
    """
    if "parameters" in (request.scope["route"].openapi_extra or ()):
        return
    parameters = dict(_list_query_parameters(request.scope["route"].dependant))
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        shown_name = name[:MAX_NAME_LENGTH]
        if name not in parameters:
            known_text = f"The parameters are {', '.join(parameters)}."
            if not parameters:
                has_body = request.method in {"POST", "PATCH"}
                known_text = "Send parameters in the body." if has_body else "There are no parameters."
            raise BadParameter(f"Unknown parameter {shown_name!r}. {known_text}", parameter=shown_name)
        if count > 1 and not parameters[name]:
            raise BadParameter(
                f"The parameter {shown_name} is given {count} times. Send it once.", parameter=shown_name
            )


def _list_query_parameters(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Yield the name of each query parameter of a route, and whether it may be repeated."""
    for field in dependant.query_params:
        annotation = field.field_info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from ((info.alias or name, False) for name, info in annotation.model_fields.items())
        else:
            yield field.alias, get_origin(annotation) in {Sequence, list}
    for nested_dependant in dependant.dependencies:
        yield from _list_query_parameters(nested_dependant)
