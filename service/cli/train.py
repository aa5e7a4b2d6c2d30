"""`stackseg train`: train a model on annotated stacks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from service.cli.models import choose_model
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.sections.computing import Training

# Options that override a setting in the section `training`, with their types and descriptions.
TRAINING_OPTIONS = (
    ("--steps", int, "Number of training steps"),
    ("--minutes", float, "Stop after this number of minutes, even if --steps has not been reached"),
    ("--learning-rate", float, "Maximum learning rate"),
    ("--batch-size", int, "Number of crops per step"),
    ("--edge", int, "Edge length of a crop in voxels"),
    ("--validation", float, "Fraction of every stack that is reserved for validation"),
    ("--patience", int, "Stop after this number of validations without improvement"),
    ("--workers", int, "Number of processes for augmentation; 0 uses a thread instead"),
    ("--seed", int, "Random seed; the same seed produces the same model"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg train`. The defaults are the settings under `training`."""
    parser.add_argument(
        "--images", type=Path, nargs="+", required=True, help="Stacks to train on, each with a single channel"
    )
    parser.add_argument(
        "--labels", type=Path, nargs="+", required=True, help="Ground-truth labels for --images, in the same order"
    )
    parser.add_argument("--out", type=Path, help="Folder for the new model, for example models/mine")
    parser.add_argument("--from", dest="base", metavar="MODEL", help="Name or folder of the model to start from")
    defaults = Training()
    for option, value_type, description in TRAINING_OPTIONS:
        default = getattr(defaults, option.removeprefix("--").replace("-", "_"))
        parser.add_argument(
            option, type=value_type, help=f"{description} (default: {'none' if default is None else default})"
        )
    parser.add_argument("--resume", action="store_true", help="Resume from the checkpoint in --out")
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="Only measure the speed of training steps, with and without mixed precision",
    )
    parser.set_defaults(run=run, extra="train")


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Train a model and write its folder, or measure the speed of training steps. Requires the `train` extra."""
    overrides = {name: value for name in Training.model_fields if (value := getattr(options, name, None)) is not None}
    settings = override_settings(settings, "training", overrides)
    base_spec = None if options.base is None else choose_model(options.base, settings)
    training_files = (options.images, options.labels)
    if options.benchmark:
        from service.training.throughput import HEADER, measure_steps  # noqa: PLC0415

        rows = [cost.format_row() for cost in measure_steps(training_files, settings, base_spec)]
        sys.stdout.write("\n".join([HEADER, *rows]) + "\n")
        return 0
    if options.out is None:
        raise BadParameter("--out is missing. Set it to a folder for the new model, for example models/mine.")
    from service.training.from_files import train_model  # noqa: PLC0415

    spec, state = train_model(training_files, options.out, settings, base=base_spec, resume=options.resume)
    sys.stdout.write(f"{options.out}: {spec.identifier}, {state.summarize()}\n")
    failure = state.describe_failure()
    if failure is not None:
        sys.stderr.write(f"stackseg: warning: {failure}\n")
    return 0
