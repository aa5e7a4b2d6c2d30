"""The settings of each device of this host."""

from __future__ import annotations

from service.core.config import Settings
from service.core.hardware import devices, host


def split_settings(settings: Settings) -> list[tuple[str | None, Settings]]:
    """Return the name and the settings of each device; no name if there is only one. Raises ConfigError.

    With a cluster there are only the devices that `device.serve` names.
    """
    wanted = devices.gpu_names() if settings.device.serve == "all" else settings.device.serve
    if not wanted:
        return [] if settings.cluster.address else [(None, settings)]
    shares = max(wanted.count("cpu"), 1)
    threads = settings.device.threads or max(host.usable_cores() // shares, 1)
    split: list[tuple[str | None, Settings]] = []
    for index, name in enumerate(wanted):
        before = wanted[:index].count(name)
        device = settings.device.model_copy(update={"name": name, "threads": threads})
        split.append((f"{name}-{before + 1}" if before else name, settings.model_copy(update={"device": device})))
    return split
