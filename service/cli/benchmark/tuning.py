"""Compare the engines for each model on each kind of device that the service would use."""

from __future__ import annotations

from collections.abc import Iterator

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from service.core.config import Settings
from service.core.hardware import devices
from service.engine.tuning.plans import EngineConfig, EnginePlan
from service.inference.runner.model_runner import ModelRunner
from service.models.spec import ModelSpec
from service.serving.devices.local.settings import split_settings


def tune_models(
    specs: list[ModelSpec], settings: Settings, max_seconds: float
) -> Iterator[tuple[ModelSpec, EnginePlan]]:
    """Tune each model on each kind of device, and yield the stored plan with the fastest engine."""
    for device_settings in _list_device_settings(settings):
        for spec in specs:
            yield spec, _tune(spec, device_settings, max_seconds)


def _list_device_settings(settings: Settings) -> list[Settings]:
    """Return the settings of one device of each kind that `stackseg serve` would use."""
    settings_by_kind: dict[tuple[str, int], Settings] = {}
    for _name, device_settings in split_settings(settings):
        settings_by_kind.setdefault(
            (
                devices.get_device_name(devices.choose_device(device_settings.device.name)),
                device_settings.device.threads,
            ),
            device_settings,
        )
    return list(settings_by_kind.values())


def _tune(spec: ModelSpec, settings: Settings, max_seconds: float) -> EnginePlan:
    with tqdm(desc=spec.identifier, unit="engine", disable=None) as bar, logging_redirect_tqdm():

        def announce(config: EngineConfig, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(str(config))
            bar.update()

        return ModelRunner(spec, settings).tune(max_seconds, announce)
