"""A server with two simulated devices, the first of which fails as files in a folder say.

The devices compute on the CPU, and in everything else count as separate ones. Faults are files of these names:
no-memory  batches of more than one window do not fit
no-room    no window fits
no-room-load  no model fits
break      the next batch breaks the device for good, as an error that sticks to a CUDA context does
break-load  so does loading the next model
broken     the device broke while it was idle; those that break it end in this one
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fakes import SeparateDevice
from torch import Tensor, nn

from service.api.app import create_app
from service.api.server import build_config, listen
from service.core.config import Settings
from service.core.hardware import devices
from service.core.hardware.devices import Driver
from service.models.spec import ModelSpec
from service.serving.build import Parts
from service.serving.devices.local.model import Segmenter


class FaultyDevice(SeparateDevice):
    """A device, as its driver tells, whose faults are files in a folder; None: it has none."""

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

        return devices.is_working(device, compute, pause=0.01)

    def free_bytes(self, device: torch.device) -> int:
        self.check()
        return super().free_bytes(device)

    def release_memory(self, _device: torch.device) -> None:
        self.check()


class FaultySegmenter(Segmenter):
    """A segmenter whose network fails with its device."""

    def __init__(self, spec: ModelSpec, settings: Settings, driver: Driver) -> None:
        assert isinstance(driver, FaultyDevice)
        super().__init__(spec, settings, driver)
        self._faulty = driver

    def warm_up(self, *, tune: bool = False) -> None:
        self._faulty.break_if("break-load")
        if self._faulty.has("no-room-load"):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        super().warm_up(tune=tune)
        # Not only its warm network: also what runs where that does not fit.
        self.scores.module.register_forward_pre_hook(self._fail)

    def _fail(self, _network: nn.Module, batch: tuple[Tensor, ...]) -> None:
        self._faulty.break_if("break")
        if self._faulty.has("no-room") or (self._faulty.has("no-memory") and len(batch[0]) > 1):
            raise RuntimeError("CUDA error: out of memory")


def serve(models: Path, faults: Path, port: Connection, grace: float) -> None:
    """Serve the models until the process is ended, and tell the port.

    grace  as `watchdog.grace_seconds`
    """
    settings: dict[str, Any] = {
        "models": {"folder": models, "default": "bands"},
        "engine": {"kind": "eager"},
        "device": {"serve": ["cpu", "cpu"], "threads": 1},
        "watchdog": {"grace_seconds": grace},
        "limits": {"cache_bytes": 0},
        "server": {"scratch_folder": faults.parent},
    }
    chosen = Settings.model_validate(settings)
    parts = Parts(FaultySegmenter, lambda name: FaultyDevice(faults if name == "cpu" else None))
    app = create_app(chosen, parts)
    with listen("127.0.0.1", 0) as listener:
        port.send(listener.getsockname()[1])
        uvicorn.Server(build_config(app)).run(sockets=[listener])
