"""The `winograd` engine, which runs a whole forward pass on the CPU as one call to C++ kernels."""

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
    """The engine that runs 3x3x3 convolutions with Winograd's algorithm, and other layers with other CPU kernels.

    The other layers run with StackSeg's or oneDNN's kernels or, if a compile mode is set, with torch.compile.
    torch.compile is faster only for a few networks in float32, and costs 10 s of CPU time at each start. For most
    networks, packed weights and fused norms gain as much as the compiler's fusions.
    """

    memory_formats: ClassVar = {"cpu": ("channels_last_3d",)}
    precisions = ("bf16", "fp32")
    accepts_smaller_batches = True

    def explain_unavailability(self) -> str | None:
        return winograd.KERNELS.problem

    def can_improve(self, module: nn.Module) -> bool:
        return winograd.count_replaceable(module) > 0

    def transform(self, module: nn.Module, settings: EngineSettings) -> nn.Module:
        return winograd.replace_convolutions(module, settings.matmul_precision)

    def list_compile_modes(self, settings: EngineSettings, _device: torch.device) -> tuple[str | None, ...]:
        return (None, "default") if settings.compile_mode == "auto" else (settings.compile_mode,)

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, settings: EngineSettings, /) -> Network:
        if config.compile_mode is not None:
            return TorchCompileBackend().build(module, example, config, settings)
        # Blending converts scores to float32 when it reads them, so a float32 copy would waste memory bandwidth.
        network = module.network if isinstance(module, Float32Scores) else module
        return capture(onednn.pack_convolutions(network, returns_scores=True), example)


class CpuBuild:
    """The `DeviceBuild` for CPUs."""

    def warm_up(self, network: Network, example: Tensor) -> bool:
        """Run the warm-up calls, and return whether every call returns scores in newly allocated memory."""
        tensors = [example, *(network(example) for _ in range(WARM_UP_CALLS))]
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)

    def count_buffer_bytes(self, network: Network, stream_count: int) -> int:
        """Return the number of bytes that all streams together hold between calls."""
        return stream_count * network.nbytes if isinstance(network, CpuGraph) else 0

    def count_score_bytes(self, network: Network) -> int | None:
        """Return the size of one window's scores in bytes, or None if a forward pass allocates anything else."""
        return network.score_bytes if isinstance(network, CpuGraph) else None
