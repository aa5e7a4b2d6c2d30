"""Bare TorchScript files, which say nothing of what goes in and comes out: the operator states that."""

from __future__ import annotations

from pathlib import Path

from service.errors import UnsupportedPackage
from service.imports.draft import Draft

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".pt2")


def recognises(path: Path) -> bool:
    return path.is_file() and path.suffix in SUFFIXES


def read(path: Path) -> Draft:
    """A draft with hardly anything in it. Raises UnsupportedPackage for `torch.export`'s files.

    Those are read by `torch.export.load` alone, which evaluates text of the file as expressions of Python, and falls
    back to unpickling whatever they hold.
    """
    if path.suffix == ".pt2":
        raise UnsupportedPackage(
            f"{path.name}: torch.export.load may run code that the file brings, so .pt2 is not read; save the network "
            "with torch.jit.save, or its state_dict in a MONAI bundle."
        )
    content = {
        "name": path.stem,
        "version": "1",
        "summary": f"The TorchScript program {path.name}.",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "input": {"channels": 1},
    }
    nothing = "a TorchScript file does not say it"
    keys = ("input.normalisation", "input.roi_size", "outputs", "activation", "decoding")
    return Draft(content, path, "torchscript", problems=dict.fromkeys(keys, nothing))
