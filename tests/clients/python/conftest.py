"""A real server with the bundled nuclei model, and clients for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import LiveServer, eager_settings, serve
from paths import ROOT
from stackseg_client import Client


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    settings = eager_settings(
        ROOT / "models", models={"serve": ["nuclei"]}, limits={"cache_bytes": 2**26}, engine={"kind": "auto"}
    )
    with serve(settings) as live:
        yield live


@pytest.fixture(scope="session")
def url(server: LiveServer) -> str:
    return f"http://{server.host}:{server.port}"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client
