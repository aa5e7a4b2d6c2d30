"""Names of the chunks of a Zarr array in its store, and detection of chunks that have other names.

Some programs write chunks into nested folders but do not specify `dimension_separator`, or the reverse. By the
specification, missing chunks have the fill value, so such an array would be read as a black image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import floordiv, mod

from service.core.errors import BadFile
from service.formats.zarr.store import FileRange, Store

SEPARATORS = ("/", ".")
# Maximum number of chunks that are searched for the first stored chunk, and number of chunks per request.
_MAX_PROBED_CHUNKS = 2**14
_PROBED_CHUNKS_PER_BATCH = 64


@dataclass(frozen=True)
class ChunkKeys:
    """Function that returns the key of a chunk or of a shard by its index in the grid.

    prefix      folder of the array, with a slash at its end, or ""
    is_default  whether keys begin with "c", as in the default encoding of Zarr 3
    separator   text between the components of a key
    """

    prefix: str
    is_default: bool
    separator: str

    def __post_init__(self) -> None:
        if self.separator not in SEPARATORS:
            raise ValueError(self.separator)

    def __call__(self, index: Sequence[int]) -> str:
        """Return the key of a chunk or of a shard."""
        return self.prefix + self.separator.join(["c"] * self.is_default + [str(number) for number in index])

    def list_alternatives(self) -> list[ChunkKeys]:
        """Return the keys with other separators and encodings. The same encoding comes first."""
        return [
            replace(self, is_default=is_default, separator=separator)
            for is_default in (self.is_default, not self.is_default)
            for separator in SEPARATORS
            if (is_default, separator) != (self.is_default, self.separator)
        ]


def find_stored_keys(store: Store, keys: ChunkKeys, grid_shape: Sequence[int]) -> ChunkKeys:
    """Return the keys under which the chunks of an array are stored.

    keys        keys according to the metadata; they are returned if a chunk with such a key exists, or if the array has
                too many chunks to search all of them
    grid_shape  number of chunks along each dimension

    Raises BadFile if no chunk is stored.
    """
    for candidate in (keys, *keys.list_alternatives()):
        for batch in _batch(_list_probed_chunks(grid_shape)):
            if any(data is not None for data in store.read([FileRange(candidate(index), 1, 0) for index in batch])):
                return candidate
    if math.prod(grid_shape) > _MAX_PROBED_CHUNKS:
        return keys
    raise BadFile(
        f"The Zarr array {keys.prefix.rstrip('/') or '/'} has no pixels: none of its {math.prod(grid_shape)} chunks is"
        f" stored, neither under names such as {keys([0] * len(grid_shape))} nor with another separator. Copy or export"
        " the store again, with all of its files."
    )


def _list_probed_chunks(grid_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the chunk in the middle, which is rarely empty, and of chunks with even distances."""
    yield tuple(length // 2 for length in grid_shape)
    chunk_count = math.prod(grid_shape)
    for number in range(0, chunk_count, -(-chunk_count // _MAX_PROBED_CHUNKS)):
        quotients = itertools.accumulate(reversed(grid_shape), floordiv, initial=number)
        yield tuple(map(mod, quotients, reversed(grid_shape)))[::-1]


def _batch(indices: Iterator[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield one index, and then batches of indices."""
    yield list(itertools.islice(indices, 1))
    while batch := list(itertools.islice(indices, _PROBED_CHUNKS_PER_BATCH)):
        yield batch
