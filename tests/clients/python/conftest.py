"""Real servers with a small model of classes and with the bundled model of nuclei, and clients for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveServer, eager_settings, serve
from paths import ROOT
from stackseg_client import Client, retries


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delays that the server does not specify."""
    monkeypatch.setattr(retries, "FIRST_DELAY_SECONDS", 0.02)


@pytest.fixture(scope="session")
def nuclei_url() -> Iterator[str]:
    """URL of a server with the bundled model, which finds objects."""
    settings = eager_settings(ROOT / "models", models={"serve": ["nuclei"]}, engine={"kind": "auto"})
    with serve(settings) as live:
        yield f"http://{live.host}:{live.port}"


@pytest.fixture(scope="session")
def host_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the host of `server`, from which it reads `input=scans/...` and to which it writes results."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="session")
def server(bands_repository: Path, host_folder: Path) -> Iterator[LiveServer]:
    """A server with the model `bands`, which returns classes."""
    references = {"inputs": {"scans": str(host_folder)}, "outputs": {"results": str(host_folder)}}
    with serve(eager_settings(bands_repository, references=references)) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(f"http://{server.host}:{server.port}") as client:
        yield client
