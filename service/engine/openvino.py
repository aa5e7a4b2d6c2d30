"""The OpenVINO engine on the CPU, for one static shape. OpenVINO is an optional dependency (`stackseg[openvino]`)."""

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

# On import, openvino sends telemetry to its vendor unless the user has opted out or `openvino_telemetry` cannot be
# imported. A service that processes other people's images must not send any telemetry.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

PRECISION_HINTS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


class OpenVinoBackend(Backend):
    """OpenVINO's CPU plugin, which converts float32 batches and weights to the configured precision."""

    memory_formats: ClassVar = {"cpu": ("contiguous",)}
    uses_float32_batches = True
    packs_weights = True

    def explain_unavailability(self) -> str | None:
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed; add it with pip install 'stackseg[openvino]'"
        return None

    def build(self, module: nn.Module, example: Tensor, config: EngineConfig, /, *_: object) -> Network:
        """Convert and compile `module` for the shape of `example`. The streams share all of torch's threads.

        Raises ImportError if openvino is not installed, and RuntimeError if it cannot convert the module.
        """
        # Imported here because openvino is optional and importing it takes a second.
        openvino = import_module("openvino")
        graph = _convert(module, example)
        options = {
            "INFERENCE_PRECISION_HINT": PRECISION_HINTS[config.precision],
            "PERFORMANCE_HINT": "LATENCY" if config.streams == 1 else "THROUGHPUT",
            "NUM_STREAMS": str(config.streams),
            "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        }
        compiled_model = openvino.Core().compile_model(graph, "CPU", options)
        return CompiledNetwork(compiled_model.create_infer_request, example.shape, config.streams)


class CompiledNetwork:
    """A compiled graph for batches of one shape.

    Every batch buffer has its own score buffer. Scores stay valid until the same batch buffer is passed again.

    create_request  function that creates an inference request, which computes one batch at a time
    stream_count    maximum number of batch buffers in use
    """

    def __init__(self, create_request: Callable[[], Any], shape: torch.Size, stream_count: int) -> None:
        self._shape = shape
        self._create_request = create_request
        self._stream_count = stream_count
        self._bindings: dict[int, _Binding] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Compute float32 scores [B, K, z, y, x] of a contiguous batch [B, C, z, y, x].

        Raises BadParameter if the shape differs from that of the example.
        """
        if x.shape != self._shape:
            raise BadParameter(
                f"This network was built for batches of shape {tuple(self._shape)}, not {tuple(x.shape)}."
            )
        # Windows arrive in a few long-lived buffers, one per stream. Each buffer is bound once to an inference request.
        binding = self._bindings.get(x.data_ptr())
        if binding is None:
            binding = self._bind(x)
        binding.request.infer(binding.inputs, share_inputs=True)
        return binding.scores

    def _bind(self, x: Tensor) -> _Binding:
        if len(self._bindings) == self._stream_count:
            # The bound buffers belong to an earlier caller, such as a trial, and are no longer used.
            self._bindings.clear()
        request = self._create_request()
        scores = torch.from_numpy(request.get_output_tensor(0).data)
        binding = self._bindings[x.data_ptr()] = _Binding(request, {0: x.numpy()}, scores, x)
        return binding


class _Binding(NamedTuple):
    """A batch buffer and its inference request. `batch` keeps the buffer alive, so its address is not reused."""

    request: Any
    inputs: dict[int, Any]
    scores: Tensor
    batch: Tensor


def _convert(module: nn.Module, example: Tensor) -> Any:
    """Convert `module` to an OpenVINO graph for the shape of `example`.

    `openvino.convert_model` is not used because it changes the log level and filters of the whole process.
    """
    ts_decoder = import_module("openvino.frontend.pytorch.ts_decoder")
    with warnings.catch_warnings():
        # torch warns that a trace may be inexact. With static shapes, the trace is exact.
        warnings.simplefilter("ignore")
        decoder = ts_decoder.TorchScriptPythonDecoder(module, example_input=example)
    frontend = import_module("openvino.frontend").FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    graph.reshape(list(example.shape))
    return graph
