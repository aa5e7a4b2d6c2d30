"""The `winograd` engine: our own CPU kernels, and one call for a whole forward."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from service.core.sections.computing import Engine as EngineSettings
from service.engine.base import WARM_UP_CALLS, Backend
from service.engine.compile.torch_compile import TorchCompileBackend
from service.engine.cpu import onednn, winograd
from service.engine.cpu.graph import CpuGraph, capture
from service.engine.prepare import Float32Scores
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network


class WinogradBackend(Backend):
    """3x3x3 convolutions by Winograd's algorithm, all other layers as kernels of ours or of oneDNN.

    With a compile mode torch.compile runs the other layers instead. That is faster for few networks in float32, for
    others packed weights and norms of one pass make up for what it fuses, and it costs each start 10 s of CPU time.
    """

    memory_formats: ClassVar = {"cpu": ("channels_last_3d",)}
    precisions = ("bf16", "fp32")
    varying_batch = True

    def explain_missing(self) -> str | None:
        return winograd.KERNELS.problem

    def suits(self, module: nn.Module) -> bool:
        return winograd.count_replaceable(module) > 0

    def transform(self, module: nn.Module) -> nn.Module:
        return winograd.replace_convolutions(module)

    def compile_modes(self, settings: EngineSettings, _device: torch.device) -> tuple[str | None, ...]:
        return (None, "default") if settings.compile_mode == "auto" else (settings.compile_mode,)

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, settings: EngineSettings, /) -> Network:
        if config.compile_mode is not None:
            return TorchCompileBackend().build(module, example, config, settings)
        # Blending widens scores where it reads them: a float32 copy of them would be written and read for nothing.
        network = module.network if isinstance(module, Float32Scores) else module
        return capture(onednn.pack(network, gives_scores=True), example)


class CpuBuild:
    """First calls and memory of a network on a CPU; a `DeviceBuild`."""

    def warm_up(self, network: Network, example: Tensor) -> bool:
        """Make the first calls, and return whether every call gives scores in memory of their own."""
        tensors = [example, *(network(example) for _ in range(WARM_UP_CALLS))]
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)

    def count_kept_bytes(self, network: Network, streams: int) -> int:
        """Return the bytes that all streams keep between calls."""
        return streams * network.nbytes if isinstance(network, CpuGraph) else 0

    def count_score_bytes(self, network: Network) -> int | None:
        """Return the bytes of one window's scores, where a forward allocates nothing else; None where it does."""
        return network.score_bytes if isinstance(network, CpuGraph) else None
