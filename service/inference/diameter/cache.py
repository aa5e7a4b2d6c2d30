"""Diameters that were estimated earlier, by the pixels of their stacks."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from service.core.buffers import LARGE_BYTES
from service.core.types import Volume
from service.inference.preprocessing.normalize import VolumeChannel
from service.inference.types import Sizing

# Number of stacks whose estimate is cached.
CACHED_STACKS = 1024


class DiameterCache:
    """Estimates of earlier stacks by one network. Safe to use from several threads.

    People come back with the same stack for another output or for measurements, and a stack of a single window takes
    less time than its estimate. Of a stack beyond `LARGE_BYTES` the estimate is next to nothing, and reading it is not.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Sizing] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, volume: Volume, estimate: Callable[[], Sizing]) -> Sizing:
        """Return the estimate for the same pixels and voxel size, or what `estimate` returns now."""
        if volume.nbytes > LARGE_BYTES:
            return estimate()
        key = _digest(volume)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        sizing = estimate()
        with self._lock:
            self._known[key] = sizing
            if len(self._known) > CACHED_STACKS:
                self._known.popitem(last=False)
        return sizing


def _digest(volume: Volume) -> bytes:
    size = None if volume.voxel_size is None else tuple(volume.voxel_size)
    digest = hashlib.sha256(repr((volume.shape, volume.dtype.str, size)).encode())
    for index in range(volume.shape[0]):
        for block in VolumeChannel(volume, index):
            digest.update(block.tobytes())
    return digest.digest()
