"""A real uvicorn server on a real socket, in a thread of the test process."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import tifffile
import uvicorn
from fakes import FakeSegmenter, until
from numpy.typing import NDArray
from runtimes import caches, loaded_segmenter

from service.api.app import create_app
from service.api.server import build_config
from service.core.config import Settings
from service.formats.sandbox.child_process import STARTUP_SECONDS
from service.serving.build import Parts
from service.serving.runtime import Runtime

READY_SECONDS = 60
TIFF = {"Content-Type": "image/tiff"}


def as_tiff(pixels: NDArray[Any], **options: Any) -> bytes:
    """An ImageJ hyperstack in memory; [Z, Y, X] with voxels of 0.5 x 0.2 x 0.2 um unless stated otherwise."""
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


class Requests:
    """What tests ask of a service by its `client`, and its `runtime` to look into."""

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
        # As long as a process that reads files may take to start: a job of an earlier process waits for that as well.
        until(lambda: self.show(job)["state"] in states, STARTUP_SECONDS)
        return self.show(job)

    def run(self, stack: bytes = STACK, /, **parameters: Any) -> dict[str, Any]:
        """The report of a job that is done."""
        return self.wait(self.submit(stack, **parameters), "done")

    def result(self, job: dict[str, Any], **headers: str) -> Any:
        return self.client.get(f"/jobs/{job['id']}/result", headers=headers)

    def leftovers(self) -> list[Path]:
        return list(self.runtime.scratch.requests.iterdir())

    @property
    def fake(self) -> FakeSegmenter:
        """The fake segmenter of the default model, once it is loaded."""
        until(lambda: self.runtime.unready_reasons() == (), READY_SECONDS)
        fake: FakeSegmenter = loaded_segmenter(self.runtime.models, None)
        return fake


class Live(Requests):
    """A service that runs at an address."""

    def __init__(self, server: uvicorn.Server, runtime: Runtime) -> None:
        self.server = server
        self.host, self.port = server.servers[0].sockets[0].getsockname()[:2]
        self.runtime = runtime
        self.client = httpx2.Client(base_url=f"http://{self.host}:{self.port}", timeout=120)

    @contextmanager
    def sending(self, path: str, body: bytes, length: int | None = None, *headers: str) -> Iterator[socket.socket]:
        """A connection that has sent a request, all of it unless `length` is more, and hangs up after the block."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length or len(body)}", *headers]
        with socket.create_connection((self.host, self.port)) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            yield connection

    def wait_ready(self) -> None:
        until(lambda: not any("loaded" in reason for reason in self.runtime.unready_reasons()), READY_SECONDS)

    def wait_loaded(self) -> None:
        """Until all devices have their models; while only one has, all requests go to that one."""
        until(lambda: not any(cache.starting for cache in caches(self.runtime)), READY_SECONDS)


@contextmanager
def serve(
    settings: Settings,
    *,
    wait: bool = True,
    make_server: Callable[[uvicorn.Config, Runtime], uvicorn.Server] = lambda config, _runtime: uvicorn.Server(config),
    **parts: Any,
) -> Iterator[Live]:
    """Serve with the `parts` of `Parts` in place of the default ones."""
    app = create_app(settings, Parts(**parts))
    config = build_config(app, host="127.0.0.1", port=0)
    server = make_server(config, app.state.runtime)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, READY_SECONDS)
        live = Live(server, app.state.runtime)
        if wait:
            live.wait_ready()
        with live.client:
            yield live
    finally:
        server.should_exit = True
        thread.join()


def eager(folder: Path, **sections: dict[str, Any]) -> Settings:
    """Settings that start fast: nothing is compiled, one thread, and every request is computed."""
    chosen = {
        "models": {"folder": folder},
        "limits": {"cache_bytes": 0},
        "engine": {"kind": "eager"},
        "device": {"name": "cpu", "threads": 1},
    }
    for name, values in sections.items():
        chosen[name] = {**chosen.get(name, {}), **values}
    return Settings.model_validate(chosen)


def opened_as(descriptor: Path) -> str:
    """The name of the file behind it; nothing where it was closed meanwhile."""
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""


def problem(answer: Any) -> tuple[int, str]:
    """The status of a refusal, and the last word of its type."""
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("urn:stackseg:problem:")


class Answer:
    """A label TIFF as an independent reader sees it."""

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


def classes(content: bytes) -> NDArray[np.uint8]:
    return Answer(content).pixels.astype(np.uint8)
