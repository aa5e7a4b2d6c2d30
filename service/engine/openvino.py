"""OpenVINO on the CPU, for one static shape; an optional dependency (`stackseg[openvino]`)."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from service.core.errors import BadParameter
from service.models.loader import Network

# On import openvino would report to its vendor unless the user has opted out; it does without where the reporter is
# missing. A service for other people's images has nothing to report.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

HINTS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


def missing() -> str | None:
    """Why it cannot be used, None where it can."""
    if importlib.util.find_spec("openvino") is None:
        return "openvino is not installed; add it with pip install 'stackseg[openvino]'"
    return None


class CompiledNetwork:
    """Scores lie in a buffer that belongs to the batch buffer: they are valid until that is handed over again.

    request  makes something that computes one batch at a time
    streams  batch buffers that are in use, at most
    """

    def __init__(self, request: Callable[[], Any], shape: torch.Size, streams: int) -> None:
        self._shape = shape
        self._request = request
        self._streams = streams
        self._bound: dict[int, _Bound] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x], contiguous, of the example's shape -> float32 [B, K, z, y, x]. Raises BadParameter."""
        if x.shape != self._shape:
            raise BadParameter(f"This network was made for {tuple(self._shape)} and cannot run {tuple(x.shape)}.")
        # Windows arrive in a few buffers for good, one for each stream, which are handed over once and then only read.
        bound = self._bound.get(x.data_ptr())
        if bound is None:
            bound = self._bind(x)
        bound.request.infer(bound.inputs, share_inputs=True)
        return bound.scores

    def _bind(self, x: Tensor) -> _Bound:
        if len(self._bound) == self._streams:
            # Others than before: those of a trial, say.
            self._bound.clear()
        request = self._request()
        scores = torch.from_numpy(request.get_output_tensor(0).data)
        bound = self._bound[x.data_ptr()] = _Bound(request, {0: x.numpy()}, scores, x)
        return bound


class _Bound(NamedTuple):
    """One batch buffer, which is kept alive so that its address stays its own, and what computes it."""

    request: Any
    inputs: dict[int, Any]
    scores: Tensor
    batch: Tensor


def _convert(module: nn.Module, example: Tensor) -> Any:
    """What `openvino.convert_model` does, which would also set the level and filters of all logging in the process."""
    from openvino.frontend import FrontEndManager  # noqa: PLC0415
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # noqa: PLC0415

    with warnings.catch_warnings():
        # It traces, which torch deprecates and remarks upon; shapes are static here, so that traces are exact.
        warnings.simplefilter("ignore")
        decoder = TorchScriptPythonDecoder(module, example_input=example)
    frontend = FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    graph.reshape(list(example.shape))
    return graph


def make(module: nn.Module, example: Tensor, precision: str, streams: int = 1) -> Network:
    """Convert and compile `module` (float32, CPU) for the shape of `example`; computes in `precision`.

    As many threads as torch uses, divided among `streams` callers. Raises ImportError without openvino, RuntimeError
    for what it cannot convert.
    """
    import openvino  # noqa: PLC0415 - optional, and a second of start-up

    graph = _convert(module, example)
    options = {
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": str(streams),
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }
    compiled = openvino.Core().compile_model(graph, "CPU", options)
    return CompiledNetwork(compiled.create_infer_request, example.shape, streams)
