"""One array of a Zarr store, format 2 or 3: its metadata, and its chunks, each decoded into no more than it states.

Specifications: https://zarr-specs.readthedocs.io, with the codecs of numcodecs that microscopy uses. Zarr-python itself
runs an event loop and threads of its own, and its codecs allocate what a chunk claims to decode to, so that it suits no
confined process with little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from operator import floordiv, mod
from typing import Any

import google_crc32c
import imagecodecs
import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.types import Array
from service.formats.zarr.store import Part, Store, read_json, translate_errors

_MAX_DIMENSIONS = 16
# Along one dimension; beyond all that is stored, and the product of all dimensions is still a float.
_MAX_LENGTH = 2**60
# Of the parts of one shard, whose index has 16 bytes for each.
_MAX_SHARD_PARTS = 2**20
# Of all indices of shards that are kept for the next chunk.
_MAX_INDEX_BYTES = 2**26
_KINDS = "buif"
_MISSING = 2**64 - 1
_CHECKSUM_BYTES = 4

# Decoders of bytes, which fill `out` and fail where there is more.
_DECODERS: Mapping[str, Callable[..., Any]] = {
    "blosc": imagecodecs.blosc_decode,
    "bz2": imagecodecs.bz2_decode,
    "gzip": imagecodecs.gzip_decode,
    "lz4": partial(imagecodecs.lz4_decode, header=True),
    "zlib": imagecodecs.zlib_decode,
    "zstd": imagecodecs.zstd_decode,
}
_UNUSUAL = "Write the image again with a common codec: none, blosc, gzip, zlib, lz4, bz2 or zstd."


@dataclass(frozen=True)
class Coding:
    """The way from pixels to the bytes of a chunk.

    dtype        in the byte order of the file
    order        of the dimensions, slowest first
    compressor   name in `_DECODERS`, None for raw bytes
    checksum     whether a CRC-32C follows
    """

    dtype: np.dtype[Any]
    order: tuple[int, ...]
    compressor: str | None = None
    checksum: bool = False

    def decode(self, data: bytes, shape: Sequence[int]) -> Array:
        """Decode the bytes of a chunk. Raises BadFile where they are not those of the shape, or have changed."""
        data = _verify(data, "A chunk") if self.checksum else data
        nbytes = math.prod(shape) * self.dtype.itemsize
        content: Any = data
        if self.compressor is not None:
            content = bytearray(nbytes)
            try:
                content = _DECODERS[self.compressor](data, out=content)
            except (RuntimeError, ValueError, TypeError) as error:
                raise BadFile(f"A chunk of the Zarr array cannot be decoded: {str(error)[:160]}") from error
        if len(content) != nbytes:
            raise BadFile(f"A chunk of the Zarr array decodes to {len(content)} bytes in place of {nbytes}.")
        stored = np.frombuffer(content, self.dtype).reshape([shape[axis] for axis in self.order])
        return stored.transpose(np.argsort(self.order))


@dataclass(frozen=True)
class Sharding:
    """Several chunks in one file with an index: `parts` chunks along each dimension, index at one end."""

    parts: tuple[int, ...]
    at_start: bool
    checksum: bool

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return 16 * math.prod(self.parts) + _CHECKSUM_BYTES * self.checksum


@dataclass(frozen=True)
class ZarrArray:
    """An array whose chunks can be read one by one.

    shape, chunks  voxels of the whole, and of a chunk, or of a part of a shard
    key            returns the key of a chunk, or of a shard, by its place
    """

    store: Store
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    coding: Coding
    fill: Any
    key: Callable[[Sequence[int]], str]
    sharding: Sharding | None = None
    names: tuple[str, ...] = ()
    _indices: dict[str, Array] = field(default_factory=dict)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk once it is decoded."""
        return math.prod(self.chunks) * self.coding.dtype.itemsize

    @property
    def most_stored_bytes(self) -> int:
        """Bytes that a chunk takes at most in its file. Codecs expand what they cannot compress by little."""
        return self.chunk_bytes + self.chunk_bytes // 8 + 2**16

    def read_chunks(self, places: Sequence[Sequence[int]]) -> list[bytes | None]:
        """Read the chunks at these places of the grid as they are stored, None for each that is not. Raises BadFile."""
        if self.sharding is None:
            return self.store.read([Part(self.key(place), self.most_stored_bytes) for place in places])
        sharding = self.sharding
        shards = [self.key(tuple(map(floordiv, place, sharding.parts))) for place in places]
        indices = self._read_indices(set(shards), sharding)
        located = [self._locate(place, key, indices[key]) for place, key in zip(places, shards, strict=True)]
        stored = iter(self.store.read([part for part in located if part is not None]))
        return [None if part is None else next(stored) for part in located]

    def _read_indices(self, keys: set[str], sharding: Sharding) -> dict[str, Array]:
        """Return the indices of shards, those that are known without reading; an empty one where there is no shard."""
        indices = {key: index for key in keys if (index := self._indices.get(key)) is not None}
        missing = sorted(keys - indices.keys())
        start = 0 if sharding.at_start else -sharding.index_bytes
        # Large ones are not all in memory as they are stored.
        step = max(1, _MAX_INDEX_BYTES // sharding.index_bytes)
        for keys_at_once in (missing[first : first + step] for first in range(0, len(missing), step)):
            found = self.store.read([Part(key, sharding.index_bytes, start) for key in keys_at_once])
            indices |= {key: _parse_index(data, sharding) for key, data in zip(keys_at_once, found, strict=True)}
        if (len(self._indices) + len(missing)) * sharding.index_bytes > _MAX_INDEX_BYTES:
            self._indices.clear()
        self._indices.update(indices)
        return indices

    def _locate(self, place: Sequence[int], key: str, index: Array) -> Part | None:
        """Return where a chunk lies in its shard; None where it is not stored."""
        if not index.size or self.sharding is None:
            return None
        start, length = (int(number) for number in index[tuple(map(mod, place, self.sharding.parts))])
        if start == length == _MISSING:
            return None
        if length > self.most_stored_bytes:
            raise BadFile(f"A chunk of the Zarr array takes {length} bytes and decodes to {self.chunk_bytes}.")
        return Part(key, length, start)


def _parse_index(data: bytes | None, sharding: Sharding) -> Array:
    if data is None:
        return np.empty(0, "<u8")
    content = _verify(data, "The index of a shard") if sharding.checksum else data
    return np.frombuffer(content, "<u8").reshape(*sharding.parts, 2)


def _verify(data: bytes, what: str) -> bytes:
    """Return bytes without the CRC-32C that follows them. Raises BadFile where it is that of others."""
    content, stated = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if google_crc32c.value(content).to_bytes(_CHECKSUM_BYTES, "little") != stated:
        raise BadFile(f"{what} of the Zarr array has changed since it was written (CRC-32C). Copy or export it again.")
    return content


def open_array(store: Store, path: str) -> ZarrArray:
    """Open an array by its path in the store. Raises BadFile, TooLarge."""
    prefix = f"{path}/" if path else ""
    for name, parse in (("zarr.json", _parse_v3), (".zarray", _parse_v2)):
        content = read_json(store, prefix + name)
        if content is not None:
            with translate_errors(prefix + name):
                array = parse(store, prefix, content)
            _check(array)
            return array
    raise BadFile(f"The Zarr store has no array {path!r}, which its metadata name. Copy or export it again.")


def _check(array: ZarrArray) -> None:
    """Raise BadFile for arrays that cannot be read, TooLarge for chunks of no end."""
    if len(array.chunks) != len(array.shape) or not 2 <= len(array.shape) <= _MAX_DIMENSIONS:
        raise BadFile(f"The Zarr array has {len(array.shape)} dimensions and chunks of {len(array.chunks)}.")
    if min(array.chunks) < 1 or min(array.shape) < 1:
        raise BadFile(f"The Zarr array {array.shape} with chunks {array.chunks} holds no pixels.")
    if sorted(array.coding.order) != list(range(len(array.shape))):
        raise BadFile(f"The Zarr array orders its dimensions as {array.coding.order}.")
    if array.sharding is not None and math.prod(array.sharding.parts) > _MAX_SHARD_PARTS:
        raise TooLarge(f"A shard of the Zarr array has {math.prod(array.sharding.parts)} parts; write larger chunks.")


def _parse_v2(store: Store, prefix: str, content: dict[str, Any]) -> ZarrArray:
    shape = _lengths(content["shape"])
    if content.get("filters"):
        raise BadFile(f"The Zarr array has filters ({_names(content['filters'], 'id')}). {_UNUSUAL}")
    compressor = None if content["compressor"] is None else _compressor(content["compressor"]["id"])
    dtype = _dtype(content["dtype"])
    order = range(len(shape)) if content.get("order", "C") == "C" else reversed(range(len(shape)))
    coding = Coding(dtype, tuple(order), compressor)
    separator = _separator(content.get("dimension_separator", "."))
    return ZarrArray(
        store,
        shape,
        _lengths(content["chunks"]),
        coding,
        _fill(content.get("fill_value"), dtype),
        lambda place: prefix + separator.join(map(str, place)),
    )


def _parse_v3(store: Store, prefix: str, content: dict[str, Any]) -> ZarrArray:
    shape = _lengths(content["shape"])
    if content["chunk_grid"]["name"] != "regular" or content.get("storage_transformers"):
        raise BadFile(f"The Zarr array is not of regular chunks. {_UNUSUAL}")
    chunks = _lengths(content["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, sharding = content["codecs"], None
    if codecs[0]["name"] == "sharding_indexed":
        sharding, chunks, codecs = _parse_sharding(codecs, chunks)
    coding = _parse_codecs(codecs, content["data_type"], len(shape))
    encoding = content["chunk_key_encoding"]
    is_default = {"default": True, "v2": False}[encoding["name"]]
    separator = _separator(encoding.get("configuration", {}).get("separator", "/" if is_default else "."))
    return ZarrArray(
        store,
        shape,
        chunks,
        coding,
        _fill(content["fill_value"], coding.dtype),
        lambda place: prefix + separator.join(["c"] * is_default + [str(index) for index in place]),
        sharding,
        tuple(str(name or "") for name in content.get("dimension_names") or ()),
    )


def _parse_sharding(codecs: Any, shard: tuple[int, ...]) -> tuple[Sharding, tuple[int, ...], Any]:
    """Return how a file holds several chunks, their shape and their codecs."""
    if len(codecs) > 1:
        raise BadFile(f"The Zarr array compresses whole shards ({_names(codecs, 'name')}). {_UNUSUAL}")
    inner = codecs[0]["configuration"]
    chunks = _lengths(inner["chunk_shape"])
    index_codecs = [codec["name"] for codec in inner["index_codecs"]]
    if len(chunks) != len(shard) or min(*chunks, *shard) < 1 or any(starmap(mod, zip(shard, chunks, strict=True))):
        raise BadFile(f"The Zarr array has shards of {shard}, which chunks of {chunks} do not fill.")
    if index_codecs not in (["bytes"], ["bytes", "crc32c"]):
        raise BadFile(f"The Zarr array has an index of shards with codecs {index_codecs}. {_UNUSUAL}")
    parts = tuple(map(floordiv, shard, chunks))
    is_at_start = inner.get("index_location", "end") == "start"
    return Sharding(parts, is_at_start, "crc32c" in index_codecs), chunks, inner["codecs"]


def _parse_codecs(codecs: Any, data_type: Any, dimensions: int) -> Coding:
    """Return what a chain of codecs does: a transposition or none, bytes, a compressor or none, a checksum or none."""
    names = [codec["name"] for codec in codecs]
    order, rest = tuple(range(dimensions)), list(codecs)
    if names[0] == "transpose":
        order = tuple(int(axis) for axis in rest.pop(0)["configuration"]["order"])
    is_little = rest[0].get("configuration", {}).get("endian", "little") == "little"
    left = [codec["name"] for codec in rest[1:]]
    checksum = left[-1:] == ["crc32c"]
    compressors = left[:-1] if checksum else left
    if rest[0]["name"] != "bytes" or len(compressors) > 1:
        raise BadFile(f"The Zarr array has the codecs {_names(codecs, 'name')}, which are not read. {_UNUSUAL}")
    dtype = _dtype(data_type).newbyteorder("<" if is_little else ">")
    return Coding(dtype, order, _compressor(compressors[0]) if compressors else None, checksum)


def _lengths(numbers: Any) -> tuple[int, ...]:
    lengths = tuple(numbers)
    if not all(type(length) is int and length <= _MAX_LENGTH for length in lengths):
        raise ValueError(numbers)
    return lengths


def _names(codecs: Any, key: str) -> str:
    return ", ".join(str(codec[key])[:40] for codec in codecs)


def _compressor(name: str) -> str:
    if name not in _DECODERS:
        raise BadFile(f"The Zarr array has the codec {str(name)[:40]!r}, which is not read. {_UNUSUAL}")
    return name


def _dtype(name: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in _KINDS or dtype.itemsize > 8:
        raise BadFile(
            f"The pixels are {str(name)[:40]}, which is not supported. Save them as 8, 16 or 32-bit integers or floats."
        )
    return dtype


def _separator(text: str) -> str:
    if text not in {"/", "."}:
        raise ValueError(text)
    return text


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the value of voxels whose chunks are missing. Raises ValueError for what is no number."""
    match value:
        case list():
            raise ValueError(value)
        case str() if value.startswith("0x"):
            return np.frombuffer(int(value, 16).to_bytes(dtype.itemsize, "big"), dtype.newbyteorder(">"))[0]
    return np.array(0 if value is None else value).astype(dtype.newbyteorder("="))[()]
