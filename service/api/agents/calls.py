"""Tools for agents, the client that calls a tool, and the answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from fastapi import Request
from pydantic import BaseModel
from starlette.types import Message

from service.api.agents.arguments import describe_arguments, parse_arguments
from service.api.dependencies import get_caller, get_quota_name
from service.api.messages.error_responses import handle_error
from service.core.errors import StackSegError
from service.core.hardware.devices import translate_error
from service.serving.jobs.job_manager import JobManager
from service.serving.runtime import Runtime

log = logging.getLogger(__name__)


class ToolAnswer(NamedTuple):
    """Answer to a tool call.

    text   text for the language model
    data   the same information as a JSON object; None if there is only text
    image  PNG file; None if there is no image
    """

    text: str
    data: dict[str, Any] | None = None
    image: bytes | None = None
    is_error: bool = False

    @classmethod
    def from_data(cls, data: BaseModel | dict[str, Any]) -> ToolAnswer:
        """Return an answer with a JSON object, without members that are null."""
        members = data.model_dump(mode="json", exclude_none=True) if isinstance(data, BaseModel) else data
        return cls(json.dumps(members, ensure_ascii=False), members)


class Client:
    """The client of a tool call, with the permissions and quotas of the HTTP request that contains the call.

    request     the HTTP request, which has passed the checks of keys, rate limits, host names and origins
    runtime     runtime of the service
    async_jobs  manager of the jobs
    name        name of the caller, which owns jobs and stacks
    quota_name  name of the client whose quotas apply
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.runtime: Runtime = request.app.state.runtime
        self.async_jobs: JobManager = request.app.state.async_jobs
        self.name, self.quota_name = get_caller(request), get_quota_name(request)

    def make_request(self, path: str, parameters: Mapping[str, str]) -> Request:
        """Return a POST request of this client to the HTTP API, with parameters and an empty body.

        The request is only passed to functions of the service. It is never sent.
        """
        query_string = urlencode(parameters).encode()
        scope = {**self.request.scope, "path": path, "raw_path": path.encode(), "query_string": query_string}
        scope["headers"] = [(b"content-length", b"0")]
        return Request(scope, _EmptyBody().receive)


class _EmptyBody:
    """An empty request body, after which the connection stays open."""

    def __init__(self) -> None:
        self._is_sent = False

    async def receive(self) -> Message:
        if self._is_sent:
            # If the client disconnects, the task of the tool call is cancelled, or its wait ends by itself.
            await asyncio.Event().wait()
        self._is_sent = True
        return {"type": "http.request", "body": b"", "more_body": False}


@dataclass(frozen=True)
class Tool:
    """A tool: its description for language models, the model of its arguments, and its function.

    argument_names  the arguments to describe; None: all
    is_read_only    whether the tool changes nothing
    is_destructive  whether the tool may undo work
    """

    name: str
    title: str
    description: str
    arguments: type[BaseModel]
    run: Callable[[Client, Any], Awaitable[ToolAnswer]]
    argument_names: Collection[str] | None = None
    is_read_only: bool = True
    is_destructive: bool = False

    @property
    def input_schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return describe_arguments(self.arguments, self.argument_names)


async def call_tool(request: Request, tool: Tool, arguments: Mapping[str, Any]) -> ToolAnswer:
    """Call a tool for the client of an HTTP request. An error becomes an answer with the text of its problem document.

    If the calling task is cancelled, the tool is cancelled as well.
    """
    task = asyncio.ensure_future(_run(request, tool, arguments))
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    if (exception := task.exception()) is None:
        return task.result()
    error = translate_error(exception)
    if not isinstance(error, StackSegError):
        log.error("the tool %s failed", tool.name, exc_info=exception)
    response = handle_error(request, error if isinstance(error, Exception) else Exception())
    problem = json.loads(bytes(response.body))
    return ToolAnswer(problem["detail"], problem, is_error=True)


async def _run(request: Request, tool: Tool, arguments: Mapping[str, Any]) -> ToolAnswer:
    return await tool.run(Client(request), parse_arguments(tool.arguments, arguments))
