"""Files of TorchScript, `torch.export` and ONNX, which hardly say what goes in and out: the operator states it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.models.importers import onnx_package
from service.models.importers.package import Draft, Kind

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".pt2", ".onnx")
KINDS: dict[str, tuple[Kind, str]] = {".pt2": ("exported", "torch.export"), ".onnx": ("onnx", "ONNX")}


def recognises(path: Path) -> bool:
    return path.is_file() and path.suffix in SUFFIXES


def read(path: Path) -> Draft:
    """A draft with hardly anything in it."""
    kind, what = KINDS.get(path.suffix, ("torchscript", "TorchScript"))
    content: dict[str, Any] = {
        "name": path.stem,
        "version": "1",
        "summary": f"The {what} file {path.name}.",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "input": {"channels": 1} | (onnx_package.stated(path) if kind == "onnx" else {}),
    }
    nothing = f"{what} files do not say it"
    keys = ["input.normalisation", "input.roi_size", "outputs", "activation", "decoding"]
    if "roi_size" in content["input"]:
        keys.remove("input.roi_size")
    return Draft(content, path, kind, problems=dict.fromkeys(keys, nothing))
