"""A least-recently-used cache of decoded volumes, for viewers that request a volume plane by plane."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

from service.core.types import Volume
from service.serving.storage.scratch import ScratchSpace, SpaceReservation

# Maximum size of all volumes together. A single volume can be larger.
MAX_CACHE_BYTES = 4 * 2**30
# The client name under which the cache reserves scratch space.
CACHE_CLIENT = "volume cache"


class _CachedVolume(NamedTuple):
    volume: Volume
    reservation: SpaceReservation


class VolumeCache:
    """A cache of volumes by key, with least-recently-used eviction. Thread-safe.

    The files of a volume are deleted with the last reference to the volume, so an evicted volume stays valid while it
    is in use. The scratch space of volumes does not count toward the limits of clients, so viewing a stack does not
    prevent uploads.
    """

    def __init__(self, limit_bytes: int = MAX_CACHE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._volumes: OrderedDict[Hashable, _CachedVolume] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> Volume | None:
        """Return the cached volume with this key, or None."""
        with self._lock:
            if key not in self._volumes:
                return None
            self._volumes.move_to_end(key)
            return self._volumes[key].volume

    def get_or_read(self, key: Hashable, space: ScratchSpace, read: Callable[[], Volume]) -> Volume:
        """Return the cached volume with this key. If there is none, call `read` and cache the volume that it returns.

        Blocks during `read`. Raises the errors of `read` and `SpaceReservation.reserve`.
        """
        if (cached_volume := self.find(key)) is not None:
            return cached_volume
        volume = read()
        with self._lock:
            # Another thread may have added the volume in the meantime.
            if key in self._volumes:
                return self._volumes[key].volume
            while self._volumes and self._sum_bytes() + volume.nbytes > min(
                self._limit_bytes, space.max_client_bytes // 2
            ):
                self._volumes.popitem(last=False)[1].reservation.close()
            reservation = space.make_reservation(CACHE_CLIENT)
            reservation.reserve(volume.nbytes)
            self._volumes[key] = _CachedVolume(volume, reservation)
        return volume

    def _sum_bytes(self) -> int:
        return sum(cached_volume.volume.nbytes for cached_volume in self._volumes.values())
