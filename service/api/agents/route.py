"""POST /mcp: tools for AI agents, with the Model Context Protocol (streamable HTTP without sessions)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.core.errors import FeatureDisabled

router = APIRouter(tags=["agents"])


# OpenAPI cannot describe the messages. Clients of this protocol get the descriptions of the tools from the service.
@router.post("/mcp", include_in_schema=False)
async def answer_agent(request: Request) -> Response:
    """Answer a message of an agent."""
    if request.app.state.agent_server is None:
        raise FeatureDisabled(
            "The service offers no tools for agents. The operator can set `server.mcp: true`, after installing the"
            " extra: pip install 'stackseg[mcp]'."
        )
    response: Response = request.app.state.agent_server.respond()
    return response
