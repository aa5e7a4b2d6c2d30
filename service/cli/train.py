"""`stackseg train` makes a model folder from annotated stacks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from service.cli.models import choose_model
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.sections.computing import Training


def add_arguments(train: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg train`; those that are not given are taken from `training` in the configuration."""
    train.add_argument("--images", type=Path, nargs="+", required=True, help="stacks of one channel")
    train.add_argument("--labels", type=Path, nargs="+", required=True, help="their labels, in the same order")
    train.add_argument("--out", type=Path, help="model folder to make, such as models/mine")
    train.add_argument("--from", dest="base", metavar="MODEL", help="name of a model to start from, or its folder")
    train.add_argument("--steps", type=int, help="updates of the weights")
    train.add_argument("--minutes", type=float, help="stop after so many minutes, whatever --steps says")
    train.add_argument("--learning-rate", type=float, help="at its highest")
    train.add_argument("--batch-size", type=int, help="crops per step")
    train.add_argument("--edge", type=int, help="edge of a crop in voxels")
    train.add_argument("--validation", type=float, help="share of every stack that is not trained on")
    train.add_argument("--patience", type=int, help="validations without progress after which to stop")
    train.add_argument("--workers", type=int, help="processes that augment; 0: one thread")
    train.add_argument("--seed", type=int, help="the same seed gives the same model")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    train.add_argument("--benchmark", action="store_true", help="only measure steps, with and without mixed precision")
    train.set_defaults(run=run, extra="train")


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Train and write the model folder, or measure steps. Needs the extra `train`."""
    given = {name: value for name in Training.model_fields if (value := getattr(options, name, None)) is not None}
    settings = override_settings(settings, "training", given)
    base = None if options.base is None else choose_model(options.base, settings)
    pairs = (options.images, options.labels)
    if options.benchmark:
        from service.training.throughput import HEADER, measure_steps  # noqa: PLC0415

        rows = [cost.row() for cost in measure_steps(pairs, settings, base)]
        sys.stdout.write("\n".join([HEADER, *rows]) + "\n")
        return 0
    if options.out is None:
        raise BadParameter("--out: say which model folder to make, such as models/mine.")
    from service.training.from_files import train_model  # noqa: PLC0415

    spec, state = train_model(pairs, options.out, settings, base=base, resume=options.resume)
    sys.stdout.write(f"{options.out}: {spec.identifier}, {state.summarise()}\n")
    failure = state.describe_failure()
    if failure is not None:
        sys.stderr.write(f"stackseg: warning: {failure}\n")
    return 0
