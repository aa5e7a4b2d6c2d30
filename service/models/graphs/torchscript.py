"""TorchScript file -> torch module, of authors whom the operator trusts.

A TorchScript program can read and write files (`aten::from_file`, `aten::save`), the `__setstate__` of a module runs
while the file is loaded, and torch's reader and interpreter are not made for files that want to harm. What is refused
here is what trusted programs have no need of: methods that run while a file is loaded, hooks, classes of extensions,
operators that are not on the list of allowed ones, and archives that two readers read in two ways.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.core.files.zip_archive import copy_members, open_torch_archive
from service.models.graphs.allowed_operators import ATEN, PRIM

# Methods that run while a file is loaded, hooks that run beside the checked graph, and classes of extensions. A pickle
# may name a class on two lines, and code may have spaces in a name.
FORBIDDEN = re.compile(rb"__(?:[gs]etstate|forward_(?:pre_)?hooks)__|torch[\s.\\]+classes")
# Entries of an archive that hold the bytes of one tensor. torch ignores the case of names, this check does not.
TENSOR_ENTRY = re.compile(r"[^/]+/(data|constants)/[0-9]+")
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


def load_torchscript(path: Path, _window: Sequence[int] = ()) -> TorchScriptNetwork:
    """Load and check a TorchScript file, for any window. Raise BrokenModel, naming what is refused."""
    try:
        script = torch.jit.load(_read_checked(path), map_location="cpu")  # type: ignore[no-untyped-call]
        refused = sorted({*_iter_operators(script.inlined_graph)} - ALLOWED)
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except (RuntimeError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BrokenModel(f"{path}: cannot be read as TorchScript: {reason[0]}") from error
    if refused:
        names = ", ".join(refused)
        raise BrokenModel(
            f"{path}: its program uses {names}, which is not on the list in service/models/graphs/allowed_operators.py."
        )
    return TorchScriptNetwork(script).eval().requires_grad_(requires_grad=False)


def _read_checked(path: Path) -> BytesIO:
    """Return a copy of an archive that holds what was checked. Raise BrokenModel, and zipfile.BadZipFile."""
    with open_torch_archive(path) as archive:
        names = archive.namelist()
        if not any("/code/" in name for name in names):
            raise BrokenModel("not a TorchScript file as torch.jit.save writes it.")
        copy = copy_members(archive)
    with zipfile.ZipFile(copy) as checked:
        for name in names:
            found = None if TENSOR_ENTRY.fullmatch(name) else FORBIDDEN.search(checked.read(name))
            if found:
                raise BrokenModel(f"{name} has {found[0].decode()}, which is never run.")
    copy.seek(0)
    return copy


def _iter_operators(block: torch._C.Graph | torch._C.Block) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _iter_operators(inner)
