"""TorchScript file -> torch module, checked before and after the file is parsed.

A TorchScript program can read and write files (`aten::from_file`, `aten::save`), and the `__setstate__` of a module
runs while the file is loaded. A file with such a method, a hook, or a class of an extension is therefore refused before
it is loaded, and a program is only called if every operator of it is on the list of allowed ones.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.allowed_operators import ATEN, PRIM

# Methods that run while a file is loaded, hooks that run beside the checked graph, and classes of extensions.
FORBIDDEN = (b"__setstate__", b"__getstate__", b"__forward_hooks__", b"__forward_pre_hooks__", b"torch.classes")
# Entries of an archive that hold the bytes of one tensor. torch ignores the case of names, this check does not.
TENSOR_ENTRY = re.compile(r"[^/]+/(data|constants)/[0-9]+")
# Beyond this size a compressed entry, once unpacked, is refused as a bomb.
MAX_COMPRESSED_BYTES = 2**26
ALLOWED = {f"aten::{name}" for name in ATEN} | {f"prim::{name}" for name in PRIM}


class TorchScriptNetwork(nn.Module):
    """A program that torch runs in its interpreter; engines cannot replace or fuse parts of it."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.script = script

    def forward(self, x: Tensor) -> Tensor:
        """Return the first output, scores [B, K, z, y, x], of an image [B, C, z, y, x]."""
        scores = self.script(x)
        first: Tensor = scores[0] if isinstance(scores, tuple | list) else scores
        return first


def load_torchscript(path: Path) -> TorchScriptNetwork:
    """Load and check a TorchScript file. Raise BrokenModel, naming what is refused."""
    _check_source(path)
    try:
        script = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        refused = sorted({*_iter_operators(script.inlined_graph)} - ALLOWED)
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise BrokenModel(f"{path}: cannot be read as TorchScript: {str(error).strip().splitlines()[0]}") from error
    if refused:
        names = ", ".join(refused)
        raise BrokenModel(
            f"{path}: its program uses {names}, which is not on the list in service/models/allowed_operators.py."
        )
    return TorchScriptNetwork(script).eval().requires_grad_(requires_grad=False)


def _check_source(path: Path) -> None:
    """Raise BrokenModel for a file of which something would run while it is loaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if not any("/code/" in entry.filename for entry in entries):
                raise BrokenModel(f"{path}: not a TorchScript file as torch.jit.save writes it.")
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED and entry.file_size > MAX_COMPRESSED_BYTES:
                    raise BrokenModel(
                        f"{path}: {entry.filename} is compressed, which torch.jit.save does with code only."
                    )
                if not TENSOR_ENTRY.fullmatch(entry.filename):
                    content = archive.read(entry)
                    for word in FORBIDDEN:
                        if word in content:
                            raise BrokenModel(f"{path}: {entry.filename} has {word.decode()}, which is never run.")
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise BrokenModel(f"{path}: cannot be read as TorchScript: {error}") from error


def _iter_operators(block: torch._C.Graph | torch._C.Block) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _iter_operators(inner)
