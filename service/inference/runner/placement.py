"""Memory in which the pixels and scores of a model are held. On a CPU, this is the host's memory; nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from service.core.types import Volume
from service.inference.decoding.decoders import Decoder
from service.inference.preprocessing.normalize import DevicePixels
from service.inference.types import Plan
from service.inference.windows.sliding_window import Image


class Placement(Protocol):
    """Memory that holds the windows and scores of a network: that of the host, or the device's own."""

    @property
    def on_host(self) -> bool:
        """Whether the device uses the host's memory."""

    @property
    def total_bytes(self) -> int | None:
        """Bytes of the device's own memory. None if unknown, or if it is the host's."""

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device's own memory. None if unknown, or if it is the host's."""

    def upload(self, volume: Volume, /) -> DevicePixels | None:
        """Copy all pixels of a volume to the device's own memory. None if it has none, or if they do not fit."""

    def place_image(self, image: Image, depth: int, /) -> Image:
        """Return an image whose windows of `depth` planes are read on the device; on the host, `image` itself."""

    def choose_decoder(self, make: Callable[..., Decoder], plan: Plan, /) -> Callable[[], Decoder]:
        """Return a function that creates the decoder of a request. `make` is `make_decoder` except for `whole`."""


class HostPlacement:
    """Placement in the host's memory."""

    on_host = True
    total_bytes = None

    def free_bytes(self) -> None:
        return None

    def upload(self, _volume: Volume, /) -> None:
        return None

    def place_image(self, image: Image, _depth: int, /) -> Image:
        return image

    def choose_decoder(self, make: Callable[..., Decoder], _plan: Plan, /) -> Callable[[], Decoder]:
        return make
