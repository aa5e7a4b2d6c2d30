"""Model folders whose weights are arbitrary bytes, for tests of `model.yaml` and the repository."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import yaml

WEIGHTS = b"any bytes: the repository compares them with their hash and never parses them"


INSTANCES: dict[str, Any] = {
    "name": "cells",
    "version": "2.1",
    "summary": "Cells.",
    "licence": "Apache-2.0",
    "training_data": "None.",
    "architecture": {"name": "ShuffleUNet", "arguments": {"in_channels": 2, "out_channels": 2}},
    "weights": {"sha256": hashlib.sha256(WEIGHTS).hexdigest()},
    "input": {
        "channels": 2,
        "channel_names": ["nuclei", "membranes"],
        "voxel_size": [0.5, 0.25, 0.25],
        "normalisation": {"kind": "percentile"},
        "roi_size": [32, 64, 64],
    },
    "outputs": ["foreground", "distance"],
    "decoding": {"kind": "instances"},
}


def write_folder(folder: Path, content: Any = INSTANCES, weights: bytes | None = WEIGHTS) -> Path:
    """Write a model folder. Without `weights` it has no weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    if weights is not None:
        (folder / "weights.safetensors").write_bytes(weights)
    return folder


def copy_model(folder: Path, copy: Path, **changes: Any) -> Path:
    """Copy a model folder to `copy` and name the model after it. `changes` replace keys of `model.yaml`."""
    shutil.copytree(folder, copy)
    file = copy / "model.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"name": copy.name} | changes))
    return copy


def change_instances(path: str, value: Any) -> dict[str, Any]:
    """Return a copy of INSTANCES in which the key at a dotted path, such as `input.channels`, has this value."""
    *sections, key = path.split(".")
    content = yaml.safe_load(yaml.safe_dump(INSTANCES))
    inner = content
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return content
