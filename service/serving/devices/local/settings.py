"""Settings for each device on this host."""

from __future__ import annotations

from service.core.config import Settings
from service.core.hardware import devices, host


def split_settings(settings: Settings) -> list[tuple[str | None, Settings]]:
    """Return the name and the settings of each device on this host.

    The name is None if there is only one device. With a cluster, only the devices listed in `device.serve` are used.
    Raises ConfigError if `device.serve` is `all` and no GPU is available.
    """
    names = devices.list_gpus() if settings.device.serve == "all" else settings.device.serve
    if not names:
        return [] if settings.cluster.address else [(None, settings)]
    cpu_device_count = max(names.count("cpu"), 1)
    threads = settings.device.threads or max(host.count_usable_cores() // cpu_device_count, 1)
    device_settings: list[tuple[str | None, Settings]] = []
    for index, name in enumerate(names):
        previous_count = names[:index].count(name)
        device = settings.device.model_copy(update={"name": name, "threads": threads})
        device_settings.append(
            (f"{name}-{previous_count + 1}" if previous_count else name, settings.model_copy(update={"device": device}))
        )
    return device_settings
