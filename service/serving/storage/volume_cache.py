"""A least-recently-used cache of decoded volumes, for viewers that request a volume plane by plane."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from service.core.types import Volume
from service.serving.storage.scratch import ScratchSpace, SpaceReservation

# Maximum size of all volumes together. A single volume can be larger.
MAX_CACHE_BYTES = 4 * 2**30
# Maximum number of volumes, of all clients and of one client. Each volume can hold a file open.
MAX_VOLUMES = 64
MAX_CLIENT_VOLUMES = 16
# The client name under which the cache reserves scratch space.
CACHE_CLIENT = "volume cache"


Reserve = Callable[[int], None]
"""Function that reserves disk space, in bytes. Raises the errors of `SpaceReservation.reserve`."""
ReadVolume = Callable[[Reserve], Volume]
"""read(reserve) returns a volume, after calling `reserve` with its size in bytes, if possible before decoding it."""


class VolumeKey(NamedTuple):
    """ID of a stack or of a job, and the selected part of the stack or of the labels."""

    source_id: str
    selection: Hashable


class _CachedVolume(NamedTuple):
    volume: Volume
    client: str
    reservation: SpaceReservation


class VolumeCache:
    """A cache of volumes by key, with least-recently-used eviction. Thread-safe.

    The files of a volume are deleted with the last reference to the volume, so an evicted volume stays valid while it
    is in use. The scratch space of volumes does not count toward the limits of clients, so viewing a stack does not
    prevent uploads. A client that opens many volumes evicts its own ones.
    """

    def __init__(
        self,
        limit_bytes: int = MAX_CACHE_BYTES,
        max_volumes: int = MAX_VOLUMES,
        max_client_volumes: int = MAX_CLIENT_VOLUMES,
    ) -> None:
        self._limit_bytes, self._max_volumes, self._max_client_volumes = limit_bytes, max_volumes, max_client_volumes
        self._volumes: OrderedDict[VolumeKey, _CachedVolume] = OrderedDict()
        # Number of running reads by stack or job, and those that were deleted during a read.
        self._read_counts: Counter[str] = Counter()
        self._deleted_sources: set[str] = set()
        self._lock = threading.Lock()

    def find(self, key: VolumeKey) -> Volume | None:
        """Return the cached volume with this key, or None."""
        with self._lock:
            if key not in self._volumes:
                return None
            self._volumes.move_to_end(key)
            return self._volumes[key].volume

    def get_or_read(self, key: VolumeKey, client: str, space: ScratchSpace, read: ReadVolume) -> Volume:
        """Return the cached volume with this key. If there is none, call `read` and cache the volume that it returns.

        Blocks during `read`. Raises the errors of `read` and `SpaceReservation.reserve`.
        """
        if (cached_volume := self.find(key)) is not None:
            return cached_volume
        reservation = space.make_reservation(CACHE_CLIENT)

        def reserve(nbytes: int) -> None:
            with self._lock:
                self._make_room(client, nbytes, min(self._limit_bytes, space.max_client_bytes // 2))
                reservation.reserve(nbytes)

        with self._count_read(key.source_id):
            try:
                volume = read(reserve)
            except BaseException:
                reservation.close()
                raise
            return self._add(key, _CachedVolume(volume, client, reservation))

    def _add(self, key: VolumeKey, new: _CachedVolume) -> Volume:
        """Cache a volume, unless another thread has cached it in the meantime or its source was deleted."""
        with self._lock:
            existing = self._volumes.get(key)
            if existing is not None or key.source_id in self._deleted_sources:
                new.reservation.close()
                return (existing or new).volume
            self._make_room(new.client, 0, self._limit_bytes)
            self._volumes[key] = new
            return new.volume

    @contextmanager
    def _count_read(self, source_id: str) -> Iterator[None]:
        with self._lock:
            self._read_counts[source_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._read_counts[source_id] -= 1
                if not self._read_counts[source_id]:
                    del self._read_counts[source_id]
                    self._deleted_sources.discard(source_id)

    def discard(self, source_id: str) -> None:
        """Evict all volumes of a stack or a job, because it was deleted."""
        with self._lock:
            if self._read_counts[source_id]:
                self._deleted_sources.add(source_id)
            for key in [key for key in self._volumes if key.source_id == source_id]:
                self._evict(key)

    def _make_room(self, client: str, nbytes: int, limit_bytes: int) -> None:
        """Evict volumes until a new one of a client is within all limits, except that it may be the only one."""
        client_keys = [key for key, cached in self._volumes.items() if cached.client == client]
        for key in client_keys[: max(len(client_keys) - self._max_client_volumes + 1, 0)]:
            self._evict(key)
        while self._volumes and (len(self._volumes) >= self._max_volumes or self._sum_bytes() + nbytes > limit_bytes):
            self._evict(next(iter(self._volumes)))

    def _evict(self, key: VolumeKey) -> None:
        self._volumes.pop(key).reservation.close()

    def _sum_bytes(self) -> int:
        return sum(cached.volume.nbytes for cached in self._volumes.values())
