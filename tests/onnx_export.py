"""Exporting networks to ONNX files with torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn


def export_onnx(network: nn.Module, path: Path, shape: tuple[int, ...], axes: Any = None) -> Path:
    """Write the network for an image of `shape`; `axes` names the axes of its input `x` that may have any length."""
    with warnings.catch_warnings():
        # Tracing is deprecated, but the other exporter takes half a minute.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), (torch.rand(shape),), path, dynamo=False, input_names=["x"], dynamic_axes=axes
        )
    return path
