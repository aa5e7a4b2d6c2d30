"""Exception handlers that answer errors with problem documents (RFC 9457), and the table of HTTP statuses."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from service.core import errors
from service.core.errors import without_folders
from service.core.hardware.devices import translate_error
from service.serving.parameters import describe_faults

log = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"
# Of a detail, which may have words of the request or of its file.
MAX_DETAIL_LETTERS = 2000
MAX_PATH_LETTERS = 256


T = TypeVar("T")


def _drop_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


# A member that is absent if it is unknown, and never null.
Absent = Annotated[T | SkipJsonSchema[None], Field(json_schema_extra=_drop_default)]


class Problem(BaseModel):
    """An error as RFC 9457 has it. `type` is stable and may be matched; `detail` says what to do.

    parameter     name of the request parameter that the problem is about, the first of several
    suggested     values to try, by parameter, in the form in which a request states them
    needed_bytes  memory that would be enough
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "type": "urn:stackseg:problem:ambiguous-axes",
                "title": "Ambiguous axes",
                "status": 422,
                "detail": "The file has 4 axes, 7x5x167x439, and does not say what they are; state them, axes=TZYX.",
                "instance": "urn:uuid:6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11",
                "parameter": "axes",
                "suggested": {"axes": "TZYX"},
            }
        },
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str
    parameter: Absent[str] = None
    suggested: Absent[dict[str, str]] = None
    needed_bytes: Absent[int] = None


def problem_document(slug: str, status: int, detail: str, request_id: str) -> dict[str, Any]:
    """Return the members of a `Problem` as JSON, in the answer to a request with this id."""
    return {
        "type": f"urn:stackseg:problem:{slug}",
        "title": slug.replace("-", " ").capitalize(),
        "status": status,
        "detail": detail[:MAX_DETAIL_LETTERS],
        "instance": _instance_urn(request_id),
    }


def _instance_urn(request_id: str) -> str:
    """Return the id of a request as a URI; an id that a client has chosen need not be a UUID."""
    try:
        return uuid.UUID(request_id).urn
    except ValueError:
        return f"urn:stackseg:request:{request_id}"


# Looked up along the __mro__ of a class: one without a row of its own has the status of its parent.
STATUS: dict[type[errors.StackSegError], int] = {
    errors.StackSegError: 500,
    errors.RequestError: 400,
    errors.BadFile: 422,
    errors.AmbiguousAxes: 422,
    errors.BadParameter: 422,
    errors.DoubtfulResult: 422,
    errors.UnsupportedMedia: 415,
    errors.TooLarge: 413,
    errors.TooSlow: 408,
    errors.UnknownModel: 404,
    errors.Unauthorized: 401,
    errors.Misdirected: 421,
    errors.RateLimited: 429,
    errors.UnknownJob: 404,
    errors.UnknownStack: 404,
    errors.UnknownAnnotation: 404,
    errors.UnknownTraining: 404,
    errors.SwitchedOff: 403,
    errors.ModelKept: 409,
    errors.NotFinished: 409,
    errors.OutputExists: 409,
    errors.ResultGone: 410,
    errors.CapacityError: 503,
    errors.OutOfMemory: 507,
    errors.OutOfStorage: 507,
    errors.TimedOut: 504,
    errors.ModelError: 500,
    # Nobody reads this answer; proxies log this status for a client that disconnected.
    errors.Cancelled: 499,
}
ErrorHandler = Callable[[Request, Exception], Response]
AsyncErrorHandler = Callable[[Request, Exception], Awaitable[Response]]
# OpenAPI security schemes for API keys.
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def status_of(error_type: type[errors.StackSegError]) -> int:
    """Return the HTTP status of an error: of its class, or of the nearest parent in the table."""
    return next(STATUS[parent] for parent in error_type.__mro__ if parent in STATUS)


def problem_response(request: Request, status: int, slug: str, detail: str, **members: Any) -> JSONResponse:
    """Return a problem document as the answer, and note its slug for the access log."""
    state = request.scope.setdefault("state", {})
    state["problem"] = slug
    request_id = state.get("request_id") or str(uuid.uuid4())
    return JSONResponse(problem_document(slug, status, detail, request_id) | members, status, media_type=PROBLEM_TYPE)


def handle_error(request: Request, error: Exception) -> Response:
    """Answer an error of the service's own tree, with the headers that belong to it."""
    if not isinstance(error, errors.StackSegError):
        return handle_unexpected(request, error)
    status = status_of(type(error))
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
    response = problem_response(request, status, error.slug, without_folders(str(error)), **_find_members(error))
    if (retry_after := getattr(error, "retry_after", None)) is not None:
        response.headers["Retry-After"] = str(retry_after)
    if isinstance(error, errors.Unauthorized):
        response.headers["WWW-Authenticate"] = 'Bearer realm="stackseg"'
    return response


def _find_members(error: errors.StackSegError) -> dict[str, Any]:
    """Return the extension members of a problem document, those that are known."""
    members = {
        "needed_bytes": error.needed_bytes if isinstance(error, errors.OutOfMemory) else None,
        "parameter": error.parameter,
        "suggested": error.suggested or None,
    }
    return {name: value for name, value in members.items() if value is not None}


def _handle_foreign_error(request: Request, error: Exception) -> Response:
    """Answer an error of exhausted memory. Any other is raised again, and is one that was not foreseen."""
    known = translate_error(error)
    if not isinstance(known, errors.StackSegError):
        raise error
    log.warning("out of memory: %s", error)
    return handle_error(request, known)


def _handle_validation_error(request: Request, error: Exception) -> Response:
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    return handle_error(request, describe_faults(faults))


def _handle_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase
    detail = f"{phrase}: {request.method} {request.scope['path'][:MAX_PATH_LETTERS]}. See /docs."
    answer = problem_response(request, status, phrase.lower().replace(" ", "-"), detail)
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    if status == HTTPStatus.METHOD_NOT_ALLOWED and (methods := _allowed_methods(request)):
        answer.headers["Allow"] = ", ".join(sorted(methods))
    return answer


def _allowed_methods(request: Request) -> set[str]:
    """Collect the methods of all routes at the request's path; the framework names those of the first alone."""
    endpoints: list[APIRoute] = request.app.state.endpoints
    here = (endpoint for endpoint in endpoints if endpoint.matches(request.scope)[0] is not Match.NONE)
    return set().union(*(endpoint.methods or () for endpoint in here))


def handle_unexpected(request: Request, _error: Exception) -> Response:
    """Answer an error that was not foreseen, without telling what it was."""
    detail = "Something went wrong in the service; its log tells more under the number in `instance`."
    response = problem_response(request, 500, "internal-error", detail)
    # The server closes the connection after such an error: no client should send another request on it.
    response.headers["Connection"] = "close"
    return response


def _on_the_loop(handle: ErrorHandler) -> AsyncErrorHandler:
    """Return a handler that Starlette calls without a thread, for which there may be no memory any more."""

    async def handle_there(request: Request, error: Exception) -> Response:
        return handle(request, error)

    return handle_there


EXCEPTION_HANDLERS: dict[type[Exception], AsyncErrorHandler] = {
    errors.StackSegError: _on_the_loop(handle_error),
    RequestValidationError: _on_the_loop(_handle_validation_error),
    HTTPException: _on_the_loop(_handle_http_exception),
    **dict.fromkeys((MemoryError, OSError, RuntimeError), _on_the_loop(_handle_foreign_error)),
}
UNEXPECTED_HANDLER = _on_the_loop(handle_unexpected)


def problem_responses() -> dict[int | str, dict[str, Any]]:
    """Return every error status with an example of each of its problems, for the OpenAPI document."""
    types_by_status: dict[int, list[type[errors.StackSegError]]] = {}
    for error_type in (*STATUS, *_WITHOUT_ROW):
        if error_type not in _ABSTRACT:
            types_by_status.setdefault(status_of(error_type), []).append(error_type)
    return {
        status: {
            "description": "; ".join(error_type.slug for error_type in raised),
            "content": {
                PROBLEM_TYPE: {
                    "schema": {"$ref": f"#/components/schemas/{Problem.__name__}"},
                    "examples": {error_type.slug: {"value": _example(error_type, status)} for error_type in raised},
                }
            },
        }
        for status, raised in sorted(types_by_status.items())
    }


# Errors that have the status of their parent.
_WITHOUT_ROW = (
    errors.QueueFull,
    errors.NotReady,
    errors.StorageUnavailable,
    errors.DeviceLost,
    errors.ReaderKilled,
    errors.Interrupted,
    errors.BrokenModel,
    errors.NonFiniteScores,
    errors.InternalError,
)
# Parents that are never raised themselves, and the one error that is never answered.
_ABSTRACT = (errors.StackSegError, errors.RequestError, errors.CapacityError, errors.ModelError, errors.Cancelled)


def _example(error_type: type[errors.StackSegError], status: int) -> dict[str, Any]:
    """Return a problem document with the first line of the docstring as its detail."""
    meaning = (error_type.__doc__ or "").partition("\n")[0]
    return problem_document(error_type.slug, status, meaning, "6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11")
