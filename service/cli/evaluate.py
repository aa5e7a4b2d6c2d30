"""`stackseg evaluate`: score a model on annotated stacks and compare it with a classical method."""

from __future__ import annotations

import argparse

from service.cli.options import MODEL_HELP, add_annotated_stacks, add_unknown_voxels
from service.core.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg evaluate`."""
    add_annotated_stacks(parser, "Stacks to segment")
    add_unknown_voxels(parser)
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--channel", help="Name or zero-based index of the channel, if there are several channels")
    parser.add_argument(
        "--diameter",
        nargs="+",
        default=[],
        help="Object diameters to evaluate, one output row each. Each is a value that POST /segment accepts, 'mean'"
        " (the mean diameter of the annotated objects), or 'extents' (the median extents of the annotated objects)",
    )
    parser.add_argument(
        "--no-floor",
        action="store_true",
        help="Skip the classical method, which is the baseline for the model's scores and can be slow",
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON array with one entry per stack and method")
    parser.set_defaults(run=run, extra="train")


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Print a table of scores, row by row. Requires the `train` extra."""
    from service.cli.benchmark import scores  # noqa: PLC0415

    scores.run(options, settings)
    return 0
