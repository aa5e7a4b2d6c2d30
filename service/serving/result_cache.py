"""A cache of the results of earlier requests: files in a folder, of which the least recently used are deleted first."""

from __future__ import annotations

import os
import threading
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class CachedResult(NamedTuple, Generic[T]):
    """A result: its open file, which stays readable until it is closed, and its metadata."""

    file: BinaryIO
    metadata: T


class ResultCache(Generic[T]):
    """A cache of at most `limit_bytes` in a folder of its own; 0 disables it. Safe to use from several threads.

    `nbytes` are those of all results in the cache.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._entries: OrderedDict[str, tuple[int, T]] = OrderedDict()
        self.nbytes = 0
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._limit > 0

    def get(self, key: str) -> CachedResult[T] | None:
        """Return the result with this key; None if there is none, or none any more."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return CachedResult((self._folder / key).open("rb"), self._entries[key][1])

    def put(self, key: str, result: Path | bytes, metadata: T) -> None:
        """Add a file of this file system, which must not change any more, or the content of a file.

        The file may be deleted afterwards. Raises OSError, and adds nothing then.
        """
        size = result.stat().st_size if isinstance(result, Path) else len(result)
        if size > self._limit or key in self._entries:
            return
        # Written without the lock, which every request takes that looks a result up.
        partial = self._folder / f".{uuid.uuid4().hex}"
        try:
            if isinstance(result, Path):
                os.link(result, partial)
            else:
                partial.write_bytes(result)
            self._add(key, partial, size, metadata)
        finally:
            partial.unlink(missing_ok=True)

    def _add(self, key: str, file: Path, size: int, metadata: T) -> None:
        with self._lock:
            if key in self._entries:
                return
            file.replace(self._folder / key)
            self._entries[key] = size, metadata
            self.nbytes += size
            while self.nbytes > self._limit:
                oldest, (freed, _) = self._entries.popitem(last=False)
                (self._folder / oldest).unlink()
                self.nbytes -= freed
