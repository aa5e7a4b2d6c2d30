"""ONNX files: networks exported by torch, and small graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn


def export_onnx(network: nn.Module, path: Path, shape: tuple[int, ...], axes: Any = None) -> Path:
    """Export a network for an input `x` of this shape. `axes` are torch's `dynamic_axes`."""
    with warnings.catch_warnings():
        # The exporter that traces is deprecated, but the new one takes half a minute.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), (torch.rand(shape),), path, dynamo=False, input_names=["x"], dynamic_axes=axes
        )
    return path


def write_onnx(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int | str | None],
    stored: dict[str, Any] | None = None,
    opset: int = 18,
    **changed: Any,
) -> Path:
    """Write a graph with the input `x` of this shape and the output `y`.

    stored   initializers by name
    changed  `dtype`: element type of `x`; `also`: additional inputs
    """
    image = helper.make_tensor_value_info("x", changed.get("dtype", TensorProto.FLOAT), shape)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [
        array if isinstance(array, TensorProto) else numpy_helper.from_array(np.array(array), name)
        for name, array in (stored or {}).items()
    ]
    graph = helper.make_graph(nodes, "g", [image, *changed.get("also", [])], [result], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    return path
