"""Cache of diameter estimates, keyed by the pixels of the stack."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from service.core.buffers import LARGE_ARRAY_BYTES
from service.core.quantities import Diameter
from service.core.types import Volume
from service.inference.preprocessing.normalize import VolumeChannel
from service.inference.types import DiameterEstimate

# Maximum number of stacks whose diameter estimates are cached.
MAX_CACHED_STACKS = 1024


class DiameterCache:
    """Thread-safe cache of the diameter estimates of one network.

    Users often segment a stack again, for a different output or for measurements, and estimating the diameter of a
    small stack takes longer than segmenting it. Stacks larger than `LARGE_ARRAY_BYTES` are not cached: hashing their
    pixels costs more than estimating again.
    """

    def __init__(self) -> None:
        self._estimates: OrderedDict[tuple[bytes, Diameter | None], DiameterEstimate] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, volume: Volume, default: Diameter | None, estimate: Callable[[], DiameterEstimate]
    ) -> DiameterEstimate:
        """Return the cached estimate for the same pixels, voxel size and default diameter.

        If there is none, call `estimate` and cache its result.
        """
        if volume.nbytes > LARGE_ARRAY_BYTES:
            return estimate()
        key = _hash_volume(volume), default
        with self._lock:
            if key in self._estimates:
                self._estimates.move_to_end(key)
                return self._estimates[key]
        diameter_estimate = estimate()
        with self._lock:
            self._estimates[key] = diameter_estimate
            if len(self._estimates) > MAX_CACHED_STACKS:
                self._estimates.popitem(last=False)
        return diameter_estimate


def _hash_volume(volume: Volume) -> bytes:
    voxel_size = None if volume.voxel_size is None else tuple(volume.voxel_size)
    digest = hashlib.sha256(repr((volume.shape, volume.dtype.str, voxel_size)).encode())
    for index in range(volume.shape[0]):
        for block in VolumeChannel(volume, index):
            digest.update(block.tobytes())
    return digest.digest()
