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
# Maximum number of volumes, in total and for a single client. Each volume can hold a file open.
MAX_VOLUMES = 64
MAX_CLIENT_VOLUMES = 16
# The client name under which the cache reserves scratch space.
CACHE_CLIENT = "volume cache"


ReserveFunction = Callable[[int], None]
"""Function that reserves disk space, in bytes. Raises the errors of `SpaceReservation.reserve`."""
ReadVolumeFunction = Callable[[ReserveFunction], Volume]
"""Function that reads a volume, and reserves space for its decoded pixels, if possible before decoding them."""


class VolumeKey(NamedTuple):
    """ID of a stack or of a job, and the selected part of the stack or of the job's labels."""

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
    prevent uploads. A client that opens too many volumes evicts its own volumes.
    """

    def __init__(
        self,
        limit_bytes: int = MAX_CACHE_BYTES,
        max_volumes: int = MAX_VOLUMES,
        max_client_volumes: int = MAX_CLIENT_VOLUMES,
    ) -> None:
        self._limit_bytes, self._max_volumes, self._max_client_volumes = limit_bytes, max_volumes, max_client_volumes
        self._volumes: OrderedDict[VolumeKey, _CachedVolume] = OrderedDict()
        # Number of running reads by source ID, and the IDs of sources that were deleted during a read.
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

    def get_or_read(self, key: VolumeKey, client: str, space: ScratchSpace, read: ReadVolumeFunction) -> Volume:
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

    def _add(self, key: VolumeKey, new_entry: _CachedVolume) -> Volume:
        """Cache a volume, unless another thread has cached it in the meantime or its source was deleted."""
        with self._lock:
            existing_entry = self._volumes.get(key)
            if existing_entry is not None or key.source_id in self._deleted_sources:
                new_entry.reservation.close()
                return (existing_entry or new_entry).volume
            self._make_room(new_entry.client, 0, self._limit_bytes)
            self._volumes[key] = new_entry
            return new_entry.volume

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
        """Evict all volumes of a deleted stack or job."""
        with self._lock:
            if self._read_counts[source_id]:
                self._deleted_sources.add(source_id)
            for key in [key for key in self._volumes if key.source_id == source_id]:
                self._evict(key)

    def _make_room(self, client: str, nbytes: int, limit_bytes: int) -> None:
        """Evict volumes until a new volume of `nbytes` is within all limits, or no other volume is left."""
        client_keys = [key for key, entry in self._volumes.items() if entry.client == client]
        for key in client_keys[: max(len(client_keys) - self._max_client_volumes + 1, 0)]:
            self._evict(key)
        while self._volumes and (len(self._volumes) >= self._max_volumes or self._sum_bytes() + nbytes > limit_bytes):
            self._evict(next(iter(self._volumes)))

    def _evict(self, key: VolumeKey) -> None:
        self._volumes.pop(key).reservation.close()

    def _sum_bytes(self) -> int:
        return sum(entry.volume.nbytes for entry in self._volumes.values())
