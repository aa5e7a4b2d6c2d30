"""Errors -> problem documents (RFC 9457), and the one table of their status codes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from service.core import errors
from service.serving.parameters import explain

log = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An error as RFC 9457 has it. `type` is stable and may be matched; `detail` says what to do."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "type": "urn:stackseg:problem:ambiguous-axes",
                "title": "Ambiguous axes",
                "status": 422,
                "detail": "The file has 4 axes, 7x5x167x439, and does not say what they are; state them, axes=TZYX.",
                "instance": "urn:uuid:6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11",
            }
        },
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str


def problem_members(slug: str, status: int, detail: str, number: str) -> dict[str, Any]:
    """The members of a `Problem`, as JSON has them, in the answer to the request of that number."""
    return {
        "type": f"urn:stackseg:problem:{slug}",
        "title": slug.replace("-", " ").capitalize(),
        "status": status,
        "detail": detail,
        "instance": _urn(number),
    }


def _urn(number: str) -> str:
    """The number of a request as a URI; a client may have given it one that is no UUID."""
    try:
        return uuid.UUID(number).urn
    except ValueError:
        return f"urn:stackseg:request:{number}"


# Looked up along the class's __mro__: a class without a row of its own has its parent's status.
STATUS: dict[type[errors.StackSegError], int] = {
    errors.StackSegError: 500,
    errors.RequestError: 400,
    errors.BadFile: 422,
    errors.AmbiguousAxes: 422,
    errors.BadParameter: 422,
    errors.UnsupportedMedia: 415,
    errors.TooLarge: 413,
    errors.UnknownModel: 404,
    errors.Unauthorized: 401,
    errors.Misdirected: 421,
    errors.RateLimited: 429,
    errors.UnknownJob: 404,
    errors.NotFinished: 409,
    errors.OutputExists: 409,
    errors.ResultGone: 410,
    errors.CapacityError: 503,
    errors.OutOfMemory: 507,
    errors.OutOfStorage: 507,
    errors.TimedOut: 504,
    errors.ModelError: 500,
    # Nobody reads this answer; the number is what proxies log for a client that hung up.
    errors.Cancelled: 499,
}
Handler = Callable[[Request, Exception], Response]
# How the OpenAPI document speaks of API keys.
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def status_of(error: errors.StackSegError) -> int:
    """The HTTP status of an error: of its class, or of the nearest parent in the table."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def problem(request: Request, status: int, slug: str, detail: str, **members: Any) -> JSONResponse:
    """An answer as RFC 9457 has it."""
    state = request.scope.setdefault("state", {})
    state["problem"] = slug
    number = state.get("request_id") or str(uuid.uuid4())
    return JSONResponse(problem_members(slug, status, detail, number) | members, status, media_type=PROBLEM_TYPE)


def answer_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, errors.StackSegError):
        return answer_unexpected(request, error)
    status = status_of(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
    members = {"needed_bytes": error.needed_bytes} if isinstance(error, errors.OutOfMemory) else {}
    response = problem(request, status, error.slug, str(error), **members)
    if isinstance(error, errors.QueueFull | errors.NotReady | errors.RateLimited | errors.DeviceLost):
        response.headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, errors.Unauthorized):
        response.headers["WWW-Authenticate"] = 'Bearer realm="stackseg"'
    return response


def _answer_validation(request: Request, error: Exception) -> Response:
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    return problem(request, 422, errors.BadParameter.slug, explain(faults))


def _answer_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase
    detail = f"{phrase}: {request.method} {request.url.path}. See /docs."
    answer = problem(request, status, phrase.lower().replace(" ", "-"), detail)
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    if status == HTTPStatus.METHOD_NOT_ALLOWED and (methods := _methods(request)):
        answer.headers["Allow"] = ", ".join(sorted(methods))
    return answer


def _methods(request: Request) -> set[str]:
    """Collect the methods of all routes at the request's path; the framework names those of the first alone."""
    endpoints: list[APIRoute] = request.app.state.endpoints
    here = (endpoint for endpoint in endpoints if endpoint.matches(request.scope)[0] is not Match.NONE)
    return set().union(*(endpoint.methods or () for endpoint in here))


def answer_unexpected(request: Request, _error: Exception) -> Response:
    detail = "Something went wrong in the service; its log tells more under the number in `instance`."
    response = problem(request, 500, "internal-error", detail)
    # Such an error passes on to the server, which then closes the connection: nobody should send a request into it.
    response.headers["Connection"] = "close"
    return response


HANDLERS: dict[type[Exception], Handler] = {
    errors.StackSegError: answer_error,
    RequestValidationError: _answer_validation,
    HTTPException: _answer_http,
}


def problem_responses() -> dict[int | str, dict[str, Any]]:
    """Every error status with an example of each problem that leads to it, for the OpenAPI document."""
    kinds: dict[int, list[type[errors.StackSegError]]] = {}
    for kind in (*STATUS, *_WITHOUT_ROW):
        if kind not in _ABSTRACT:
            kinds.setdefault(next(STATUS[parent] for parent in kind.__mro__ if parent in STATUS), []).append(kind)
    return {
        status: {
            "description": "; ".join(kind.slug for kind in raised),
            "content": {
                PROBLEM_TYPE: {
                    "schema": {"$ref": f"#/components/schemas/{Problem.__name__}"},
                    "examples": {kind.slug: {"value": _example(kind, status)} for kind in raised},
                }
            },
        }
        for status, raised in sorted(kinds.items())
    }


# What is raised with the status of its parent.
_WITHOUT_ROW = (
    errors.QueueFull,
    errors.NotReady,
    errors.DeviceLost,
    errors.Interrupted,
    errors.BrokenModel,
    errors.NonFiniteScores,
    errors.InternalError,
)
# Parents that are never raised themselves, and the one that is never answered.
_ABSTRACT = (errors.StackSegError, errors.RequestError, errors.CapacityError, errors.ModelError, errors.Cancelled)


def _example(kind: type[errors.StackSegError], status: int) -> dict[str, Any]:
    meaning = (kind.__doc__ or "").partition("\n")[0]
    return problem_members(kind.slug, status, meaning, "6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11")
