"""Import single files: weights, TorchScript, `torch.export` or ONNX. The operator specifies the missing settings."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.core.files.zip_archive import ARCHIVE_ERRORS, open_torch_archive
from service.models.exporters.model_keys import FILE_NAME, parse_model_keys
from service.models.graphs.pt2_archive import Pt2Archive
from service.models.importers import onnx_file
from service.models.importers.checkpoint import LEGACY_TORCH_HEADER, is_torchscript, read_checkpoint
from service.models.importers.draft import Draft, WeightsKind

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".ckpt", ".tar", ".bin", ".safetensors", ".pt2", ".onnx")
# Suffixes of checkpoints that another importer reads.
OTHER_SUFFIXES = (".pytorch",)
REQUIRED_KEYS = ("input.normalisation", "input.roi_size", "outputs", "activation", "decoding")
DESCRIPTIONS = {
    "exported": "a torch.export graph",
    "onnx": "an ONNX graph",
    "torchscript": "a TorchScript program",
}
SIZE_NOTE = (
    "The file does not specify the voxel size or the object diameter of the training data. Stacks are "
    "used at their original resolution unless you specified --voxel-size or --diameter."
)


def is_supported(path: Path) -> bool:
    """Return whether `path` is a file with a supported suffix, or a file of PyTorch with an unknown suffix."""
    return path.is_file() and (path.suffix in SUFFIXES or (path.suffix not in OTHER_SUFFIXES and _is_torch_file(path)))


def _is_torch_file(path: Path) -> bool:
    """Return whether the content of a file looks like it was written by `torch.save`, by any version of PyTorch."""
    if zipfile.is_zipfile(path):
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") and name.count("/") == 1 for name in archive.namelist())
        return False
    with path.open("rb") as file:
        return file.read(len(LEGACY_TORCH_HEADER)) == LEGACY_TORCH_HEADER


def read(path: Path) -> Draft:
    """Read a file into a draft, in which most keys are missing. Raises UnsupportedPackage for unsupported files."""
    kind = _find_kind(path)
    description, inputs, missing_keys, notes = (
        DESCRIPTIONS.get(kind, ""),
        dict[str, Any](),
        [*REQUIRED_KEYS],
        [SIZE_NOTE],
    )
    if kind == "state dict":
        checkpoint = read_checkpoint(path)
        description, missing_keys = checkpoint.describe(), ["architecture", *REQUIRED_KEYS]
        if checkpoint.skipped_keys:
            source, skipped_keys = ".".join(checkpoint.keys), ", ".join(checkpoint.skipped_keys)
            notes.append(f"The tensors were read from {source!r}; other keys were ignored: {skipped_keys}.")
    else:
        keys, settings = _read_graph_settings(path, kind)
        if keys:
            notes = [f"The file contains the settings of the exported model {keys['name']!r:.80}."]
            return Draft(keys, path, kind, notes=tuple(notes), description=description)
        inputs |= {"channels": 1} | settings
    content: dict[str, Any] = {
        "name": path.stem,
        "version": "1",
        "summary": f"Imported from the file {path.name}.",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "input": inputs,
    }
    unspecified_keys = tuple(key for key in missing_keys if key != "input.roi_size" or "roi_size" not in inputs)
    return Draft(content, path, kind, missing_keys=unspecified_keys, notes=tuple(notes), description=description)


def _read_graph_settings(path: Path, kind: WeightsKind) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of an exported model, or {}, and the input settings that the file specifies."""
    if kind == "onnx":
        return onnx_file.read_settings(path)
    return _read_exported_keys(path) if kind == "exported" else {}, {}


def _read_exported_keys(path: Path) -> dict[str, Any]:
    """Return the keys in an exported model. Return {} for a damaged archive, which the loader reports."""
    try:
        with open_torch_archive(path) as archive:
            text = Pt2Archive(archive).read_extra_file(FILE_NAME)
    except (OSError, *ARCHIVE_ERRORS):
        return {}
    return {} if text is None else parse_model_keys(text, f"extra/{FILE_NAME}")


def _find_kind(path: Path) -> WeightsKind:
    """Return the kind of weights in a file, by its suffix, or by its content if the suffix is ambiguous."""
    if path.suffix in {".onnx", ".pt2"}:
        return "onnx" if path.suffix == ".onnx" else "exported"
    if path.suffix in {".ts", ".torchscript"} or is_torchscript(path):
        return "torchscript"
    return "state dict"
