"""Placement of windows and scores in memory. On a CPU, they are in the host's memory, and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from service.core.types import Volume
from service.inference.decoding.decoders import Decoder
from service.inference.preprocessing.normalize import DevicePixels
from service.inference.types import Plan
from service.inference.windows.sliding_window import Image


class Placement(Protocol):
    """Strategy for placing the windows and scores of requests in the host's memory or in the device's own memory."""

    @property
    def uses_host_memory(self) -> bool:
        """Whether the device uses the host's memory."""

    @property
    def total_bytes(self) -> int | None:
        """Size of the device's own memory in bytes, or None if it is unknown or the device uses the host's memory."""

    def query_free_bytes(self) -> int | None:
        """Return the free bytes of the device's own memory, or None under the same conditions as `total_bytes`."""

    def upload(self, volume: Volume, /) -> DevicePixels | None:
        """Copy all pixels of a volume to the device's own memory.

        Returns None if the device has no memory of its own, or if the pixels do not fit.
        """

    def place_image(self, image: Image, depth: int, /) -> Image:
        """Return an image that reads its windows, each of `depth` planes, into device memory.

        On the host, this is `image` itself.
        """

    def choose_decoder_factory(self, make: Callable[[], Decoder], plan: Plan, /) -> Callable[[], Decoder]:
        """Return a function that creates the decoder of a request.

        `make` is `make_decoder` with all of its arguments bound, except those that depend on the placement.
        """


class HostPlacement:
    """Placement in the host's memory."""

    uses_host_memory = True
    total_bytes = None

    def query_free_bytes(self) -> None:
        return None

    def upload(self, _volume: Volume, /) -> None:
        return None

    def place_image(self, image: Image, _depth: int, /) -> Image:
        return image

    def choose_decoder_factory(self, make: Callable[[], Decoder], _plan: Plan, /) -> Callable[[], Decoder]:
        return make
