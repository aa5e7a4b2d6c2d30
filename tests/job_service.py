"""A service with a fake segmenter whose jobs live in a folder, called without a socket."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import FakeSegmenter, until
from live import STACK, Requests
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.app import create_app
from service.core.config import Settings
from service.serving.build import Parts


class Service(Requests):
    """The application with a fake segmenter, called without a socket; `caller` is who asks; None: the key says it."""

    def __init__(self, app: Any, folder: Path) -> None:
        self.app, self.folder, self.runtime = app, folder, app.state.runtime
        self.async_jobs = app.state.async_jobs
        self.client = TestClient(app, raise_server_exceptions=False)
        self.caller: str | None = None
        app.add_middleware(self._identify)

    def _identify(self, app: ASGIApp) -> ASGIApp:
        async def identify(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and self.caller is not None:
                scope["state"]["caller"] = self.caller
            await app(scope, receive, send)

        return identify

    @contextmanager
    def watch_memory(self) -> Iterator[list[weakref.ref[Any]]]:
        """The volumes and labels of requests, which are to leave memory at once.

        Not when Python next looks for cycles, which takes hours among all that torch brings along.
        """
        fake: Any = self.fake
        segment, seen = fake.segment, list[weakref.ref[Any]]()

        def noting(volume: Any, *arguments: Any, **options: Any) -> Any:
            seen.append(weakref.ref(volume.read))
            result = segment(volume, *arguments, **options)
            seen.append(weakref.ref(result.segmentation.pixels))
            return result

        fake.segment = noting
        gc.collect()
        gc.disable()
        try:
            yield seen
            until(lambda: seen and not any(known() is not None for known in seen))
        finally:
            gc.enable()
            del fake.segment

    def hold(self, stack: bytes = STACK, /, **parameters: Any) -> dict[str, Any]:
        """A job that runs until `fake.gate` is open."""
        self.fake.gate.clear()
        job = self.submit(stack, **parameters)
        self.wait(job, "running")
        return job

    def reset(self) -> None:
        """Let all work end, and the next be as that of a service that has just begun."""
        self.caller, self.fake.error, self.fake.notes = None, None, ()
        self.fake.gate.set()
        until(lambda: self.runtime.devices.waiting == 0 and not self.runtime.devices.running)


@contextmanager
def start(repository: Path, folder: Path, load: Any = FakeSegmenter, **sections: Any) -> Iterator[Service]:
    """A service whose jobs live in `folder`, as they do when it is started there again."""
    (folder / "scratch").mkdir(exist_ok=True)
    chosen = {
        "models": {"folder": repository},
        "server": {"scratch_folder": folder / "scratch", "drain_seconds": 0.2},
        "jobs": {"folder": folder / "jobs"},
        "limits": {"cache_bytes": 0},
    }
    service = Service(create_app(Settings.model_validate(chosen | sections), Parts(load=load)), folder)
    with service.client:
        assert service.fake
        yield service
