"""`stackseg train`: a model folder of one's own from annotated stacks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from service.config import Settings
from service.errors import BadParameter
from service.repository import read_spec


def add_arguments(train: argparse.ArgumentParser) -> None:
    """The grammar behind `stackseg train`."""
    train.add_argument("--images", type=Path, nargs="+", required=True, help="stacks of one channel")
    train.add_argument("--labels", type=Path, nargs="+", required=True, help="their labels, in the same order")
    train.add_argument("--out", type=Path, required=True, help="model folder to make, such as models/mine")
    train.add_argument("--from", dest="base", type=Path, metavar="FOLDER", help="model folder to start from")
    train.add_argument("--steps", type=int, default=600, help="updates of the weights (default %(default)s)")
    train.add_argument("--minutes", type=float, help="stop after so many minutes, whatever --steps says")
    train.add_argument("--learning-rate", type=float, default=1e-3, help="at its highest (default %(default)s)")
    train.add_argument("--batch-size", type=int, default=4, help="crops per step (default %(default)s)")
    train.add_argument("--edge", type=int, default=48, help="edge of a crop in voxels (default %(default)s)")
    train.add_argument("--validation", type=float, default=0.2, help="share of every stack (default %(default)s)")
    train.add_argument("--patience", type=int, default=8, help="validations without progress (default %(default)s)")
    train.add_argument("--seed", type=int, default=1, help="the same seed gives the same model (default %(default)s)")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    train.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Train and write the model folder. Needs the extra `train`."""
    from service.training.finetune import Plan  # noqa: PLC0415
    from service.training.model import train_model  # noqa: PLC0415

    if not 0.05 <= options.validation <= 0.5:
        raise BadParameter("--validation: a share between 0.05 and 0.5 is expected.")
    for name in ("steps", "batch_size", "edge", "patience"):
        if getattr(options, name) < 1:
            raise BadParameter(f"--{name.replace('_', '-')}: a positive number is expected.")
    base = None if options.base is None else read_spec(options.base)
    plan = Plan(
        steps=options.steps,
        learning_rate=options.learning_rate,
        minutes=options.minutes,
        batch_size=options.batch_size,
        edge=options.edge,
        patience=options.patience,
        seed=options.seed,
    )
    pairs = (options.images, options.labels)
    spec, state = train_model(
        pairs, options.out, plan, settings, base=base, share=options.validation, resume=options.resume
    )
    skipped = f", {state.skipped} steps skipped for a loss that was not finite" if state.skipped else ""
    sys.stdout.write(
        f"{options.out}: {spec.identifier}, {state.step} steps, best validation {state.best:.4f}{skipped}\n"
    )
    return 0
