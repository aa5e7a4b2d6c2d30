from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_service import Service, start


@pytest.fixture(scope="module")
def running(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with start(bands_repository, tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    """The service shared by the tests of a module, reset after each test."""
    yield running
    running.reset()


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of asynchronous tests."""
    return "asyncio"
