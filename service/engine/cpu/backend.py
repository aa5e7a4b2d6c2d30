"""The `winograd` engine: our own CPU kernels, and one call for a whole forward."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from service.engine.base import Backend
from service.engine.cpu import cpu_graph, onednn, winograd
from service.engine.prepare import Float32Scores
from service.models.loader import Network


class WinogradBackend(Backend):
    """3x3x3 convolutions by Winograd's algorithm, all other layers as kernels of ours or of oneDNN."""

    memory_formats: ClassVar = {"cpu": ("channels_last_3d",)}
    precisions = ("bf16", "fp32")
    varying_batch = True

    def explain_missing(self) -> str | None:
        return winograd.KERNELS.problem

    def suits(self, module: nn.Module) -> bool:
        return winograd.count_replaceable(module) > 0

    def transform(self, module: nn.Module) -> nn.Module:
        return winograd.replace_convolutions(module)

    def build(self, module: nn.Module, example: Tensor, /, *_: object) -> Network:
        # Blending widens scores where it reads them: a float32 copy of them would be written and read for nothing.
        network = module.network if isinstance(module, Float32Scores) else module
        return cpu_graph.capture(onednn.pack(network, gives_scores=True), example)
