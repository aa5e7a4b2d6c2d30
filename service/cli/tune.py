"""`stackseg tune` finds the fastest way to run models on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from service.cli.models import choose_model
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter, ConfigError
from service.models.repository import read_repository

if TYPE_CHECKING:
    from service.engine.tuning.plans import EngineConfig, EnginePlan
    from service.models.spec import ModelSpec


def add_arguments(tune: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg tune`."""
    which = tune.add_mutually_exclusive_group()
    which.add_argument("--model", help="name of a model, or its folder; the default model if not given")
    which.add_argument("--all", action="store_true", help="every model that is served, one after the other")
    tune.add_argument(
        "--minutes", type=float, help="of each model, until which anything is begun; overrides engine.tune_seconds"
    )
    tune.add_argument("--device", help="auto, cpu, cuda or cuda:N; overrides device.name")
    tune.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Race the ways to run each model, keep what wins for later starts, print what was tried. Raises ConfigError."""
    # As `stackseg serve` does, for which engines are compared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if options.minutes is not None and not options.minutes > 0:
        raise BadParameter("--minutes: a positive number is expected.")
    if options.device is not None:
        settings = override_settings(settings, "device", {"name": options.device, "serve": ()})
    kind = settings.engine.kind
    if kind != "auto":
        raise ConfigError(f"engine.kind is {kind}, which leaves nothing to choose; set it to auto to tune.")
    specs = [choose_model(options.model, settings)]
    if options.all:
        specs = list(read_repository(settings.models.folder, settings.models.serve).values())
    seconds = settings.engine.tune_seconds if options.minutes is None else 60 * options.minutes
    for device_settings in _list_devices(settings):
        for spec in specs:
            plan = _tune(spec, device_settings, seconds)
            sys.stdout.write(f"{spec.identifier}\n" + "".join(f"  {line}\n" for line in plan.lines()))
    return 0


def _list_devices(settings: Settings) -> list[Settings]:
    """Return the settings of each device that `stackseg serve` would use, one of those that are alike."""
    from service.core import hardware  # noqa: PLC0415
    from service.serving.devices.worker import device_worker_settings  # noqa: PLC0415

    alike: dict[tuple[str, int], Settings] = {}
    for _name, each in device_worker_settings(settings):
        alike.setdefault((hardware.device_name(hardware.choose_device(each.device.name)), each.device.threads), each)
    return list(alike.values())


def _tune(spec: ModelSpec, settings: Settings, seconds: float) -> EnginePlan:
    from tqdm import tqdm  # noqa: PLC0415
    from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: PLC0415

    from service.inference.runner.model_runner import ModelRunner  # noqa: PLC0415

    with tqdm(desc=spec.identifier, unit="way", disable=None) as bar, logging_redirect_tqdm():

        def announce(config: EngineConfig, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(str(config))
            bar.update()

        return ModelRunner(spec, settings).tune(seconds, announce)
