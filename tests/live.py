"""A real uvicorn server on a real socket, in a thread of the test process."""

from __future__ import annotations

import io
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
from runtimes import loaded_segmenter
from starlette.testclient import TestClient

from service.api.app import create_app
from service.api.server import build_config
from service.core.config import Settings
from service.serving.devices.segmenter import Segmenter
from service.serving.runtime import Runtime

READY_SECONDS = 60


class Live:
    """A running service: its address, a client for it, and its runtime to look into."""

    def __init__(self, server: uvicorn.Server, runtime: Runtime) -> None:
        self.server = server
        self.host, self.port = server.servers[0].sockets[0].getsockname()[:2]
        self.runtime = runtime
        self.client = httpx2.Client(base_url=f"http://{self.host}:{self.port}", timeout=120)

    def segment(self, stack: bytes, **parameters: Any) -> httpx2.Response:
        return self.client.post("/segment", content=stack, params=parameters, headers={"Content-Type": "image/tiff"})

    def leftovers(self) -> list[Path]:
        return list(self.runtime.scratch.requests.iterdir())

    def wait_ready(self) -> None:
        until(lambda: not any("loaded" in reason for reason in self.runtime.unready_reasons()), READY_SECONDS)

    def wait_loaded(self) -> None:
        """Until all devices have their models; while only one has, all requests go to that one."""
        until(lambda: not any(worker.model_cache.starting for worker in self.runtime.device_workers), READY_SECONDS)


class FakeService:
    """The application with a fake segmenter, called without a socket."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        settings = Settings.model_validate(
            {"models": {"folder": folder}, "server": {"scratch_folder": scratch}, "limits": {"cache_bytes": 0}}
        )
        self.app = create_app(settings)
        self.runtime = self.app.state.runtime = Runtime(settings, FakeSegmenter)
        self.client = TestClient(self.app, raise_server_exceptions=False)

    def fake(self) -> FakeSegmenter:
        until(lambda: self.runtime.unready_reasons() == (), READY_SECONDS)
        fake: Any = loaded_segmenter(self.runtime.models, None)
        fake.error, fake.notes = None, ()
        return fake


@contextmanager
def serve(
    settings: Settings,
    *,
    wait: bool = True,
    load: Callable[..., Segmenter] = Segmenter,
    make_server: Callable[[uvicorn.Config, Runtime], uvicorn.Server] = lambda config, _runtime: uvicorn.Server(config),
    **runtime: Any,
) -> Iterator[Live]:
    app = create_app(settings, Runtime(settings, load, **runtime))
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


def opened_as(descriptor: Path) -> str:
    """The name of the file behind it; nothing where it was closed meanwhile."""
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""


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
