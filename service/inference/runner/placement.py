"""Where the pixels and scores of a model lie. On a CPU all of them are in the host's memory, and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from service.core.types import Volume
from service.inference.decoding.decoders import Decoder
from service.inference.preprocessing.normalize import SentPixels
from service.inference.types import Plan
from service.inference.windows.sliding_window import Image


class Placement(Protocol):
    """Memory that a network reads windows from and leaves scores in: the host's, or a device's own."""

    @property
    def on_host(self) -> bool:
        """Whether the device's memory is the host's."""

    @property
    def total_bytes(self) -> int | None:
        """Bytes of the device's own memory; None: unknown, or the host's."""

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device's own memory; None: unknown, or the host's."""

    def upload(self, volume: Volume, /) -> SentPixels | None:
        """Copy all pixels of a volume to the device's own memory; None where there is none, or it cannot hold them."""

    def bring(self, image: Image, depth: int, /) -> Image:
        """Return an image whose windows, of `depth` planes, are read on the device; as it is where that is the host."""

    def choose_decoder(self, make: Callable[..., Decoder], plan: Plan, /) -> Callable[[], Decoder]:
        """Return what makes the decoder of a request; `make` is `make_decoder` with its arguments but `whole`."""


class HostPlacement:
    """A device whose memory is the host's."""

    on_host = True
    total_bytes = None

    def free_bytes(self) -> None:
        return None

    def upload(self, _volume: Volume, /) -> None:
        return None

    def bring(self, image: Image, _depth: int, /) -> Image:
        return image

    def choose_decoder(self, make: Callable[..., Decoder], _plan: Plan, /) -> Callable[[], Decoder]:
        return make
