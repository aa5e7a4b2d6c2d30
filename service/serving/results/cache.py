"""A cache of the results of earlier requests, with least-recently-used eviction."""

from __future__ import annotations

import os
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class CachedResult(NamedTuple, Generic[T]):
    """The metadata and the open file of a result. The file stays readable even if the result is deleted."""

    file: BinaryIO
    metadata: T


class ResultCache(Generic[T]):
    """A cache of at most `limit_bytes` in its own folder. A limit of 0 disables the cache. Thread-safe.

    If the cache is full, the least recently used result of the owner who uses the most space is deleted. This
    guarantees each owner an equal share of the cache. `nbytes` is the total size of all cached results.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        # Entries by owner, least recently used first.
        self._entries: defaultdict[str | None, OrderedDict[str, tuple[int, T]]] = defaultdict(OrderedDict)
        self._used_bytes: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    @property
    def is_enabled(self) -> bool:
        return self._limit_bytes > 0

    @property
    def nbytes(self) -> int:
        return self._used_bytes.total()

    def get(self, key: str, owner: str | None) -> CachedResult[T] | None:
        """Return the owner's result with this key, or None."""
        with self._lock:
            entries = self._entries[owner]
            if key not in entries:
                return None
            try:
                file = (self._folder / key).open("rb")
            except FileNotFoundError:
                # Another program has deleted the file.
                self._used_bytes[owner] -= entries.pop(key)[0]
                return None
            entries.move_to_end(key)
            return CachedResult(file, entries[key][1])

    def put(self, key: str, owner: str | None, result: Path | bytes, metadata: T) -> None:
        """Add a result: a file on the same file system, or the content of a file.

        The file must not be changed afterward, but may be deleted. A key belongs to one owner. If this raises OSError,
        nothing has been added.
        """
        size = result.stat().st_size if isinstance(result, Path) else len(result)
        if size > self._limit_bytes or key in self._entries[owner]:
            return
        # Write without holding the lock, because every lookup needs the lock.
        partial_path = self._folder / f".{uuid.uuid4().hex}"
        try:
            if isinstance(result, Path):
                os.link(result, partial_path)
            else:
                partial_path.write_bytes(result)
            self._add(key, owner, partial_path, (size, metadata))
        finally:
            partial_path.unlink(missing_ok=True)

    def _add(self, key: str, owner: str | None, file: Path, entry: tuple[int, T]) -> None:
        with self._lock:
            if key in self._entries[owner]:
                return
            file.replace(self._folder / key)
            self._entries[owner][key] = entry
            self._used_bytes[owner] += entry[0]
            while self.nbytes > self._limit_bytes:
                ((largest_owner, _),) = self._used_bytes.most_common(1)
                oldest_key, (freed_bytes, _) = self._entries[largest_owner].popitem(last=False)
                self._used_bytes[largest_owner] -= freed_bytes
                (self._folder / oldest_key).unlink(missing_ok=True)
