"""A cache of the results of earlier requests: files in a folder, of which the least recently used are deleted first."""

from __future__ import annotations

import os
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class CachedResult(NamedTuple, Generic[T]):
    """A result: its open file, which stays readable until it is closed, and its metadata."""

    file: BinaryIO
    metadata: T


class ResultCache(Generic[T]):
    """A cache of at most `limit_bytes` in a folder of its own; 0 disables it. Safe to use from several threads.

    Where several owners fill it, the owner who has most loses results first, so that nobody's go for another's while
    they take less than an equal share. `nbytes` are those of all results in the cache.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        # By owner, the least recently used first.
        self._entries: defaultdict[str | None, OrderedDict[str, tuple[int, T]]] = defaultdict(OrderedDict)
        self._used: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._limit > 0

    @property
    def nbytes(self) -> int:
        return self._used.total()

    def get(self, key: str, owner: str | None) -> CachedResult[T] | None:
        """Return the owner's result with this key; None if there is none, or none any more."""
        with self._lock:
            entries = self._entries[owner]
            if key not in entries:
                return None
            try:
                file = (self._folder / key).open("rb")
            except FileNotFoundError:
                # Somebody else has deleted it.
                self._used[owner] -= entries.pop(key)[0]
                return None
            entries.move_to_end(key)
            return CachedResult(file, entries[key][1])

    def put(self, key: str, owner: str | None, result: Path | bytes, metadata: T) -> None:
        """Add a file of this file system, which must not change any more, or the content of a file.

        A key belongs to one owner. The file may be deleted afterwards. Raises OSError, and adds nothing then.
        """
        size = result.stat().st_size if isinstance(result, Path) else len(result)
        if size > self._limit or key in self._entries[owner]:
            return
        # Written without the lock, which every request takes that looks a result up.
        partial = self._folder / f".{uuid.uuid4().hex}"
        try:
            if isinstance(result, Path):
                os.link(result, partial)
            else:
                partial.write_bytes(result)
            self._add(key, owner, partial, (size, metadata))
        finally:
            partial.unlink(missing_ok=True)

    def _add(self, key: str, owner: str | None, file: Path, entry: tuple[int, T]) -> None:
        with self._lock:
            if key in self._entries[owner]:
                return
            file.replace(self._folder / key)
            self._entries[owner][key] = entry
            self._used[owner] += entry[0]
            while self.nbytes > self._limit:
                ((most, _),) = self._used.most_common(1)
                oldest, (freed, _) = self._entries[most].popitem(last=False)
                self._used[most] -= freed
                (self._folder / oldest).unlink(missing_ok=True)
