from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import FakeService


@pytest.fixture(scope="module")
def service(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    running = FakeService(bands_repository, tmp_path_factory.mktemp("scratch"))
    with running.client:
        running.fake()
        yield running
