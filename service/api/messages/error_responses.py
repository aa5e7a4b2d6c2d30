"""Exception handlers that respond to errors with problem documents (RFC 9457), and the table of HTTP status codes."""

from __future__ import annotations

import logging
import re
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

from service.api.messages.headers import make_url_path
from service.core import errors
from service.core.errors import remove_host_details
from service.core.hardware.devices import translate_error
from service.serving.parameters import describe_validation_errors

log = logging.getLogger(__name__)

PROBLEM_MEDIA_TYPE = "application/problem+json"
# Maximum length of `detail`, which may quote the request or its file.
MAX_DETAIL_CHARS = 2000
# Reason phrase of status 416, which determines its slug. Python's phrase depends on the version.
RANGE_PHRASE = "Range Not Satisfiable"
# Paths of the Open Inference Protocol, whose clients expect the message in the member `error`.
INFERENCE_PATH = re.compile(r"/v2(/|$)")
# Maximum length of a URL path that is quoted in `detail`.
MAX_PATH_CHARS = 256


T = TypeVar("T")


def _drop_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


# Member of a problem document that is omitted if its value is unknown, and is never null.
OptionalMember = Annotated[T | SkipJsonSchema[None], Field(json_schema_extra=_drop_default)]


class Problem(BaseModel):
    """A problem document (RFC 9457), which is the body of every error response.

    - `type`: stable identifier of the type of error. Programs should use it to distinguish errors.
    - `title`: short description of the type of error.
    - `status`: HTTP status code of the response.
    - `detail`: what is wrong and what to do, for the user.
    - `instance`: identifier of the request, which is also in the log of the service.
    - `parameter`: request parameter that caused the error; the first one if there are several.
    - `suggested`: values to try, by parameter.
    - `needed_bytes`: number of bytes of memory that would be sufficient.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "type": "urn:stackseg:problem:ambiguous-axes",
                "title": "Ambiguous axes",
                "status": 422,
                "detail": "The metadata of the file does not name its 4 axes (7x5x167x439). Specify them, for example"
                " axes=TZYX.",
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
    parameter: OptionalMember[str] = None
    suggested: OptionalMember[dict[str, str]] = None
    needed_bytes: OptionalMember[int] = None


# Titles of error types whose slug cannot be converted to a good title.
_TITLES_BY_SLUG = {
    "configuration": "Configuration error",
    "cross-site": "Request from another site",
    "doubtful-result": "Low confidence",
    "interrupted": "Job interrupted",
    "misdirected": "Unknown host name",
    "model-kept": "Model cannot be deleted",
    "non-finite-scores": "Invalid model output",
    "not-finished": "Job not finished",
    "not-ready": "Service not ready",
    "reader-killed": "Reading the file failed",
    "result-gone": "Result no longer available",
    "switched-off": "Feature disabled",
    "too-slow": "Connection too slow",
    "unauthorized": "Not authorized",
}


def build_problem_document(slug: str, status: int, detail: str, request_id: str) -> dict[str, Any]:
    """Return the members of the `Problem` for a request."""
    return {
        "type": f"urn:stackseg:problem:{slug}",
        "title": _TITLES_BY_SLUG.get(slug, slug.replace("-", " ").capitalize()),
        "status": status,
        "detail": detail[:MAX_DETAIL_CHARS],
        "instance": _build_instance_urn(request_id),
    }


def _build_instance_urn(request_id: str) -> str:
    """Return the id of a request as a URI. An id that a client has chosen need not be a UUID."""
    try:
        return uuid.UUID(request_id).urn
    except ValueError:
        return f"urn:stackseg:request:{request_id}"


# HTTP status code by error class. A class that is not listed has the status code of its parent class.
STATUS_BY_ERROR: dict[type[errors.StackSegError], int] = {
    errors.StackSegError: 500,
    errors.RequestError: 400,
    errors.BadFile: 422,
    errors.AmbiguousAxes: 422,
    errors.BadParameter: 422,
    errors.LowConfidenceResult: 422,
    errors.UnsupportedMedia: 415,
    errors.TooLarge: 413,
    errors.TooSlow: 408,
    errors.UnknownModel: 404,
    errors.Unauthorized: 401,
    errors.MisdirectedRequest: 421,
    errors.CrossSiteRequest: 403,
    errors.RateLimited: 429,
    errors.UnknownJob: 404,
    errors.UnknownStack: 404,
    errors.UnknownAnnotation: 404,
    errors.UnknownTraining: 404,
    errors.UnknownProject: 404,
    errors.FeatureDisabled: 403,
    errors.ModelNotDeletable: 409,
    errors.JobNotFinished: 409,
    errors.OutputExists: 409,
    errors.ResultUnavailable: 410,
    errors.CapacityError: 503,
    errors.OutOfMemory: 507,
    errors.OutOfStorage: 507,
    errors.TimedOut: 504,
    errors.ModelError: 500,
    # The client has disconnected and never receives this status code. nginx also logs 499 in this case.
    errors.Cancelled: 499,
}
ErrorHandler = Callable[[Request, Exception], Response]
AsyncErrorHandler = Callable[[Request, Exception], Awaitable[Response]]
# OpenAPI security schemes for API keys.
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def get_status_code(error_type: type[errors.StackSegError]) -> int:
    """Return the HTTP status code of an error class or, if it is not in the table, of its closest parent class."""
    return next(STATUS_BY_ERROR[parent] for parent in error_type.__mro__ if parent in STATUS_BY_ERROR)


def build_problem_response(request: Request, status: int, slug: str, detail: str, **members: Any) -> JSONResponse:
    """Return the response with a problem document, and record the slug of the problem for the access log."""
    state = request.scope.setdefault("state", {})
    state["problem"] = slug
    if INFERENCE_PATH.match(request.scope["path"]):
        members["error"] = detail[:MAX_DETAIL_CHARS]
    request_id = state.get("request_id") or str(uuid.uuid4())
    return JSONResponse(
        build_problem_document(slug, status, detail, request_id) | members, status, media_type=PROBLEM_MEDIA_TYPE
    )


def handle_error(request: Request, error: Exception) -> Response:
    """Return the response to a `StackSegError`, including headers such as Retry-After."""
    if not isinstance(error, errors.StackSegError):
        return handle_unexpected(request, error)
    status = get_status_code(type(error))
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
    response = build_problem_response(
        request, status, error.slug, remove_host_details(str(error)), **_get_extension_members(error)
    )
    if (retry_after := getattr(error, "retry_after", None)) is not None:
        response.headers["Retry-After"] = str(retry_after)
    if isinstance(error, errors.Unauthorized):
        response.headers["WWW-Authenticate"] = 'Bearer realm="stackseg"'
    return response


def _get_extension_members(error: errors.StackSegError) -> dict[str, Any]:
    """Return the extension members of the problem document for an error."""
    members = {
        "needed_bytes": error.needed_bytes if isinstance(error, errors.OutOfMemory) else None,
        "parameter": error.parameter,
        "suggested": error.suggested or None,
    }
    return {name: value for name, value in members.items() if value is not None}


def _handle_library_error(request: Request, error: Exception) -> Response:
    """Return the response to an out-of-memory error. Other errors are unexpected, and are raised again."""
    translated_error = translate_error(error)
    if not isinstance(translated_error, errors.StackSegError):
        raise error
    log.warning("out of memory: %s", error)
    return handle_error(request, translated_error)


def _handle_validation_error(request: Request, error: Exception) -> Response:
    validation_errors = error.errors() if isinstance(error, RequestValidationError) else []
    return handle_error(request, describe_validation_errors(validation_errors))


def _handle_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = RANGE_PHRASE if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE else HTTPStatus(status).phrase
    path, docs_path = request.scope["path"][:MAX_PATH_CHARS], make_url_path(request.scope, "/docs")
    methods = _find_methods(request) if status == HTTPStatus.METHOD_NOT_ALLOWED else set()
    method_list = f" The methods of this path are {', '.join(sorted(methods))}." if methods else ""
    detail = f"{phrase}: {request.method} {path}.{method_list} The API is described at {docs_path}."
    # By default, the detail of an HTTPException is the phrase.
    if isinstance(error, HTTPException) and error.detail != HTTPStatus(status).phrase:
        detail = error.detail
    response = build_problem_response(request, status, phrase.lower().replace(" ", "-"), detail)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    if methods:
        response.headers["Allow"] = ", ".join(sorted(methods))
    return response


def _find_methods(request: Request) -> set[str]:
    """Return the methods of all routes at a request's path. Starlette would return only those of the first route."""
    endpoints: list[APIRoute] = request.app.state.endpoints
    matching_endpoints = (endpoint for endpoint in endpoints if endpoint.matches(request.scope)[0] is not Match.NONE)
    return set().union(*(endpoint.methods or () for endpoint in matching_endpoints))


def handle_unexpected(request: Request, _error: Exception) -> Response:
    """Return the response to an unexpected error, without revealing the error."""
    detail = (
        "The request failed because of an internal error. Report the id in `instance` to the operator of the service,"
        " who can find the details in the log under this id."
    )
    response = build_problem_response(request, 500, "internal-error", detail)
    # Tell the client not to reuse the connection, because the server closes it after such an error.
    response.headers["Connection"] = "close"
    return response


def _as_coroutine(handle: ErrorHandler) -> AsyncErrorHandler:
    """Wrap a handler in a coroutine. Starlette runs other handlers in a thread, and starting a thread may fail."""

    async def handle_async(request: Request, error: Exception) -> Response:
        return handle(request, error)

    return handle_async


EXCEPTION_HANDLERS: dict[type[Exception], AsyncErrorHandler] = {
    errors.StackSegError: _as_coroutine(handle_error),
    RequestValidationError: _as_coroutine(_handle_validation_error),
    HTTPException: _as_coroutine(_handle_http_exception),
    **dict.fromkeys((MemoryError, OSError, RuntimeError), _as_coroutine(_handle_library_error)),
}
UNEXPECTED_HANDLER = _as_coroutine(handle_unexpected)


def describe_problem_responses() -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of all error responses: for each status code, an example of each type of error."""
    types_by_status: dict[int, list[type[errors.StackSegError]]] = {}
    for error_type in (*STATUS_BY_ERROR, *_INHERITED_STATUS_TYPES):
        if error_type not in _UNREPORTED_TYPES:
            types_by_status.setdefault(get_status_code(error_type), []).append(error_type)
    return {
        status: {
            "description": "; ".join(error_type.slug for error_type in error_types),
            "content": {
                PROBLEM_MEDIA_TYPE: {
                    "schema": {"$ref": f"#/components/schemas/{Problem.__name__}"},
                    "examples": {
                        error_type.slug: {"value": _build_example(error_type, status)} for error_type in error_types
                    },
                }
            },
        }
        for status, error_types in sorted(types_by_status.items())
    }


# Error classes that have the status code of their parent class.
_INHERITED_STATUS_TYPES = (
    errors.QueueFull,
    errors.NotReady,
    errors.StorageUnavailable,
    errors.DeviceLost,
    errors.ReaderKilled,
    errors.JobInterrupted,
    errors.BrokenModel,
    errors.NonFiniteScores,
    errors.InternalError,
)
# Base classes, which are never raised themselves, and the error that is never sent to a client.
_UNREPORTED_TYPES = (
    errors.StackSegError,
    errors.RequestError,
    errors.CapacityError,
    errors.ModelError,
    errors.Cancelled,
)


def _build_example(error_type: type[errors.StackSegError], status: int) -> dict[str, Any]:
    """Return an example of a problem document. Its `detail` is the first line of the docstring of the error class."""
    summary = (error_type.__doc__ or "").partition("\n")[0]
    return build_problem_document(error_type.slug, status, summary, "6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11")
