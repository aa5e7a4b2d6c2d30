"""TensorRT on CUDA devices, for one static shape, through torch-tensorrt, which is not among our dependencies.

It was written after torch-tensorrt's documentation, and never run on a GPU: whoever uses it is told so.
"""

from __future__ import annotations

import importlib.util
from typing import ClassVar

import torch
from torch import Tensor, nn

from service.core.config import Engine as EngineSettings
from service.core.errors import BadParameter
from service.engine.base import Backend
from service.engine.plans import EngineConfig
from service.models.loader import Network


class TensorRtBackend(Backend):
    """TensorRT; its layers compute in the dtypes that the module has."""

    memory_formats: ClassVar = {"cuda": ("contiguous",)}
    packs_weights = True
    slow_build_seconds = 60.0
    caution = (
        "The tensorrt engine was never run on a GPU before it was released; compare its labels with another engine's."
    )

    def explain_missing(self) -> str | None:
        if importlib.util.find_spec("torch_tensorrt") is None:
            return (
                "torch-tensorrt is not installed; add the version that matches torch's with pip install torch-tensorrt"
            )
        return None

    def build(self, module: nn.Module, example: Tensor, _config: EngineConfig, settings: EngineSettings, /) -> Network:
        """Build a TensorRT engine of `module` for the shape of `example`.

        Raises ImportError without torch-tensorrt, RuntimeError for what cannot be exported or built.
        """
        import torch_tensorrt  # noqa: PLC0415 - not installed in most places

        program = torch.export.export(module, (example,))
        engine = torch_tensorrt.dynamo.compile(
            program, arg_inputs=[example], device=example.device, disable_tf32=settings.matmul_precision == "highest"
        )
        return FixedShapeNetwork(engine, example)


class FixedShapeNetwork:
    """A network for batches of one shape and dtype."""

    def __init__(self, network: Network, example: Tensor) -> None:
        self._network, self._shape, self._dtype = network, example.shape, example.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x], as the example -> float32 [B, K, z, y, x]. Raises BadParameter for anything else."""
        if x.shape != self._shape or x.dtype != self._dtype:
            want, have = f"{tuple(self._shape)} {self._dtype}", f"{tuple(x.shape)} {x.dtype}"
            raise BadParameter(f"This network was made for {want} and cannot run {have}.")
        return self._network(x)
