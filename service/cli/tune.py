"""`stackseg tune` finds the fastest way to run models on this machine."""

from __future__ import annotations

import argparse
import os
import sys

from service.cli.models import choose_model
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter, ConfigError
from service.models.repository import read_repository


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
    from service.cli.benchmark.tuning import tune_models  # noqa: PLC0415

    for spec, plan in tune_models(specs, settings, seconds):
        sys.stdout.write(f"{spec.identifier}\n" + "".join(f"  {line}\n" for line in plan.lines()))
    return 0
