"""Files of TorchScript and `torch.export`, which do not say what goes in and comes out: the operator states that."""

from __future__ import annotations

from pathlib import Path

from service.imports.draft import Draft, Kind

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".pt2")


def recognises(path: Path) -> bool:
    return path.is_file() and path.suffix in SUFFIXES


def read(path: Path) -> Draft:
    """A draft with hardly anything in it."""
    kind: Kind = "exported" if path.suffix == ".pt2" else "torchscript"
    what = "torch.export" if kind == "exported" else "TorchScript"
    content = {
        "name": path.stem,
        "version": "1",
        "summary": f"The {what} file {path.name}.",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "input": {"channels": 1},
    }
    nothing = f"a {what} file does not say it"
    keys = ("input.normalisation", "input.roi_size", "outputs", "activation", "decoding")
    return Draft(content, path, kind, problems=dict.fromkeys(keys, nothing))
