"""Interface of an engine: its capabilities, and how it builds a network from a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from service.core.sections.computing import Engine as EngineSettings
from service.engine.precision import DTYPES
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network

# The first call compiles, the second captures CUDA graphs, and the third already runs like all later calls.
WARM_UP_CALLS = 3

ALL_MEMORY_FORMATS = ("channels_last_3d", "contiguous")


class Backend(ABC):
    """Base class of engines. Subclasses override the attributes and methods whose defaults do not apply.

    memory_formats           memory formats to try by device type, the most promising first; other device types are not
                             supported
    precisions               supported precisions
    uses_float32_batches     whether batch and weights stay float32 and `precision` is only a hint to the engine
    packs_weights            whether the engine holds a copy of the weights in its own layout
    accepts_smaller_batches  whether networks accept smaller batches than those they were built for; networks
                             compiled with torch.compile never do
    """

    memory_formats: ClassVar[dict[str, tuple[str, ...]]]
    precisions: tuple[str, ...] = tuple(DTYPES)
    uses_float32_batches: bool = False
    packs_weights: bool = False
    accepts_smaller_batches: bool = False

    @abstractmethod
    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, settings: EngineSettings, /) -> Network:
        """Build a network from a prepared and transformed module, for batches like `example` [B, C, z, y, x].

        Raises RuntimeError, OSError or ImportError if the engine cannot run on this machine.
        """

    def explain_unavailability(self) -> str | None:
        """Return why the engine cannot be used on this machine, or None if it can."""
        return None

    def can_improve(self, _module: nn.Module) -> bool:
        """Return whether the engine can improve on eager execution of this module."""
        return True

    def transform(self, module: nn.Module, _settings: EngineSettings) -> nn.Module:
        """Return the module to pass to `build`: `module` itself, or a new module with its own weights."""
        return module

    def list_compile_modes(self, _settings: EngineSettings, _device: torch.device) -> tuple[str | None, ...]:
        """Return the modes of torch.compile to try, the most promising first. None means no compilation."""
        return (None,)

    def list_allowed_formats(self, settings: EngineSettings, device: torch.device) -> tuple[str, ...]:
        """Return the memory formats that the settings allow; none if the engine does not support the device."""
        formats = self.memory_formats.get(device.type, ())
        if settings.channels_last == "auto" or self.uses_float32_batches or not formats:
            return formats
        return ("channels_last_3d" if settings.channels_last else "contiguous",)

    def explain_unsupported(self, precision: str, device: torch.device, network: nn.Module) -> str | None:
        """Return why the engine cannot or should not run `network` with this precision on `device`, or None."""
        if device.type not in self.memory_formats:
            names = ("a CUDA device" if name == "cuda" else "a CPU" for name in self.memory_formats)
            return f"needs {' or '.join(names)}"
        if precision not in self.precisions:
            return f"does not support {precision}"
        return None if self.can_improve(network) else "changes nothing in this network"


class DeviceBuild(Protocol):
    """Device-specific steps of building a network, implemented for CPUs and for CUDA devices."""

    def warm_up(self, network: Network, example: Tensor) -> bool:
        """Run the warm-up calls, and return whether every call returns scores in newly allocated memory."""

    def count_buffer_bytes(self, network: Network, stream_count: int) -> int:
        """Return the number of bytes that the network holds between calls, excluding weights. Call after `warm_up`."""

    def count_score_bytes(self, network: Network) -> int | None:
        """Return the size of one window's scores in bytes, or None if a forward pass allocates anything else."""
