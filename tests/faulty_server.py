"""A server with two simulated devices. Files in a folder inject faults into the first device.

Both devices compute on the CPU, but are reported as devices with their own memory. The names of the files are:

no-memory     batches of more than one window run out of memory
no-room       every batch runs out of memory
no-room-load  loading a model runs out of memory
break         the next batch breaks the device permanently, like a sticky error of a CUDA context
break-load    loading the next model breaks the device permanently
broken        the device is broken; `break` and `break-load` create this file
"""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fakes import SeparateMemoryDriver
from torch import Tensor, nn

from service.api.app import create_app
from service.api.server import build_config
from service.core.config import Settings
from service.core.hardware import devices
from service.core.hardware.devices import Driver
from service.models.spec import ModelSpec
from service.serving.build import ServiceFactories
from service.serving.devices.local.model import Segmenter


class FaultyDriver(SeparateMemoryDriver):
    """A driver whose device has the faults named by the files in a folder, or no faults if the folder is None."""

    def __init__(self, faults: Path | None) -> None:
        super().__init__()
        self._faults = faults

    def has(self, fault: str) -> bool:
        return self._faults is not None and (self._faults / fault).exists()

    def check(self) -> None:
        if self.has("broken"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def break_if(self, fault: str) -> None:
        if self.has(fault):
            assert self._faults is not None
            (self._faults / "broken").touch()
        self.check()

    def is_working(self, device: torch.device) -> bool:
        def compute(_device: torch.device) -> bool:
            self.check()
            return True

        return devices.is_working(device, compute, pause_seconds=0.01)

    def query_free_bytes(self, device: torch.device) -> int:
        self.check()
        return super().query_free_bytes(device)

    def release_memory(self, _device: torch.device) -> None:
        self.check()


class FaultySegmenter(Segmenter):
    """A segmenter whose network fails if its device does."""

    def __init__(self, spec: ModelSpec, settings: Settings, driver: Driver) -> None:
        assert isinstance(driver, FaultyDriver)
        super().__init__(spec, settings, driver)
        self._faulty = driver

    def warm_up(self, *, tune: bool = False) -> None:
        self._faulty.break_if("break-load")
        if self._faulty.has("no-room-load"):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        super().warm_up(tune=tune)
        # The hook is on the module, so it also applies to the fallbacks that run after an out-of-memory error.
        self.score_computer.module.register_forward_pre_hook(self._fail)

    def _fail(self, _network: nn.Module, batch: tuple[Tensor, ...]) -> None:
        self._faulty.break_if("break")
        if self._faulty.has("no-room") or (self._faulty.has("no-memory") and len(batch[0]) > 1):
            raise RuntimeError("CUDA error: out of memory")


def serve(models: Path, faults: Path, port: Connection, grace: float) -> None:
    """Serve the models until the process ends. Send the port through `port`.

    grace  value of `watchdog.grace_seconds`
    """
    settings: dict[str, Any] = {
        "models": {"folder": models, "default": "bands"},
        "engine": {"kind": "eager"},
        "device": {"serve": ["cpu", "cpu"], "threads": 1},
        "watchdog": {"grace_seconds": grace},
        "limits": {"cache_bytes": 0},
        "jobs": {"folder": "temporary"},
        "server": {"scratch_folder": faults.parent},
    }
    chosen = Settings.model_validate(settings)
    factories = ServiceFactories(FaultySegmenter, lambda name: FaultyDriver(faults if name == "cpu" else None))
    app = create_app(chosen, factories)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        uvicorn.Server(build_config(app)).run(sockets=[listener])
