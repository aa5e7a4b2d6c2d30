"""What is expected of a model that was never loaded on a device."""

from __future__ import annotations

from service.core.config import Settings
from service.core.hardware import devices
from service.inference.runner.engine_builder import default_batch_size, default_streams
from service.inference.runner.estimator import Estimator
from service.models.spec import ModelSpec

# A model on a CPU may have its weights as in the file, prepared, and packed by an engine.
HOST_WEIGHT_COPIES = 3


def guess_estimator(spec: ModelSpec, settings: Settings, device_memory: int | None = None) -> Estimator:
    """Return the estimator of a model as most run on the device of these settings.

    device_memory  bytes of the device; None: it shares the memory of the host
    """
    device = devices.choose_device(settings.device.name)
    return Estimator(
        spec,
        settings,
        default_batch_size(settings, device),
        on_host=device_memory is None,
        streams=default_streams(settings, device),
        device_memory=device_memory,
    )
