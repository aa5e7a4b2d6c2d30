"""OpenVINO on the CPU, for one static shape; an optional dependency (`stackseg[openvino]`)."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from service.core.errors import BadParameter
from service.engine.base import Backend
from service.engine.tuning.plans import EngineConfig
from service.models.network import Network

# On import openvino reports to its vendor, unless the user has opted out or the reporter cannot be imported. A service
# for other people's images has nothing to report.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

HINTS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


class OpenVinoBackend(Backend):
    """OpenVINO's CPU plugin; it computes in the configured precision, from a float32 module and batch."""

    memory_formats: ClassVar = {"cpu": ("contiguous",)}
    float32_batch = True
    packs_weights = True

    def explain_missing(self) -> str | None:
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed; add it with pip install 'stackseg[openvino]'"
        return None

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, /, *_: object) -> Network:
        """Convert and compile `module` for the shape of `example`, with all of torch's threads among its streams.

        Raises ImportError without openvino, RuntimeError for what it cannot convert.
        """
        # Optional, and a second of start-up.
        openvino = import_module("openvino")
        graph = _convert(module, example)
        options = {
            "INFERENCE_PRECISION_HINT": HINTS[config.precision],
            "PERFORMANCE_HINT": "LATENCY" if config.streams == 1 else "THROUGHPUT",
            "NUM_STREAMS": str(config.streams),
            "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        }
        compiled = openvino.Core().compile_model(graph, "CPU", options)
        return CompiledNetwork(compiled.create_infer_request, example.shape, config.streams)


class CompiledNetwork:
    """A compiled graph for batches of one shape.

    Scores lie in a buffer that belongs to the batch's memory: they are valid until that is handed over again.

    create_request  makes an inference request, which computes one batch at a time
    streams         batch buffers that are in use, at most
    """

    def __init__(self, create_request: Callable[[], Any], shape: torch.Size, streams: int) -> None:
        self._shape = shape
        self._create_request = create_request
        self._streams = streams
        self._bindings: dict[int, _Binding] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x], contiguous, of the example's shape -> float32 [B, K, z, y, x]. Raises BadParameter."""
        if x.shape != self._shape:
            raise BadParameter(f"This network was made for {tuple(self._shape)} and cannot run {tuple(x.shape)}.")
        # Windows arrive in a few lasting buffers, one for each stream; each is bound to a request once.
        binding = self._bindings.get(x.data_ptr())
        if binding is None:
            binding = self._bind(x)
        binding.request.infer(binding.inputs, share_inputs=True)
        return binding.scores

    def _bind(self, x: Tensor) -> _Binding:
        if len(self._bindings) == self._streams:
            # The buffers of an earlier caller, such as a trial, are not used any more.
            self._bindings.clear()
        request = self._create_request()
        scores = torch.from_numpy(request.get_output_tensor(0).data)
        binding = self._bindings[x.data_ptr()] = _Binding(request, {0: x.numpy()}, scores, x)
        return binding


class _Binding(NamedTuple):
    """A batch buffer and the request that computes it; `batch` keeps the buffer alive, and so its address taken."""

    request: Any
    inputs: dict[int, Any]
    scores: Tensor
    batch: Tensor


def _convert(module: nn.Module, example: Tensor) -> Any:
    """Convert `module` to a graph for the shape of `example`.

    `openvino.convert_model` would do that too, and set the level and filters of all logging in the process.
    """
    ts_decoder = import_module("openvino.frontend.pytorch.ts_decoder")
    with warnings.catch_warnings():
        # torch warns about tracing; with static shapes, as here, traces are exact.
        warnings.simplefilter("ignore")
        decoder = ts_decoder.TorchScriptPythonDecoder(module, example_input=example)
    frontend = import_module("openvino.frontend").FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    graph.reshape(list(example.shape))
    return graph
