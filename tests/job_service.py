"""A service with a fake segmenter and a job folder, called without a socket."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import FakeSegmenter, wait_until
from live import STACK, ServiceRequests
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.app import create_app
from service.core.config import Settings
from service.serving.build import ServiceFactories


class Service(ServiceRequests):
    """The application with a fake segmenter, called without a socket.

    caller  the caller of the next requests; None: the API key determines it
    """

    def __init__(self, app: Any, folder: Path) -> None:
        self.app, self.folder, self.runtime = app, folder, app.state.runtime
        self.async_jobs = app.state.async_jobs
        self.client = TestClient(app, "http://localhost", raise_server_exceptions=False)
        self.caller: str | None = None
        app.add_middleware(self._identify)

    def _identify(self, app: ASGIApp) -> ASGIApp:
        async def identify(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and self.caller is not None:
                scope["state"]["caller"] = self.caller
            await app(scope, receive, send)

        return identify

    @contextmanager
    def check_memory_is_freed(self) -> Iterator[list[weakref.ref[Any]]]:
        """Check that volumes and labels are freed as soon as their requests end. Yield weak references to them.

        The garbage collector is disabled: with the many objects of torch, it can take hours until it frees a cycle.
        """
        fake: Any = self.fake
        segment, references = fake.segment, list[weakref.ref[Any]]()

        def record_references(volume: Any, *arguments: Any, **options: Any) -> Any:
            references.append(weakref.ref(volume.read))
            result = segment(volume, *arguments, **options)
            references.append(weakref.ref(result.segmentation.pixels))
            return result

        fake.segment = record_references
        gc.collect()
        gc.disable()
        try:
            yield references
            wait_until(lambda: references and not any(reference() is not None for reference in references))
        finally:
            gc.enable()
            del fake.segment

    def submit_blocked_job(self, stack: bytes = STACK, /, **parameters: Any) -> dict[str, Any]:
        """Submit a job that runs until `fake.gate` is opened, and wait until it runs."""
        self.fake.gate.clear()
        job = self.submit(stack, **parameters)
        self.wait(job, "running")
        return job

    def reset(self) -> None:
        """Let all work finish, and restore the state after startup."""
        self.caller, self.fake.error, self.fake.notes = None, None, ()
        self.fake.gate.set()
        wait_until(lambda: self.runtime.devices.waiting_count == 0 and not self.runtime.devices.running_jobs)


@contextmanager
def start_service(repository: Path, folder: Path, load: Any = FakeSegmenter, **sections: Any) -> Iterator[Service]:
    """Start a service that stores its jobs in `folder`. A second service there finds the jobs of the first."""
    (folder / "scratch").mkdir(exist_ok=True)
    defaults = {
        "models": {"folder": repository},
        "server": {"scratch_folder": folder / "scratch", "drain_seconds": 0.2},
        "jobs": {"folder": folder / "jobs"},
        "limits": {"cache_bytes": 0},
    }
    service = Service(create_app(Settings.model_validate(defaults | sections), ServiceFactories(load=load)), folder)
    with service.client:
        assert service.fake
        yield service
