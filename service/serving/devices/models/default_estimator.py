"""Estimators for models that have never been loaded on a device."""

from __future__ import annotations

from service.core.config import Settings
from service.core.hardware import devices
from service.inference.runner.engine_builder import choose_default_batch_size, choose_default_streams
from service.inference.runner.estimator import Estimator
from service.models.spec import ModelSpec

# Maximum number of copies of the weights of a model on a CPU: as stored in the file, prepared, and packed by an engine.
HOST_WEIGHT_COPIES = 3


def make_default_estimator(spec: ModelSpec, settings: Settings, device_memory_bytes: int | None = None) -> Estimator:
    """Return an estimator for a model. It assumes the defaults for the device in these settings.

    device_memory_bytes  memory of the device in bytes; None if the device shares the memory of the host
    """
    device = devices.choose_device(settings.device.name)
    return Estimator(
        spec,
        settings,
        choose_default_batch_size(settings, device),
        uses_host_memory=device_memory_bytes is None,
        streams=choose_default_streams(settings, device),
        device_memory_bytes=device_memory_bytes,
    )
