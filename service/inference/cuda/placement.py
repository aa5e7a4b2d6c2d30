"""Pixels and scores in the memory of a device of its own, which sends and decodes by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from service.core.hardware.devices import Driver
from service.core.types import Volume
from service.inference.cuda.device_image import DeviceImage, SentVolume
from service.inference.cuda.watershed import WholeWatershed
from service.inference.decoding.decoders import Decoder, HostDecoder
from service.inference.preprocessing.normalize import NormalisedImage
from service.inference.preprocessing.resample import ResampledImage
from service.inference.types import Plan
from service.inference.windows.sliding_window import Image


class DevicePlacement:
    """A device with memory of its own, which `driver` knows."""

    on_host = False

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver

    @property
    def total_bytes(self) -> int | None:
        return self._driver.total_bytes(self._device)

    def free_bytes(self) -> int | None:
        return self._driver.free_bytes(self._device)

    def upload(self, volume: Volume, /) -> SentVolume | None:
        """Copy a volume to the device, which finds its percentiles; None where it is too large, or of other pixels."""
        return SentVolume(volume, self._device) if SentVolume.takes(volume) else None

    def bring(self, image: Image, depth: int, /) -> Image:
        """Return an image whose planes are sent to the device a layer of windows at a time."""
        if isinstance(image, ResampledImage):
            return DeviceImage(image.tensor(), depth, self._device)
        return DeviceImage(image, depth, self._device) if isinstance(image, NormalisedImage) else image

    def choose_decoder(self, make: Callable[..., Decoder], plan: Plan, /) -> Callable[[], Decoder]:
        """Return what decodes on the device with all scores at once, or on the host where its memory is too small."""
        return partial(HostDecoder, make) if plan.decode_on_host else partial(make, start=WholeWatershed)
