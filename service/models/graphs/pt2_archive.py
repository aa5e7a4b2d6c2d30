"""Read the JSON files and tensors of a PT2 archive, the format of `torch.export.save`, without unpickling."""

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

# Codes of torch._export.serde.schema.ScalarType.
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
    """A PT2 archive. Names of its files are paths below its top-level folder."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries = {str(PurePosixPath(*PurePosixPath(e.filename).parts[1:])): e for e in archive.infolist()}
        self.stored_bytes = sum(entry.compress_size for entry in archive.infolist())

    def read_bytes(self, name: str) -> bytes:
        """Read a file. Raises BrokenModel if it is missing, or if it is compressed, which the format does not allow."""
        entry = self._entries.get(name)
        if entry is None:
            raise BrokenModel(f"it does not contain {name}; export the network again with torch 2.8 or later.")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise BrokenModel(f"{name} is compressed, which files of torch.export.save never are.")
        return self._archive.read(entry)

    def read_json(self, name: str) -> Any:
        """Read a JSON file. Raises BrokenModel if it is missing, compressed or too large."""
        text = self.read_bytes(name)
        if len(text) > MAX_GRAPH_BYTES:
            raise BrokenModel(f"{name} is larger than the limit of {MAX_GRAPH_BYTES} bytes.")
        return json.loads(text)


def decode_tensor(data: bytes, meta: Mapping[str, Any]) -> Tensor:
    """Copy raw little-endian bytes into a tensor. Raises BrokenModel or RuntimeError if they do not match `meta`."""
    sizes, strides = ([int(item["as_int"]) for item in meta[key]] for key in ("sizes", "strides"))
    dtype = DTYPES[meta["dtype"]]
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    # Convert booleans from bytes, because operators do not expect values other than 0 and 1.
    stored = torch.frombuffer(bytearray(data), dtype=torch.uint8 if dtype == torch.bool else dtype)
    stored = stored.bool() if dtype == torch.bool else stored
    if math.prod(sizes) > len(stored):
        raise BrokenModel(f"a tensor of shape {sizes} does not fit in its {len(data)} bytes.")
    return stored.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"])).clone()
