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
    """A service that tests share, as each of them finds it."""
    yield running
    running.reset()


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests that are coroutines."""
    return "asyncio"
