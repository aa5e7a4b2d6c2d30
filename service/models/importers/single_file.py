"""Single files of TorchScript, `torch.export` and ONNX; the operator states what they do not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.models.importers import onnx_package
from service.models.importers.draft import Draft, WeightsKind

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".pt2", ".onnx")
KINDS: dict[str, tuple[WeightsKind, str]] = {".pt2": ("exported", "torch.export"), ".onnx": ("onnx", "ONNX")}


def recognises(path: Path) -> bool:
    """Return whether `path` is such a file, by its suffix."""
    return path.is_file() and path.suffix in SUFFIXES


def read(path: Path) -> Draft:
    """Read a file into a draft, most keys of which are problems that the operator settles."""
    kind, label = KINDS.get(path.suffix, ("torchscript", "TorchScript"))
    content: dict[str, Any] = {
        "name": path.stem,
        "version": "1",
        "summary": f"The {label} file {path.name}.",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "input": {"channels": 1} | (onnx_package.read_input(path) if kind == "onnx" else {}),
    }
    keys = ["input.normalisation", "input.roi_size", "outputs", "activation", "decoding"]
    if "roi_size" in content["input"]:
        keys.remove("input.roi_size")
    return Draft(content, path, kind, problems=dict.fromkeys(keys, f"{label} files do not say it"))
