"""A tool call of a client, and its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from fastapi import Request
from pydantic import BaseModel
from starlette.types import Message

from service.api.dependencies import get_caller, get_quota_name
from service.serving.jobs.jobs import JobManager
from service.serving.runtime import Runtime


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
