"""PT2 archive, the file of `torch.export.save`: its JSON and its tensors, none of which is unpickled."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from service.core.errors import BrokenModel

MAX_GRAPH_BYTES = 2**26

# torch._export.serde.schema.ScalarType
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}


class Pt2Archive:
    """A PT2 archive, whose files are named by their path below its only folder."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries = {str(PurePosixPath(*PurePosixPath(e.filename).parts[1:])): e for e in archive.infolist()}
        self.stored_bytes = sum(entry.compress_size for entry in archive.infolist())

    def read_bytes(self, name: str) -> bytes:
        """Read a file. Raise BrokenModel where it is missing or compressed, as nothing in such an archive is."""
        entry = self._entries.get(name)
        if entry is None:
            raise BrokenModel(f"there is no {name} in it; export the network again with torch 2.8 or later.")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise BrokenModel(f"{name} is compressed, which torch.export.save does not do.")
        return self._archive.read(entry)

    def read_json(self, name: str) -> Any:
        """Read a file of JSON. Raise BrokenModel where it is missing, compressed or too large."""
        text = self.read_bytes(name)
        if len(text) > MAX_GRAPH_BYTES:
            raise BrokenModel(f"{name} is larger than a graph can be.")
        return json.loads(text)


def decode_tensor(data: bytes, meta: Mapping[str, Any]) -> Tensor:
    """Copy raw little-endian bytes into a tensor. Raise BrokenModel or RuntimeError where they do not fit."""
    sizes, strides = ([int(item["as_int"]) for item in meta[key]] for key in ("sizes", "strides"))
    dtype = DTYPES[meta["dtype"]]
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    # Any other byte than 0 and 1 is no truth that operators could work with.
    stored = torch.frombuffer(bytearray(data), dtype=torch.uint8 if dtype == torch.bool else dtype)
    stored = stored.bool() if dtype == torch.bool else stored
    if math.prod(sizes) > len(stored):
        raise BrokenModel(f"a tensor of {sizes} is said to lie in {len(data)} bytes.")
    return stored.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"])).clone()
