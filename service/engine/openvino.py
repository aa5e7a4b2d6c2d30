"""OpenVINO on the CPU, for one static shape; an optional dependency (`stackseg[openvino]`)."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from service.errors import BadParameter
from service.networks import Network

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
    """Scores lie in a buffer of its own: they are valid until the next call."""

    def __init__(self, request: Any, shape: torch.Size) -> None:
        self._shape = shape
        self._request = request
        self._inputs: dict[int, Any] = {}
        self._address = 0
        self._scores = torch.from_numpy(request.get_output_tensor(0).data)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x], contiguous, of the example's shape -> float32 [B, K, z, y, x]. Raises BadParameter."""
        if x.shape != self._shape:
            raise BadParameter(f"This network was made for {tuple(self._shape)} and cannot run {tuple(x.shape)}.")
        # Windows arrive in one buffer for good, which is handed over once and then only read.
        if x.data_ptr() != self._address:
            self._inputs = {0: x.numpy()}
            self._address = x.data_ptr()
        self._request.infer(self._inputs, share_inputs=True)
        return self._scores


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


def make(module: nn.Module, example: Tensor, precision: str) -> Network:
    """Convert and compile `module` (float32, CPU) for the shape of `example`; computes in `precision`.

    As many threads as torch uses. Raises ImportError without openvino, RuntimeError for what it cannot convert.
    """
    import openvino  # noqa: PLC0415 - optional, and a second of start-up

    graph = _convert(module, example)
    options = {
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
    }
    compiled = openvino.Core().compile_model(graph, "CPU", options)
    return CompiledNetwork(compiled.create_infer_request(), example.shape)
