"""A uvicorn server on a real socket, in a thread of the test process, and a client for it."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tifffile
import uvicorn
from fakes import FakeSegmenter, wait_until
from numpy.typing import NDArray
from runtimes import get_loaded_segmenter, list_model_caches

from service.api.app import create_app
from service.api.server import build_config
from service.core.config import Settings
from service.formats.sandbox.child_process import STARTUP_TIMEOUT_SECONDS
from service.serving.build import ServiceFactories
from service.serving.devices.local.model import Segmenter
from service.serving.runtime import Runtime

READY_SECONDS = 60
TIFF = {"Content-Type": "image/tiff"}


def as_tiff(pixels: NDArray[Any], **options: Any) -> bytes:
    """Return the bytes of an ImageJ hyperstack: [Z, Y, X] with voxels of 0.5 x 0.2 x 0.2 um by default."""
    file = io.BytesIO()
    chosen = {
        "imagej": True,
        "metadata": {"axes": "ZYX", "spacing": 0.5, "unit": "um"},
        "resolution": (5.0, 5.0),
        **options,
    }
    tifffile.imwrite(file, pixels, **chosen)
    return file.getvalue()


STACK = as_tiff(np.full((3, 8, 8), 200, np.uint8))


class ServiceRequests:
    """The requests that tests send to a service.

    client   HTTP client of the service
    runtime  runtime of the service, for assertions about its state
    """

    client: Any
    runtime: Runtime

    def post(self, path: str, content: bytes, /, headers: dict[str, str] = TIFF, **parameters: Any) -> Any:
        return self.client.post(path, content=content, params=parameters or None, headers=headers)

    def segment(self, stack: bytes = STACK, /, **parameters: Any) -> Any:
        return self.post("/segment", stack, **parameters)

    def submit(self, stack: bytes = STACK, /, **parameters: Any) -> dict[str, Any]:
        response = self.post("/jobs", stack, **parameters)
        assert response.status_code == 202, response.text
        return dict(response.json())

    def show(self, job: dict[str, Any]) -> dict[str, Any]:
        return dict(self.client.get(f"/jobs/{job['id']}").json())

    def wait(self, job: dict[str, Any], *states: str) -> dict[str, Any]:
        # A job that was resumed after a restart may also wait for the process that reads files.
        wait_until(lambda: self.show(job)["state"] in states, STARTUP_TIMEOUT_SECONDS)
        return self.show(job)

    def run(self, stack: bytes = STACK, /, **parameters: Any) -> dict[str, Any]:
        """Run a job to completion and return its report."""
        return self.wait(self.submit(stack, **parameters), "done")

    def result(self, job: dict[str, Any], **headers: str) -> Any:
        return self.client.get(f"/jobs/{job['id']}/result", headers=headers)

    def leftovers(self) -> list[Path]:
        return list(self.runtime.scratch.requests_folder.iterdir())

    @property
    def fake(self) -> FakeSegmenter:
        """The fake segmenter of the default model. Waits until the model is loaded."""
        wait_until(lambda: self.runtime.list_unready_reasons() == (), READY_SECONDS)
        fake: FakeSegmenter = get_loaded_segmenter(self.runtime.models, None)
        return fake


class LiveServer(ServiceRequests):
    """A service that listens on a socket."""

    def __init__(self, server: uvicorn.Server, runtime: Runtime) -> None:
        self.server = server
        self.host, self.port = server.servers[0].sockets[0].getsockname()[:2]
        self.runtime = runtime
        self.client = httpx2.Client(base_url=f"http://{self.host}:{self.port}", timeout=120)

    @contextmanager
    def open_request(self, path: str, body: bytes, length: int | None = None, *headers: str) -> Iterator[socket.socket]:
        """Open a connection, send a POST request, and close the connection when the context exits.

        length  the Content-Length header; None: the length of `body`. A larger value makes the request incomplete.
        """
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length or len(body)}", *headers]
        with socket.create_connection((self.host, self.port)) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            yield connection

    def wait_ready(self) -> None:
        wait_until(lambda: not any("loaded" in reason for reason in self.runtime.list_unready_reasons()), READY_SECONDS)

    def wait_loaded(self) -> None:
        """Wait until all devices have loaded their models. Until then, requests only go to devices that have."""
        wait_until(
            lambda: not any(cache.pending_startup_models for cache in list_model_caches(self.runtime)), READY_SECONDS
        )


@contextmanager
def serve(
    settings: Settings,
    *,
    wait: bool = True,
    port: int = 0,
    make_server: Callable[[uvicorn.Config, Runtime], uvicorn.Server] = lambda config, _runtime: uvicorn.Server(config),
    **factories: Any,
) -> Iterator[LiveServer]:
    """Serve the application until the context exits. `factories` override fields of `ServiceFactories`.

    port  port to listen on, such as that of a service which has ended; 0: any free port
    """
    app = create_app(settings, ServiceFactories(**factories))
    config = build_config(app, host="127.0.0.1", port=port)
    server = make_server(config, app.state.runtime)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, READY_SECONDS)
        live = LiveServer(server, app.state.runtime)
        if wait:
            live.wait_ready()
        with live.client:
            yield live
    finally:
        server.should_exit = True
        thread.join(READY_SECONDS)
        # uvicorn waits for connections that a client has left open.
        server.force_exit = True
        thread.join()


def make_live_fixture(folder: Path | None = None, load: Any = Segmenter, **sections: dict[str, Any]) -> Any:
    """Return a fixture: a server for the tests of one module, with the models in `folder` or, by default, `bands`."""

    @pytest.fixture(scope="module")
    def live(bands_repository: Path) -> Iterator[LiveServer]:
        with serve(eager_settings(folder or bands_repository, **sections), load=load) as running:
            yield running

    return live


def eager_settings(folder: Path, **sections: dict[str, Any]) -> Settings:
    """Return settings for a fast start: the eager engine, one CPU thread, no result cache, and temporary jobs."""
    chosen = {
        "models": {"folder": folder},
        "limits": {"cache_bytes": 0},
        "engine": {"kind": "eager"},
        "device": {"name": "cpu", "threads": 1},
        "jobs": {"folder": "temporary"},
    }
    for name, values in sections.items():
        chosen[name] = {**chosen.get(name, {}), **values}
    return Settings.model_validate(chosen)


def read_descriptor_target(descriptor: Path) -> str:
    """Return the file that a descriptor in /proc refers to, or an empty string if it has been closed."""
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""


def parse_problem(answer: Any) -> tuple[int, str]:
    """Return the status and the problem type, without the URN prefix, of an error response."""
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("urn:stackseg:problem:")


class LabelTiff:
    """A result in OME-TIFF, read with tifffile alone."""

    def __init__(self, content: bytes) -> None:
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            series = file.series[0]
            self.axes, self.pixels = series.axes, series.asarray()
            attributes = tifffile.xml2dict(file.ome_metadata or "<OME/>")["OME"]["Image"]["Pixels"]
            self.names = [page.get("Name") for page in _listed(attributes["Channel"])]
        sizes = [attributes.get(f"PhysicalSize{axis}") for axis in "ZYX"]
        self.voxel_size = None if None in sizes else tuple(float(size) for size in sizes)
        self.units = {attributes.get(f"PhysicalSize{axis}Unit", "µm") for axis in "ZYX"}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_classes(content: bytes) -> NDArray[np.uint8]:
    """Return the pixels of a class map in OME-TIFF."""
    return LabelTiff(content).pixels.astype(np.uint8)


def read_recorded_stacks(out: Path) -> list[str]:
    """Return the stacks that a run on a folder has recorded so far, in the order in which they were added."""
    path = out / "stacks.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [content["stack"] for content in map(json.loads, lines) if "stack" in content]
