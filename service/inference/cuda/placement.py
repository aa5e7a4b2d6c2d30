"""Placement of windows and scores in a device's own memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from service.core.hardware.devices import Driver
from service.core.types import Volume
from service.inference.cuda.device_image import DeviceImage, UploadedVolume
from service.inference.decoding.decoders import Decoder, HostDecoder
from service.inference.preprocessing.normalize import NormalizedImage
from service.inference.preprocessing.resample import ResampledImage
from service.inference.types import Plan
from service.inference.windows.sliding_window import Image


class DevicePlacement:
    """Placement in a device's own memory. `driver` reports how much memory is free."""

    uses_host_memory = False

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver

    @property
    def total_bytes(self) -> int | None:
        return self._driver.query_total_bytes(self._device)

    def query_free_bytes(self) -> int | None:
        return self._driver.query_free_bytes(self._device)

    def upload(self, volume: Volume, /) -> UploadedVolume | None:
        """Copy a volume to the device, which computes its histograms. Returns None if the volume is not supported."""
        return UploadedVolume(volume, self._device) if UploadedVolume.supports(volume) else None

    def place_image(self, image: Image, depth: int, /) -> Image:
        """Return an image whose planes are copied to the device one layer of windows at a time."""
        if isinstance(image, ResampledImage):
            return DeviceImage(image.to_tensor(), depth, self._device)
        return DeviceImage(image, depth, self._device) if isinstance(image, NormalizedImage) else image

    def choose_decoder_factory(self, create_decoder: Callable[[], Decoder], plan: Plan, /) -> Callable[[], Decoder]:
        """Return a function that creates a decoder on the device, or on the host if the scores do not fit."""
        return partial(HostDecoder, create_decoder) if plan.decode_on_host else create_decoder
