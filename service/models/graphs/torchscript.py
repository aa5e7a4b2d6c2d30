"""Load TorchScript files from trusted authors.

A TorchScript program can read and write files (`aten::from_file`, `aten::save`), and the `__setstate__` of a module
runs while the file is loaded. The reader and interpreter of torch are not designed for malicious files. The checks here
reject features that trusted programs do not need: methods that run during loading, hooks, extension classes,
operators that are not allowed, and archives that different zip readers could interpret differently.
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
from service.models.graphs.allowed_operators import ATEN_OPERATORS, PRIM_OPERATORS
from service.models.graphs.batches import accept_any_batch
from service.models.graphs.outputs import OutputQuery, choose_output, flatten_outputs

# Names of methods that run while a file is loaded, of hooks that run in addition to the checked graph, and of extension
# classes. In a pickle, the name of a class may span two lines, and in code, a name may contain spaces.
FORBIDDEN_NAMES = re.compile(rb"__(?:[gs]etstate|forward_(?:pre_)?hooks)__|torch[\s.\\]+classes")
# Archive entries with the raw bytes of one tensor, which are not searched. The pattern is case-sensitive, unlike name
# lookups in torch.
TENSOR_ENTRY = re.compile(r"[^/]+/(data|constants)/[0-9]+")
ALLOWED_OPERATORS = {f"aten::{name}" for name in ATEN_OPERATORS} | {f"prim::{name}" for name in PRIM_OPERATORS}


class TorchScriptNetwork(nn.Module):
    """A TorchScript program, run by torch's interpreter. Engines cannot replace or fuse its layers.

    output_path  keys and indices that lead from the result of the program to the scores
    """

    def __init__(self, script: torch.jit.ScriptModule, output_path: Sequence[str | int] = ()) -> None:
        super().__init__()
        self.script, self._output_path = script, tuple(output_path)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the scores [B, K, z, y, x] of an image [B, C, z, y, x]."""
        result = self.script(x)
        for key in self._output_path:
            result = result[key]
        scores: Tensor = result
        return scores


def load_torchscript(path: Path, window: Sequence[int], query: OutputQuery | None = None) -> nn.Module:
    """Load and check a TorchScript file, for any number of windows [C, z, y, x].

    `query` describes the output with the scores; by default, it is the first output. Raises BrokenModel if the file is
    rejected.
    """
    try:
        script = torch.jit.load(_read_checked_copy(path), map_location="cpu")  # type: ignore[no-untyped-call]
        disallowed_operators = sorted({*_iter_operators(script.inlined_graph)} - ALLOWED_OPERATORS)
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except (RuntimeError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BrokenModel(f"{path}: the file cannot be read as TorchScript: {reason[0]}") from error
    if disallowed_operators:
        names = ", ".join(disallowed_operators)
        raise BrokenModel(
            f"{path}: the program uses operators that are not allowed: {names}; see"
            " service/models/graphs/allowed_operators.py."
        )
    script = script.float().eval()
    try:
        output_path = _find_output(script, window, query)
        network = accept_any_batch(TorchScriptNetwork(script, output_path).eval(), window)
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    return network.requires_grad_(requires_grad=False)


@torch.no_grad()
def _find_output(
    script: torch.jit.ScriptModule, window: Sequence[int], query: OutputQuery | None
) -> tuple[str | int, ...]:
    """Return the path of the output with the scores, for one window, or for two if the program rejects one.

    A program that rejects both is handled when it is used.
    """
    for batch_size in (1, 2):
        try:
            outputs = flatten_outputs(script(torch.zeros(batch_size, *window)))
        except RuntimeError:
            continue
        shapes = {name: tuple(tensor.shape) for name, (_, tensor) in outputs.items()}
        return outputs[choose_output(shapes, window, query)][0]
    return ()


def _read_checked_copy(path: Path) -> BytesIO:
    """Return an in-memory copy of the archive after checking it.

    Raises BrokenModel or zipfile.BadZipFile if the archive is rejected.
    """
    with open_torch_archive(path) as archive:
        names = archive.namelist()
        if not any("/code/" in name for name in names):
            raise BrokenModel("the file is not a TorchScript file written by torch.jit.save.")
        copy = copy_members(archive)
    with zipfile.ZipFile(copy) as checked_archive:
        for name in names:
            match = None if TENSOR_ENTRY.fullmatch(name) else FORBIDDEN_NAMES.search(checked_archive.read(name))
            if match:
                raise BrokenModel(f"{name} contains {match[0].decode()}, which is not allowed.")
    copy.seek(0)
    return copy


def _iter_operators(block: torch._C.Graph | torch._C.Block) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for nested_block in node.blocks():
            yield from _iter_operators(nested_block)
