"""A service with a fake segmenter whose jobs live in a folder, called without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fakes import FakeSegmenter, until
from live import as_tiff
from runtimes import loaded_segmenter
from starlette.testclient import TestClient

from service.api.app import create_app
from service.core.config import Settings
from service.formats.sandbox.child_process import STARTUP_SECONDS
from service.serving.build import Parts

TIFF = {"Content-Type": "image/tiff"}
STACK = as_tiff(np.full((3, 8, 8), 200, np.uint8))


class Service:
    """The application with a fake segmenter, called without a socket; `caller` is who asks."""

    def __init__(self, client: TestClient) -> None:
        self.client, self.runtime, self.async_jobs = client, client.app.state.runtime, client.app.state.async_jobs
        self.caller: str | None = None

    @property
    def fake(self) -> FakeSegmenter:
        until(lambda: self.runtime.unready_reasons() == ())
        fake: Any = loaded_segmenter(self.runtime.models, None)
        return fake

    def submit(self, stack: bytes = STACK, **parameters: Any) -> dict[str, Any]:
        response = self.client.post("/jobs", content=stack, params=parameters, headers=TIFF)
        assert response.status_code == 202, response.text
        return dict(response.json())

    def show(self, job: dict[str, Any]) -> dict[str, Any]:
        return dict(self.client.get(f"/jobs/{job['id']}").json())

    def wait(self, job: dict[str, Any], *states: str) -> dict[str, Any]:
        # As long as a process that reads files may take to start: a job of an earlier process waits for that as well.
        until(lambda: self.show(job)["state"] in states, STARTUP_SECONDS)
        return self.show(job)

    def result(self, job: dict[str, Any]) -> Any:
        return self.client.get(f"/jobs/{job['id']}/result")


@contextmanager
def start(models: Path, folder: Path, load: Any = FakeSegmenter, **sections: Any) -> Iterator[Service]:
    """A service whose jobs live in `folder`, as they do when it is started there again."""
    (folder / "scratch").mkdir(exist_ok=True)
    chosen = {
        "models": {"folder": models},
        "server": {"scratch_folder": folder / "scratch", "drain_seconds": 0.2},
        "jobs": {"folder": folder / "jobs"},
    }
    settings = Settings.model_validate(chosen | sections)
    app = create_app(settings, Parts(load=load))
    service: list[Service] = []

    @app.middleware("http")
    async def identify(request: Any, call_next: Any) -> Any:
        request.state.caller = service[0].caller
        return await call_next(request)

    with TestClient(app, raise_server_exceptions=False) as client:
        service.append(Service(client))
        assert service[0].fake
        yield service[0]
