"""Parse the metadata of arrays in Zarr format 2 or 3, and decode single chunks with bounded memory.

Specifications: https://zarr-specs.readthedocs.io, and numcodecs for the codecs that are common in microscopy.
zarr-python is not used here because it runs an event loop and threads, and its codecs allocate as much memory as a
chunk claims to need. A confined process with little memory cannot afford this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from operator import floordiv, mod, mul
from typing import Any

import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.types import Array
from service.formats.zarr.chunk_codec import (
    CHECKSUM_BYTES,
    CODEC_ADVICE,
    ChunkCodec,
    check_compressor,
    format_names,
    parse_codecs,
    parse_dtype,
    verify_checksum,
)
from service.formats.zarr.chunk_keys import ChunkKeys, find_stored_keys
from service.formats.zarr.store import FileRange, Store, read_json, translate_errors

_MAX_DIMENSIONS = 16
# Maximum length of a dimension. No stored array is this long, and the product of 16 such lengths is a finite float.
_MAX_LENGTH = 2**60
# Maximum number of chunks in a shard. The index of a shard has 16 bytes per chunk.
_MAX_CHUNKS_PER_SHARD = 2**20
# Maximum total size of the cached shard indices.
_MAX_INDEX_BYTES = 2**26
_MISSING_CHUNK = 2**64 - 1
# Keys of the metadata of an array in Zarr format 3. Readers must refuse arrays with other keys, unless these say that
# they can be ignored.
_V3_KEYS = frozenset(
    (
        "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs",
        "attributes", "storage_transformers", "dimension_names", "consolidated_metadata",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Sharding:
    """Layout of shards, which are files that contain several chunks and an index.

    chunks_per_shard   number of chunks per shard along each dimension
    is_index_at_start  whether the index is at the start of the file, rather than at its end
    has_checksum       whether a CRC-32C follows the index
    """

    chunks_per_shard: tuple[int, ...]
    is_index_at_start: bool
    has_checksum: bool

    @property
    def index_bytes(self) -> int:
        """Size of the index in bytes."""
        return 16 * math.prod(self.chunks_per_shard) + CHECKSUM_BYTES * self.has_checksum


@dataclass(frozen=True)
class ZarrArray:
    """An array whose chunks can be read independently.

    shape        shape of the array in voxels
    chunk_shape  shape of a chunk (not of a shard) in voxels
    make_key     keys of the chunks or, if there are shards, of the shards, according to the metadata
    """

    store: Store
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    codec: ChunkCodec
    fill_value: Any
    make_key: ChunkKeys
    sharding: Sharding | None = None
    dimension_names: tuple[str, ...] = ()
    _shard_indices: dict[str, Array] = field(default_factory=dict)
    _stored_keys: list[ChunkKeys] = field(default_factory=list)

    @property
    def _grid_shape(self) -> tuple[int, ...]:
        """Number of chunks or, if there are shards, of shards along each dimension."""
        file_shape = self.chunk_shape
        if self.sharding is not None:
            file_shape = tuple(map(mul, self.chunk_shape, self.sharding.chunks_per_shard))
        return tuple(-(-length // step) for length, step in zip(self.shape, file_shape, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Decoded size of a chunk in bytes."""
        return math.prod(self.chunk_shape) * self.codec.dtype.itemsize

    @property
    def max_stored_bytes(self) -> int:
        """Maximum size of an encoded chunk in bytes. Codecs enlarge incompressible data only slightly."""
        return self.chunk_bytes + self.chunk_bytes // 8 + 2**16

    def read_chunks(self, chunk_indices: Sequence[Sequence[int]]) -> list[bytes | None]:
        """Read encoded chunks by their indices in the grid, with None for each missing chunk.

        Raises BadFile if a chunk is invalid, or if the array does not have a single chunk.
        """
        encoded_chunks = self._read_chunks(chunk_indices, *(self._stored_keys[:1] or [self.make_key]))
        if not self._stored_keys and any(encoded_chunks):
            self._stored_keys.append(self.make_key)
        if self._stored_keys:
            return encoded_chunks
        return self._read_chunks(chunk_indices, self.find_stored_keys())

    def find_stored_keys(self) -> ChunkKeys:
        """Return the keys of the stored chunks. Raises BadFile if the array does not have a single chunk."""
        if not self._stored_keys:
            self._stored_keys.append(find_stored_keys(self.store, self.make_key, self._grid_shape))
        return self._stored_keys[0]

    def _read_chunks(self, chunk_indices: Sequence[Sequence[int]], make_key: ChunkKeys) -> list[bytes | None]:
        if self.sharding is None:
            return self.store.read([FileRange(make_key(index), self.max_stored_bytes) for index in chunk_indices])
        sharding = self.sharding
        shard_keys = [make_key(tuple(map(floordiv, index, sharding.chunks_per_shard))) for index in chunk_indices]
        shards = self._read_shard_indices(set(shard_keys), sharding)
        file_ranges = [
            self._locate_chunk(index, key, shards[key]) for index, key in zip(chunk_indices, shard_keys, strict=True)
        ]
        encoded_chunks = iter(self.store.read([file_range for file_range in file_ranges if file_range is not None]))
        return [None if file_range is None else next(encoded_chunks) for file_range in file_ranges]

    def _read_shard_indices(self, keys: set[str], sharding: Sharding) -> dict[str, Array]:
        """Return the indices of shards, from the cache if possible. The index of a missing shard is empty."""
        indices = {key: index for key in keys if (index := self._shard_indices.get(key)) is not None}
        missing_keys = sorted(keys - indices.keys())
        start = 0 if sharding.is_index_at_start else -sharding.index_bytes
        # The encoded indices are read in batches to limit memory.
        batch_size = max(1, _MAX_INDEX_BYTES // sharding.index_bytes)
        for batch in (missing_keys[first : first + batch_size] for first in range(0, len(missing_keys), batch_size)):
            encoded_indices = self.store.read([FileRange(key, sharding.index_bytes, start) for key in batch])
            indices |= {key: _parse_index(data, sharding) for key, data in zip(batch, encoded_indices, strict=True)}
        if (len(self._shard_indices) + len(missing_keys)) * sharding.index_bytes > _MAX_INDEX_BYTES:
            self._shard_indices.clear()
        self._shard_indices.update(indices)
        return indices

    def _locate_chunk(self, chunk_index: Sequence[int], shard_key: str, index: Array) -> FileRange | None:
        """Return the location of a chunk in its shard, or None if the chunk is not stored."""
        if not index.size or self.sharding is None:
            return None
        start, length = (int(number) for number in index[tuple(map(mod, chunk_index, self.sharding.chunks_per_shard))])
        if start == length == _MISSING_CHUNK:
            return None
        if length > self.max_stored_bytes:
            raise BadFile(
                f"A chunk of the Zarr array is stored in {length} bytes, but decodes to only {self.chunk_bytes} bytes."
                " Export the image again."
            )
        return FileRange(shard_key, length, start)


def _parse_index(encoded_index: bytes | None, sharding: Sharding) -> Array:
    if encoded_index is None:
        return np.empty(0, "<u8")
    content = verify_checksum(encoded_index, "The index of a shard") if sharding.has_checksum else encoded_index
    return np.frombuffer(content, "<u8").reshape(*sharding.chunks_per_shard, 2)


def open_array(store: Store, path: str) -> ZarrArray:
    """Open an array by its path in the store. Raises BadFile, TooLarge."""
    prefix = f"{path}/" if path else ""
    for name, parse in (("zarr.json", _parse_v3), (".zarray", _parse_v2)):
        content = read_json(store, prefix + name)
        if content is not None:
            with translate_errors(prefix + name):
                array = parse(store, prefix, content)
            _check_array(array)
            return array
    raise BadFile(
        f"The Zarr store has no array {path!r}, although its metadata lists it. Copy or export the store again."
    )


def _check_array(array: ZarrArray) -> None:
    """Raise BadFile if the array cannot be read, and TooLarge if a shard has too many chunks."""
    if len(array.chunk_shape) != len(array.shape) or not 2 <= len(array.shape) <= _MAX_DIMENSIONS:
        raise BadFile(
            f"The Zarr array has {len(array.shape)} dimensions, and its chunks have {len(array.chunk_shape)}."
            " Both numbers must be equal and between 2 and 16."
        )
    if min(array.chunk_shape) < 1 or min(array.shape) < 1:
        raise BadFile(f"The Zarr array of shape {array.shape} with chunks {array.chunk_shape} has no pixels.")
    if sorted(array.codec.order) != list(range(len(array.shape))):
        raise BadFile(f"The Zarr array has the invalid dimension order {array.codec.order}.")
    if array.sharding is not None and math.prod(array.sharding.chunks_per_shard) > _MAX_CHUNKS_PER_SHARD:
        raise TooLarge(
            f"A shard of the Zarr array has {math.prod(array.sharding.chunks_per_shard)} chunks, which is more than"
            " StackSeg supports. Save the image with larger chunks."
        )


def _parse_v2(store: Store, prefix: str, content: dict[str, Any]) -> ZarrArray:
    shape = _parse_lengths(content["shape"])
    if content.get("filters"):
        raise BadFile(f"The Zarr array uses filters ({format_names(content['filters'], 'id')}). {CODEC_ADVICE}")
    compressor = None if content["compressor"] is None else check_compressor(content["compressor"]["id"])
    dtype = parse_dtype(content["dtype"])
    order = {"C": range(len(shape)), "F": range(len(shape))[::-1]}[content.get("order", "C")]
    codec = ChunkCodec(dtype, tuple(order), compressor)
    return ZarrArray(
        store,
        shape,
        _parse_lengths(content["chunks"]),
        codec,
        _parse_fill_value(content.get("fill_value"), dtype),
        ChunkKeys(prefix, is_default=False, separator=content.get("dimension_separator") or "."),
    )


def _parse_v3(store: Store, prefix: str, content: dict[str, Any]) -> ZarrArray:
    _check_v3_keys(content)
    shape = _parse_lengths(content["shape"])
    if content["chunk_grid"]["name"] != "regular" or content.get("storage_transformers"):
        raise BadFile(f"The Zarr array has an irregular chunk grid or storage transformers. {CODEC_ADVICE}")
    chunk_shape = _parse_lengths(content["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, sharding = content["codecs"], None
    if codecs[0]["name"] == "sharding_indexed":
        sharding, chunk_shape, codecs = _parse_sharding(codecs, chunk_shape)
    codec = parse_codecs(codecs, content["data_type"], len(shape))
    encoding = content["chunk_key_encoding"]
    is_default = {"default": True, "v2": False}[encoding["name"]]
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    return ZarrArray(
        store,
        shape,
        chunk_shape,
        codec,
        _parse_fill_value(content["fill_value"], codec.dtype),
        ChunkKeys(prefix, is_default, separator),
        sharding,
        tuple(str(name or "") for name in content.get("dimension_names") or ()),
    )


def _check_v3_keys(content: dict[str, Any]) -> None:
    """Raise BadFile if the metadata is not that of an array, or requires an extension of the format."""
    if content["zarr_format"] != 3 or content["node_type"] != "array":
        raise BadFile(
            f"The metadata of a Zarr array describes a node of the type {str(content['node_type'])[:40]!r} in format"
            f" {str(content['zarr_format'])[:40]}. Copy or export the store again."
        )
    for key in sorted(content.keys() - _V3_KEYS):
        if not isinstance(content[key], dict) or content[key].get("must_understand", True):
            raise BadFile(f"The Zarr array uses the extension {key[:40]!r}, which is not supported. {CODEC_ADVICE}")


def _parse_sharding(codecs: Any, shard_shape: tuple[int, ...]) -> tuple[Sharding, tuple[int, ...], Any]:
    """Return the layout of the shards, the shape of a chunk, and the codecs of the chunks."""
    if len(codecs) > 1:
        raise BadFile(f"The Zarr array compresses whole shards ({format_names(codecs, 'name')}). {CODEC_ADVICE}")
    configuration = codecs[0]["configuration"]
    chunk_shape = _parse_lengths(configuration["chunk_shape"])
    index_codecs = [codec["name"] for codec in configuration["index_codecs"]]
    if (
        len(chunk_shape) != len(shard_shape)
        or min(*chunk_shape, *shard_shape) < 1
        or any(starmap(mod, zip(shard_shape, chunk_shape, strict=True)))
    ):
        raise BadFile(
            f"The shard shape {shard_shape} of the Zarr array is not a multiple of the chunk shape {chunk_shape}."
        )
    if index_codecs not in (["bytes"], ["bytes", "crc32c"]):
        raise BadFile(
            f"The Zarr array encodes the index of its shards with the codecs {index_codecs}, which are not supported."
            f" {CODEC_ADVICE}"
        )
    chunks_per_shard = tuple(map(floordiv, shard_shape, chunk_shape))
    is_at_start = configuration.get("index_location", "end") == "start"
    return Sharding(chunks_per_shard, is_at_start, "crc32c" in index_codecs), chunk_shape, configuration["codecs"]


def _parse_lengths(numbers: Any) -> tuple[int, ...]:
    lengths = tuple(numbers)
    if not all(type(length) is int and length <= _MAX_LENGTH for length in lengths):
        raise ValueError(numbers)
    return lengths


def _parse_fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the value of voxels in missing chunks. Raises ValueError if the data type does not contain it."""
    match value:
        case list():
            raise ValueError(value)
        case str() if value.startswith("0x"):
            return np.frombuffer(int(value, 16).to_bytes(dtype.itemsize, "big"), dtype.newbyteorder(">"))[0]
    number = 0 if value is None else value
    with np.errstate(invalid="ignore"):
        fill_value = np.array(number).astype(dtype.newbyteorder("="))[()]
    if dtype.kind != "f" and fill_value != float(number):
        raise ValueError(f"fill_value {number!r} for {dtype.name}")
    return fill_value
