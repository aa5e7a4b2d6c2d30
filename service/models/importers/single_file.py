"""Single files of weights, TorchScript, `torch.export` and ONNX; the operator states what they do not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.models.importers import onnx_package
from service.models.importers.checkpoint import is_torchscript, read_checkpoint
from service.models.importers.draft import Draft, WeightsKind

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".ckpt", ".tar", ".bin", ".safetensors", ".pt2", ".onnx")
KEYS = ("input.normalisation", "input.roi_size", "outputs", "activation", "decoding")
LABELS = {
    "exported": "a graph of torch.export",
    "onnx": "an ONNX graph",
    "torchscript": "a TorchScript program",
}
SIZE_NOTE = (
    "The file does not say at which voxel size, or for objects of which width, the network was trained: stacks are "
    "taken as they are sampled unless you stated --voxel-size or --diameter."
)


def recognises(path: Path) -> bool:
    """Return whether `path` is such a file, by its suffix."""
    return path.is_file() and path.suffix in SUFFIXES


def read(path: Path) -> Draft:
    """Read a file into a draft that misses most keys. Raise UnsupportedPackage for a file that is none of these."""
    kind = _find_kind(path)
    what, stated, keys, notes = LABELS.get(kind, ""), dict[str, Any](), [*KEYS], [SIZE_NOTE]
    if kind == "state dict":
        checkpoint = read_checkpoint(path)
        what, keys = checkpoint.describe(), ["architecture", *KEYS]
        if checkpoint.left_out:
            place, others = ".".join(checkpoint.place), ", ".join(checkpoint.left_out)
            notes.append(f"The tensors are those of {place!r}; left out: {others}.")
    else:
        stated |= {"channels": 1} | (onnx_package.read_input(path) if kind == "onnx" else {})
    content: dict[str, Any] = {
        "name": path.stem,
        "version": "1",
        "summary": f"From the file {path.name}.",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "input": stated,
    }
    missing = tuple(key for key in keys if key != "input.roi_size" or "roi_size" not in stated)
    return Draft(content, path, kind, missing=missing, notes=tuple(notes), what=what)


def _find_kind(path: Path) -> WeightsKind:
    """Return what a file holds: by its content where torch gives all kinds the same suffix."""
    if path.suffix in {".onnx", ".pt2"}:
        return "onnx" if path.suffix == ".onnx" else "exported"
    if path.suffix in {".ts", ".torchscript"} or is_torchscript(path):
        return "torchscript"
    return "state dict"
