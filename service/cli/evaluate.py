"""`stackseg evaluate` scores a model on annotated stacks, beside a classical method."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.core.config import Settings


def add_arguments(evaluate: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg evaluate`."""
    evaluate.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="with image.tif and mask.tif")
    evaluate.add_argument("--images", type=Path, nargs="+", default=[], help="stacks")
    evaluate.add_argument("--labels", type=Path, nargs="+", default=[], help="their labels, in the same order")
    evaluate.add_argument("--model", help="name of a model, or its folder; the default model if not given")
    evaluate.add_argument("--channel", help="index or name, where the stacks have several")
    evaluate.add_argument(
        "--diameter",
        nargs="+",
        default=[],
        help="each gives a line per stack: as the parameter of POST /segment, mean or extents of the annotated objects",
    )
    evaluate.add_argument("--no-floor", action="store_true", help="without the classical method, which takes its time")
    evaluate.add_argument("--json", action="store_true", help="one object per stack and method")
    evaluate.set_defaults(run=run, extra="train")


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Print the table line by line. Needs the extra `train`."""
    from service.cli.benchmark import scores  # noqa: PLC0415

    scores.run(options, settings)
    return 0
