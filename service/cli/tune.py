"""`stackseg tune`: find the fastest engine for models on this machine."""

from __future__ import annotations

import argparse
import os
import sys

from service.cli.models import choose_model
from service.cli.options import MODEL_HELP, decimal
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter, ConfigError
from service.models.repository import read_repository


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg tune`."""
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--model", help=MODEL_HELP)
    selection.add_argument("--all", action="store_true", help="Tune all served models, one after the other")
    parser.add_argument(
        "--minutes",
        type=decimal,
        help="Time limit per model in minutes; no new measurement starts after this time (default: the setting"
        " engine.tune_seconds, converted to minutes)",
    )
    parser.add_argument("--device", help="Device: 'auto', 'cpu', 'cuda' or 'cuda:N' (default: the device.name setting)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Compare the engines for each model, store the fastest one for later startups, and print the results.

    Raises ConfigError.
    """
    # `stackseg serve`, for which the engines are compared, also sets this variable.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if options.minutes is not None and not options.minutes > 0:
        raise BadParameter("--minutes must be a positive number.")
    if options.device is not None:
        settings = override_settings(settings, "device", {"name": options.device, "serve": ()})
    kind = settings.engine.kind
    if kind != "auto":
        raise ConfigError(f"engine.kind is {kind}, so there is nothing to tune. Set engine.kind to auto.")
    specs = [choose_model(options.model, settings)]
    if options.all:
        specs = list(read_repository(settings.models.folder, settings.models.serve).values())
    max_seconds = settings.engine.tune_seconds if options.minutes is None else 60 * options.minutes
    from service.cli.benchmark.tuning import tune_models  # noqa: PLC0415

    for spec, plan in tune_models(specs, settings, max_seconds):
        sys.stdout.write(f"{spec.identifier}\n" + "".join(f"  {line}\n" for line in plan.format_lines()))
    return 0
