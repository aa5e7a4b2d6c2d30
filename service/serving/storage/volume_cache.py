"""Decoded volumes that somebody looks at, plane by plane: decoded once, kept while they are among the last used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

from service.core.types import Volume
from service.serving.storage.scratch import Hold, ScratchSpace

# Of all volumes together, as if all of them were decoded to disk. One volume alone may be larger.
CACHE_BYTES = 4 * 2**30
# In the accounts of the scratch folder.
HOLDER = "volumes that are looked at"


class _Cached(NamedTuple):
    volume: Volume
    hold: Hold


class VolumeCache:
    """Volumes by key, the least recently used ones going first. Safe to use from several threads.

    The files of a volume disappear with the last reference to it, so that one in use outlives its place here. No client
    holds their space: whoever has looked at a stack can still post one.
    """

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit = limit_bytes
        self._volumes: OrderedDict[Hashable, _Cached] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Volume | None:
        """Return the volume under a key, if it is kept."""
        with self._lock:
            if key not in self._volumes:
                return None
            self._volumes.move_to_end(key)
            return self._volumes[key].volume

    def open(self, key: Hashable, space: ScratchSpace, read: Callable[[], Volume]) -> Volume:
        """Return the volume under a key, else the one that `read` returns, which is kept.

        Blocks while `read` decodes. Raises its errors, and what `Hold.reserve` raises.
        """
        if (kept := self.find(key)) is not None:
            return kept
        volume = read()
        with self._lock:
            # Another thread may have read it meanwhile.
            if key in self._volumes:
                return self._volumes[key].volume
            while self._volumes and self._nbytes() + volume.nbytes > min(self._limit, space.most // 2):
                self._volumes.popitem(last=False)[1].hold.close()
            hold = space.hold(HOLDER)
            hold.reserve(volume.nbytes)
            self._volumes[key] = _Cached(volume, hold)
        return volume

    def _nbytes(self) -> int:
        return sum(cached.volume.nbytes for cached in self._volumes.values())
