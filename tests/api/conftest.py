from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from job_service import Service, start_service


@pytest.fixture(scope="module")
def module_service(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with start_service(bands_repository, tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def service(module_service: Service) -> Iterator[Service]:
    """The service shared by the tests of a module, reset after each test."""
    yield module_service
    module_service.reset()


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of asynchronous tests."""
    return "asyncio"
