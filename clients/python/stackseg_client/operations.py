"""The operations of the API without input and output: what to send, and how to interpret the response."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

from numpy.typing import NDArray

from stackseg_client.bodies import BytesBody, Source, find_file, make_body
from stackseg_client.body_protocol import Body
from stackseg_client.errors import ConnectionFailed, InvalidResponse, StackSegError
from stackseg_client.parameters import encode_parameters
from stackseg_client.reports import (
    ContentReceiver,
    EventParser,
    Inspection,
    JobReport,
    Model,
    Stack,
    parse_inspection,
    parse_job,
    parse_models,
    parse_planes,
    parse_stack,
)
from stackseg_client.result_files import MEDIA_TYPES, SavePath, check_path, get_suffix, get_table_path
from stackseg_client.results import Result, ResultReceiver
from stackseg_client.retries import Retries

EVENT_MEDIA_TYPE = "text/event-stream"

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Receiver(Protocol[T_co]):
    """Receives the content of a successful response."""

    def write(self, block: bytes, /) -> None:
        """Add a block of the response."""

    def finish(self) -> T_co:
        """Return the result of a complete response. May block."""

    def close(self) -> None:
        """Release the resources of a response, even if it is incomplete."""


@dataclass(frozen=True)
class Operation(Generic[T]):
    """A request, and the receiver for the headers of its response.

    is_repeatable  whether sending the request twice has the same effect as sending it once
    """

    method: str
    path: str
    receive: Callable[[Mapping[str, str]], Receiver[T]]
    parameters: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: Body | None = None
    is_repeatable: bool = True


class JobFollower:
    """Interprets the events of a job, and decides when to connect again after the stream has ended.

    report  the last report of the job; None before the first one
    """

    def __init__(self, job_id: str, retries: Retries) -> None:
        self.path = f"{_job_path(job_id)}/events"
        self.report: JobReport | None = None
        self._retries, self._parser, self._failures = retries.make_patient(), EventParser(), 0

    @property
    def has_ended(self) -> bool:
        """Whether the last report is final."""
        return self.report is not None and self.report.has_ended

    def begin(self, headers: Mapping[str, str]) -> None:
        """Begin to read a stream. Raises InvalidResponse if the headers of the response are not those of events."""
        media_type = headers.get("Content-Type", "").partition(";")[0].strip()
        if media_type != EVENT_MEDIA_TYPE:
            raise InvalidResponse(
                f"The response for the events of the job is {media_type or 'without Content-Type'} instead of"
                f" {EVENT_MEDIA_TYPE}. Check the address: does a login page or another server answer?"
            )
        # The previous stream may have ended in the middle of an event.
        self._parser = EventParser()

    def feed(self, block: bytes) -> Iterator[JobReport]:
        """Yield the reports that this block of a stream completes, without repetitions. Raises InvalidResponse."""
        for report in self._parser.feed(block):
            if report != self.report:
                self.report, self._failures = report, 0
                yield report

    def get_delay(self, error: StackSegError | None) -> float:
        """Return the seconds until the next connection. Raises the error if it is final.

        error  why the stream has ended; None if the server has closed it, because it stops
        """
        error = error or ConnectionFailed("The server has stopped before the job has ended.", is_sent=True)
        delay = self._retries.get_delay(error, self._failures, is_repeatable=True)
        if delay is None:
            raise error
        self._failures += 1
        return delay


def segment(
    source: Source | None, save_to: SavePath | None, name: str | None, parameters: Mapping[str, Any], *, table: bool
) -> Operation[Result]:
    """`POST /segment`. Raises ValueError for a combination of file and table that the server does not offer.

    Raises the errors of `check_path` if the labels cannot be saved.
    """
    if save_to is not None:
        if parameters.get("output_to") is not None:
            raise TypeError("Pass save_to= for a file on this computer, or output_to= for one on the server, not both.")
        check_path(Path(save_to).expanduser(), find_file(source))
        if table:
            check_path(get_table_path(Path(save_to).expanduser()))
    operation = _send_stack("/segment", source, name, parameters, _receive_result(save_to), table=table)
    if save_to is not None:
        suffix = get_suffix(Path(save_to))
        if table and MEDIA_TYPES[suffix] != "image/tiff":
            raise ValueError(f"A table cannot be combined with {suffix}. Save the labels as .tif or .npy.")
        operation.headers["Accept"] = _choose_accept(suffix)
    return operation


def inspect(source: Source | None, name: str | None, parameters: Mapping[str, Any]) -> Operation[Inspection]:
    """`POST /inspect`."""
    return _send_stack("/inspect", source, name, parameters, receive_json(parse_inspection))


def submit(
    source: Source | None, name: str | None, key: str | None, parameters: Mapping[str, Any], *, table: bool
) -> Operation[JobReport]:
    """`POST /jobs` with an idempotency key, so that a retry does not create a second job."""
    operation = _send_stack("/jobs", source, name, parameters, receive_json(parse_job), table=table)
    operation.headers["Idempotency-Key"] = key or str(uuid.uuid4())
    return replace(operation, is_repeatable=True)


def upload(source: Source, name: str | None) -> Operation[Stack]:
    """`POST /stacks`."""
    return _send_stack("/stacks", source, name, {}, receive_json(parse_stack), is_repeatable=False)


def delete_stack(stack_id: str) -> Operation[None]:
    """`DELETE /stacks/{stack}`."""
    return Operation("DELETE", f"/stacks/{quote(stack_id, safe='')}", receive_json(_ignore))


def list_models() -> Operation[list[Model]]:
    """`GET /models`."""
    return Operation("GET", "/models", receive_json(parse_models))


def check_ready() -> Operation[None]:
    """`GET /health/ready`."""
    return Operation("GET", "/health/ready", receive_json(_ignore))


def download_sample(model: str) -> Operation[bytes]:
    """`GET /models/{name}/sample`."""
    return Operation("GET", f"/models/{quote(model, safe='')}/sample", lambda _headers: ContentReceiver(bytes))


def get_job(job_id: str) -> Operation[JobReport]:
    """`GET /jobs/{job}`."""
    return Operation("GET", _job_path(job_id), receive_json(parse_job))


def list_jobs(limit: int) -> Operation[list[JobReport]]:
    """`GET /jobs`."""
    receive = receive_json(lambda raw: [parse_job(report) for report in raw["jobs"]])
    return Operation("GET", "/jobs", receive, {"limit": str(limit)})


def cancel_job(job_id: str) -> Operation[None]:
    """`DELETE /jobs/{job}`, which keeps a job that has ended in the meantime."""
    return Operation("DELETE", _job_path(job_id), receive_json(_ignore), {"keep_finished": "true"})


def delete_job(job_id: str) -> Operation[None]:
    """`DELETE /jobs/{job}`, which cancels a job or, if it has ended, deletes it."""
    return Operation("DELETE", _job_path(job_id), receive_json(_ignore), is_repeatable=False)


def download_result(job_id: str, save_to: SavePath | None, stack: Path | None = None) -> Operation[Result]:
    """`GET /jobs/{job}/result`. Raises the errors of `check_path`. `stack` is the file of the stack, if it is known."""
    if save_to is not None:
        check_path(Path(save_to).expanduser(), stack)
    headers = {} if save_to is None else {"Accept": _choose_accept(get_suffix(Path(save_to)))}
    return Operation("GET", f"{_job_path(job_id)}/result", _receive_result(save_to), headers=headers)


def get_planes(job_id: str, **parameters: Any) -> Operation[NDArray[Any]]:
    """`GET /jobs/{job}/planes`."""

    def receive(headers: Mapping[str, str]) -> Receiver[NDArray[Any]]:
        return ContentReceiver(partial(parse_planes, headers=headers))

    return Operation("GET", f"{_job_path(job_id)}/planes", receive, encode_parameters(parameters))


def _send_stack(
    path: str,
    source: Source | None,
    name: str | None,
    parameters: Mapping[str, Any],
    receive: Callable[[Mapping[str, str]], Receiver[T]],
    *,
    table: bool = False,
    is_repeatable: bool = True,
) -> Operation[T]:
    """Return the operation that sends a stack or, if there is none, selects one on the server."""
    if "measurements" in parameters:
        raise TypeError("Pass table=True instead of measurements=.")
    if (source is None) == (parameters.get("input") is None and parameters.get("stack") is None):
        raise TypeError("Pass either a stack, or one of input= and stack=, which select a stack on the server.")
    query, body = encode_parameters({**parameters, "measurements": "zip" if table else None}), None
    headers: dict[str, str] = {}
    if source is not None:
        body = make_body(source)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(body.nbytes)}
        if name or body.name:
            # Names that are not in UTF-8 are sent as they are stored.
            headers["X-Filename"] = quote(name or body.name, safe="", errors="surrogateescape")
    # A repeated request would find the output of the first one.
    is_repeatable = is_repeatable and "output_to" not in query
    return Operation("POST", path, receive, query, headers, body, is_repeatable)


def _receive_result(save_to: SavePath | None) -> Callable[[Mapping[str, str]], Receiver[Result]]:
    return partial(ResultReceiver, save_to=None if save_to is None else Path(save_to).expanduser())


def receive_json(parse: Callable[[Any], T]) -> Callable[[Mapping[str, str]], Receiver[T]]:
    """Return the receiver for a JSON response, which `parse` converts."""
    return lambda _headers: ContentReceiver(lambda content: parse(json.loads(content or b"null")))


def send_json(
    method: str, path: str, document: Mapping[str, Any], parse: Callable[[Any], T], *, is_repeatable: bool = True
) -> Operation[T]:
    """Return the operation that sends a JSON document, and receives another one."""
    body = BytesBody(json.dumps(document).encode())
    headers = {"Content-Type": "application/json", "Content-Length": str(body.nbytes)}
    return Operation(method, path, receive_json(parse), {}, headers, body, is_repeatable)


def _ignore(_raw: Any) -> None:
    """Parse a response without content of interest."""


def _choose_accept(suffix: str) -> str:
    """Return the Accept header for a file. TIFFs and archives are sent as they are stored."""
    media_type = MEDIA_TYPES[suffix]
    return "*/*" if media_type == "image/tiff" else media_type


def _job_path(job_id: str) -> str:
    return f"/jobs/{quote(job_id, safe='')}"
