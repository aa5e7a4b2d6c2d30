"""Errors of the client. A response with a problem document (RFC 9457) raises the class of its type.

StackSegError
    ConnectionFailed        the server cannot be reached, or the connection was lost
    InvalidResponse         the response is not from a StackSeg server, or not the expected one
    StackChanged            the file of a stack changed while it was sent
    ServiceNotStarted       `local()` cannot start a server
    ProblemError            the server answered with an error
        RequestError        the request has to be changed
        CapacityError       the server is busy, lacks resources, or is starting or stopping
        ServerError         the model or the server is broken
"""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

PROBLEM_PREFIX = "urn:stackseg:problem:"
# Maximum length of a quoted response that is not a problem document.
MAX_QUOTED_CHARACTERS = 200


# Classes of errors by the last part of the problem type.
_CLASSES_BY_SLUG: dict[str, type[ProblemError]] = {}


class StackSegError(Exception):
    """Base class of all errors of the client."""


class ConnectionFailed(StackSegError):
    """The server cannot be reached, or the connection was lost.

    is_sent  whether the server may have received the request
    """

    def __init__(self, message: str, *, is_sent: bool = False) -> None:
        super().__init__(message)
        self.is_sent = is_sent


class InvalidResponse(StackSegError):
    """The response is not from a StackSeg server, or has another format than the client requested."""


class StackChanged(StackSegError):
    """The file of a stack changed while it was sent."""


class ServiceNotStarted(StackSegError):
    """`local()` cannot start a server."""


@dataclass(eq=False)
class ProblemError(StackSegError):
    """An error response of the server. `str(error)` is `detail`, the reason and the remedy.

    status       HTTP status code
    type         stable identifier, such as `urn:stackseg:problem:ambiguous-axes`
    title        short description of the type
    detail       reason of the error, and how to resolve it
    instance     identifier of the request, which is also in the log of the server
    parameter    parameter that caused the error; None if unknown
    suggested    values to try, by parameter: `client.segment(stack, **error.suggested)`
    retry_after  seconds after which the server asks to send the request again; None if it does not
    members      all members of the problem document
    """

    status: int
    type: str
    title: str
    detail: str
    instance: str = ""
    parameter: str | None = None
    suggested: dict[str, str] = field(default_factory=dict)
    retry_after: float | None = None
    members: dict[str, Any] = field(default_factory=dict, repr=False)

    def __init_subclass__(cls, *, slug: str) -> None:
        _CLASSES_BY_SLUG[slug] = cls

    def __str__(self) -> str:
        return self.detail

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes pass exceptions on as pickles.
        return type(self), tuple(getattr(self, member.name) for member in fields(self))


class RequestError(ProblemError, slug="bad-request"):
    """The request has to be changed."""


class CapacityError(ProblemError, slug="capacity"):
    """The server is busy, lacks memory or disk space, or is starting or stopping."""


class ServerError(ProblemError, slug="internal-error"):
    """The model or the server is broken. The operator has to fix it."""


class BadFile(RequestError, slug="bad-file"):
    """The file is damaged, truncated or inconsistent."""


class AmbiguousAxes(RequestError, slug="ambiguous-axes"):
    """The file does not say which axis is which. Pass `axes`."""


class BadParameter(RequestError, slug="bad-parameter"):
    """A parameter is malformed, out of range, unknown, or does not fit the file or the model."""


class LowConfidenceResult(RequestError, slug="doubtful-result"):
    """Confidence in the labels is low, and the request has `strict=True`."""


class UnsupportedMedia(RequestError, slug="unsupported-media"):
    """The file does not have a supported format."""


class TooLarge(RequestError, slug="too-large"):
    """The file or its decoded size exceeds a limit of the server."""


class TooSlow(RequestError, slug="too-slow"):
    """The upload is slower than the server accepts."""


class OutputExists(RequestError, slug="output-exists"):
    """The file `output_to` exists."""


class NotFound(RequestError, slug="not-found"):
    """The server has no such path. Its version may be older than that of the client."""


class UnknownModel(NotFound, slug="unknown-model"):
    """There is no such model."""


class UnknownJob(NotFound, slug="unknown-job"):
    """There is no such job."""


class UnknownStack(NotFound, slug="unknown-stack"):
    """There is no such uploaded stack."""


class UnknownProject(NotFound, slug="unknown-project"):
    """There is no project with this id, or it belongs to another API key."""


class Unauthorized(RequestError, slug="unauthorized"):
    """The API key is missing, unknown, or not allowed to make this request."""


class MisdirectedRequest(RequestError, slug="misdirected"):
    """The server does not accept this host name."""


class FeatureDisabled(RequestError, slug="switched-off"):
    """The operator has disabled the feature, or the server lacks a package."""


class JobNotFinished(RequestError, slug="not-finished"):
    """The job has not finished."""


class ResultUnavailable(RequestError, slug="result-gone"):
    """The job was canceled, or its result was deleted."""


class RateLimited(CapacityError, slug="rate-limited"):
    """Too many requests, or too much disk space in use."""


class QueueFull(CapacityError, slug="queue-full"):
    """Too many requests are waiting."""


class NotReady(CapacityError, slug="not-ready"):
    """The server is starting or stopping."""


class StorageUnavailable(CapacityError, slug="storage-unavailable"):
    """A folder or the job database of the server cannot be used."""


class DeviceLost(CapacityError, slug="device-lost"):
    """The GPU failed."""


class JobInterrupted(CapacityError, slug="interrupted"):
    """The server died several times while it ran the job."""


class ReaderKilled(CapacityError, slug="reader-killed"):
    """The process that read the file was killed, probably for lack of memory."""


class TimedOut(CapacityError, slug="timed-out"):
    """The request exceeded the time limit of the server."""


class OutOfMemory(CapacityError, slug="out-of-memory"):
    """The volume does not fit into memory. `members["needed_bytes"]` is the size that would suffice, if known."""


class OutOfStorage(CapacityError, slug="out-of-storage"):
    """The disk of the server, or your share of it, is full."""


class BrokenModel(ServerError, slug="broken-model"):
    """The model cannot be loaded or run."""


class NonFiniteScores(ServerError, slug="non-finite-scores"):
    """The network returned NaN or infinite scores."""


def parse_problem(status: int, headers: Mapping[str, str], content: bytes) -> ProblemError:
    """Convert an error response to an exception. Responses of proxies have no problem document."""
    try:
        members = json.loads(content)
    except ValueError:
        members = None
    if not isinstance(members, dict) or "type" not in members:
        text = " ".join(content.decode("utf-8", "replace").split())[:MAX_QUOTED_CHARACTERS]
        detail = f"The server, or a proxy in front of it, answered with status {status}: {text or 'no content'}"
        if status < 400 and "Location" in headers:
            detail = (
                f"The server, or a proxy in front of it, redirects to {headers['Location']}. The client does not follow"
                " redirects. Create it with this address, without the path of the request at its end."
            )
        members = {"type": "about:blank", "title": f"Status {status}", "detail": detail}
    slug = str(members["type"]).removeprefix(PROBLEM_PREFIX)
    return _CLASSES_BY_SLUG.get(slug, _get_default_class(status))(
        status=status,
        type=str(members["type"]),
        title=str(members.get("title", "")),
        detail=str(members.get("detail", members.get("title", ""))),
        instance=str(members.get("instance", "")),
        parameter=members.get("parameter"),
        suggested=dict(members.get("suggested") or {}),
        retry_after=_parse_retry_after(headers.get("Retry-After"), headers.get("Date")),
        members=members,
    )


def _get_default_class(status: int) -> type[ProblemError]:
    if status < 500:
        return CapacityError if status == 429 else RequestError
    return ServerError if status == 500 else CapacityError


def _parse_retry_after(text: str | None, date: str | None) -> float | None:
    """Parse a number of seconds or an HTTP date (RFC 9110, section 10.2.3).

    date  the time at which the response was sent, so that the clock of this computer does not matter
    """
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        now = time.time() if date is None else email.utils.parsedate_to_datetime(date).timestamp()
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except ValueError:
        return None
