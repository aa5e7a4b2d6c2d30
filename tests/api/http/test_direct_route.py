from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from service.api.http.direct_route import DirectDispatch, DirectRoute


def test_only_direct_endpoints_are_asked_at_once() -> None:
    async def here(_request: Request) -> Response:
        return PlainTextResponse("here")

    async def framework(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("framework")(scope, receive, send)

    direct, other = DirectRoute("/direct", here, methods=["POST"]), APIRoute("/other", here, methods=["POST"])
    client = TestClient(DirectDispatch(framework, [direct, other]))
    assert client.post("/direct").text == "here"
    assert {client.get("/direct").text, client.post("/direct/").text, client.post("/other").text} == {"framework"}
