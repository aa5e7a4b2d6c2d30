"""MCP server for agents: one JSON-RPC message per HTTP request, without sessions. Requires the `mcp` extra."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ImageContent,
    ListToolsResult,
    TextContent,
    ToolAnnotations,
)
from mcp.types import Tool as ToolDescription
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.agents.calls import Tool, ToolAnswer, call_tool
from service.api.agents.tool_descriptions import INSTRUCTIONS, TOOLS, TOOLS_BY_NAME
from service.core.files.bundled import get_software_version

# Maximum size of a message. The longest arguments have a few thousand characters.
MAX_MESSAGE_BYTES = 2**17
# The library logs every message at the level INFO. The access log of the service already contains every request.
logging.getLogger("mcp").setLevel(logging.WARNING)


class AgentServer:
    """MCP server whose tools call the functions of the HTTP API with the permissions of the client of each request."""

    def __init__(self) -> None:
        self._server: Server[dict[str, Any]] = Server(
            "stackseg",
            version=get_software_version(),
            title="StackSeg",
            instructions=INSTRUCTIONS,
            on_list_tools=_list_tools,
            on_call_tool=_call_tool,
        )
        self._manager: StreamableHTTPSessionManager

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Context manager in which the server answers messages. It can be entered again after its end."""
        # Host names and origins are not checked by the library, because the middleware of the service has done so.
        self._manager = StreamableHTTPSessionManager(
            self._server, json_response=True, stateless=True, max_request_body_size=MAX_MESSAGE_BYTES
        )
        async with self._manager.run():
            yield

    def respond(self) -> Response:
        """Return the response to the message in a request."""
        return _MessageResponse(self._manager)


class _MessageResponse(Response):
    """Response that the library writes, after reading the message from the body of the request."""

    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        super().__init__()
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)


async def _list_tools(_context: Any, _parameters: Any) -> ListToolsResult:
    return ListToolsResult(tools=[_describe_tool(tool) for tool in TOOLS])


def _describe_tool(tool: Tool) -> ToolDescription:
    annotations = ToolAnnotations(
        title=tool.title,
        read_only_hint=tool.is_read_only,
        destructive_hint=tool.is_destructive,
        open_world_hint=False,
    )
    return ToolDescription(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.input_schema,
        annotations=annotations,
    )


async def _call_tool(context: Any, parameters: CallToolRequestParams) -> CallToolResult:
    tool = TOOLS_BY_NAME.get(parameters.name)
    if tool is None:
        raise MCPError(INVALID_PARAMS, f"There is no such tool. The tools are {', '.join(TOOLS_BY_NAME)}.")
    request: Request = context.request
    return _convert_answer(await call_tool(request, tool, parameters.arguments or {}))


def _convert_answer(answer: ToolAnswer) -> CallToolResult:
    content: list[ContentBlock] = [TextContent(type="text", text=answer.text)]
    if answer.image is not None:
        picture = base64.b64encode(answer.image).decode()
        content.append(ImageContent(type="image", data=picture, mime_type="image/png"))
    return CallToolResult(content=content, structured_content=answer.data, is_error=answer.is_error)
