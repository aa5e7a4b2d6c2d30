"""The interface of an engine: what it supports, and how it makes a network of a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from service.core.sections.computing import Engine as EngineSettings
from service.engine.precision import DTYPES
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network

# The first call compiles, the second records CUDA graphs, the third is the first that runs as all later ones do.
WARM_UP_CALLS = 3

ANY_FORMAT = ("channels_last_3d", "contiguous")


class Backend(ABC):
    """An engine; a subclass overrides what differs from these defaults.

    memory_formats  to try, the most promising first, by type of the devices that it runs on
    precisions      that it computes
    float32_batch   batch and weights stay float32; `precision` is a hint to the engine
    packs_weights   keeps weights in a layout of its own, beside those of the module
    varying_batch   may take fewer windows than it was built for, unless torch.compile built it
    """

    memory_formats: ClassVar[dict[str, tuple[str, ...]]]
    precisions: tuple[str, ...] = tuple(DTYPES)
    float32_batch: bool = False
    packs_weights: bool = False
    varying_batch: bool = False

    @abstractmethod
    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, settings: EngineSettings, /) -> Network:
        """Make a network of `module`, prepared and transformed, for batches like `example` [B, C, z, y, x].

        Raises RuntimeError, OSError or ImportError where this engine does not run here.
        """

    def explain_missing(self) -> str | None:
        """Return why the engine cannot be used on this machine, None where it can."""
        return None

    def suits(self, _module: nn.Module) -> bool:
        """Return whether the engine makes anything of a module that others do not."""
        return True

    def transform(self, module: nn.Module) -> nn.Module:
        """Return the module that `build` takes; another one than `module` has weights of its own."""
        return module

    def compile_modes(self, _settings: EngineSettings, _device: torch.device) -> tuple[str | None, ...]:
        """Return the modes of torch.compile to try, the most promising first; None runs without compilation."""
        return (None,)

    def allowed_formats(self, settings: EngineSettings, device: torch.device) -> tuple[str, ...]:
        """Return the memory formats that the settings allow, none where the engine does not run on such a device."""
        formats = self.memory_formats.get(device.type, ())
        if settings.channels_last == "auto" or self.float32_batch or not formats:
            return formats
        return ("channels_last_3d" if settings.channels_last else "contiguous",)

    def explain_unfit(self, precision: str, device: torch.device, network: nn.Module) -> str | None:
        """Return why the engine cannot or need not run `network` there in that precision, None where it may."""
        if device.type not in self.memory_formats:
            names = ("a CUDA device" if name == "cuda" else "a CPU" for name in self.memory_formats)
            return f"needs {' or '.join(names)}"
        if precision not in self.precisions:
            return f"does not compute in {precision}"
        return None if self.suits(network) else "changes nothing in this network"


class DeviceBuild(Protocol):
    """The part of building a network that differs between a CPU and a CUDA device."""

    def warm_up(self, network: Network, example: Tensor) -> bool:
        """Make the first calls, and return whether every call gives scores in memory of their own."""

    def count_kept_bytes(self, network: Network, streams: int) -> int:
        """Return the bytes that the network keeps beside its weights, once its first calls are done."""

    def count_score_bytes(self, network: Network) -> int | None:
        """Return the bytes of one window's scores, where a forward allocates nothing else; None where it does."""
