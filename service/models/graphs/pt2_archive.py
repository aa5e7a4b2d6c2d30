"""Read the JSON files and tensors of a PT2 archive, the format of `torch.export.save`, without unpickling."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from service.core.errors import BrokenModel

MAX_JSON_BYTES = 2**26

# Data types by their codes in torch._export.serde.schema.ScalarType.
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
    """A PT2 archive. File names are paths relative to its top-level folder."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries = {
            str(PurePosixPath(*PurePosixPath(entry.filename).parts[1:])): entry for entry in archive.infolist()
        }
        self.stored_bytes = sum(entry.compress_size for entry in archive.infolist())

    def read_bytes(self, name: str) -> bytes:
        """Read a file. Raises BrokenModel if it is missing, or if it is compressed, which the format does not allow."""
        entry = self._entries.get(name)
        if entry is None:
            raise BrokenModel(f"the archive does not contain {name}; export the network again with torch 2.8 or later.")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise BrokenModel(f"{name} is compressed, but torch.export.save never compresses files.")
        return self._archive.read(entry)

    def read_extra_file(self, name: str) -> bytes | None:
        """Return a file that the caller of torch.export.save has added, or None. Raises BrokenModel if too large."""
        entry = self._entries.get(f"extra/{name}")
        if entry is None:
            return None
        if entry.file_size > MAX_JSON_BYTES:
            raise BrokenModel(f"extra/{name} is larger than the limit of {MAX_JSON_BYTES} bytes.")
        return self.read_bytes(f"extra/{name}")

    def read_json(self, name: str) -> Any:
        """Read a JSON file. Raises BrokenModel if it is missing, compressed or too large."""
        content = self.read_bytes(name)
        if len(content) > MAX_JSON_BYTES:
            raise BrokenModel(f"{name} is larger than the limit of {MAX_JSON_BYTES} bytes.")
        return json.loads(content)


def name_outputs(graph_module: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that a program returns, such as `out` or `aux.0`; [] if they are unknown."""
    try:
        _, structure = json.loads(graph_module["module_call_graph"][0]["signature"]["out_spec"])
        return list(_iter_leaves(structure, ()))
    except (LookupError, TypeError, ValueError):
        return []


def _iter_leaves(structure: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of the leaves in a serialized pytree."""
    children = structure["children_spec"]
    if structure["type"] is None:
        yield ".".join(path) or "0"
        return
    keys = json.loads(structure["context"]) if structure["type"].endswith("dict") else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _iter_leaves(child, (*path, str(key)))


def decode_tensor(data: bytes, metadata: Mapping[str, Any]) -> Tensor:
    """Copy raw little-endian bytes into a tensor. Raises BrokenModel or RuntimeError if `metadata` does not match."""
    sizes, strides = ([int(item["as_int"]) for item in metadata[key]] for key in ("sizes", "strides"))
    dtype = DTYPES[metadata["dtype"]]
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    # Convert booleans from bytes, because operators do not expect values other than 0 and 1.
    elements = torch.frombuffer(bytearray(data), dtype=torch.uint8 if dtype == torch.bool else dtype)
    elements = elements.bool() if dtype == torch.bool else elements
    if math.prod(sizes) > len(elements):
        raise BrokenModel(f"a tensor of shape {sizes} does not fit in the {len(data)} bytes that are stored for it.")
    return elements.as_strided(sizes, strides, int(metadata["storage_offset"]["as_int"])).clone()
