"""ONNX files as torch writes them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


def exported(network: nn.Module, path: Path, shape: tuple[int, ...], axes: Any = None) -> Path:
    """The network for an image of `shape`; `axes`: those of its input `x` that may have any length, with names."""
    with warnings.catch_warnings():
        # The exporter by tracing is on its way out; the other one takes half a minute.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), (torch.rand(shape),), path, dynamo=False, input_names=["x"], dynamic_axes=axes
        )
    return path
