from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from service.api.access.access_log import RequestLog
from service.api.access.path_prefix import ForwardedHeaders
from service.core import telemetry


def log_request(caplog: pytest.LogCaptureFixture, address: str | None, **headers: str) -> tuple[str, dict[str, Any]]:
    """Return the text and the JSON object that are logged for a request from this address."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def send(_message: Any) -> None:
        pass

    raw_headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    client = None if address is None else (address, 50000)
    scope = {"type": "http", "method": "GET", "path": "/jobs", "root_path": "", "client": client}
    caplog.clear()
    with caplog.at_level(logging.INFO, "service.access"):
        asyncio.run(ForwardedHeaders(RequestLog(app))(scope | {"headers": raw_headers}, None, send))
    (record,) = caplog.records
    return record.getMessage(), json.loads(telemetry.JsonFormatter().format(record))


@pytest.mark.parametrize(
    ("address", "forwarded_address", "logged_address"),
    [
        ("192.0.2.7", "198.51.100.3", "192.0.2.7"),
        ("127.0.0.1", "198.51.100.3", "198.51.100.3"),
        ("::1", "2001:db8::5", "2001:db8::5"),
        ("127.0.0.1", "1.2.3.4 admin\x85" + "x" * 99, "1.2.3.4?admin"),
    ],
)
def test_text_and_json_contain_the_address_of_the_client(
    caplog: pytest.LogCaptureFixture, address: str, forwarded_address: str, logged_address: str
) -> None:
    text, entry = log_request(caplog, address, x_forwarded_for=forwarded_address, x_request_id="first")
    assert entry["client"].startswith(logged_address)
    assert len(entry["client"]) <= 64
    assert text.split()[4:] == ["first", entry["client"], "nobody"]


def test_connections_without_an_address_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    text, entry = log_request(caplog, None, x_request_id="first")
    assert text.split()[4:] == ["first", "-", "nobody"]
    assert "client" not in entry
