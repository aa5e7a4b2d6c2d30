"""`stackseg train`: train a model on annotated stacks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from service.cli.options import add_annotated_stacks, add_unknown_voxels, decimal, integer
from service.cli.segmentation.parameters import use_option_names
from service.core.config import Settings
from service.core.errors import StackSegError
from service.core.sections.computing import Training
from service.models.spec import TargetName

# Options that override a setting in the section `training`, with their types and descriptions.
TRAINING_OPTIONS = (
    ("--steps", integer, "Number of training steps"),
    ("--minutes", decimal, "Train for this number of minutes, including preparation and scoring, instead of --steps"),
    ("--learning-rate", decimal, "Maximum learning rate"),
    ("--batch-size", integer, "Number of crops per step"),
    ("--edge", integer, "Edge length of a crop in voxels"),
    ("--validation", decimal, "Fraction of every stack that is reserved for validation"),
    ("--patience", integer, "Stop after this number of validations without improvement"),
    ("--workers", integer, "Number of processes for augmentation; 0 uses a thread instead"),
    ("--seed", integer, "Random seed; the same seed produces the same model"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stackseg train`. The defaults are the settings under `training`."""
    _add_stack_options(parser)
    parser.add_argument("--out", type=Path, help="Folder for the new model, for example models/mine")
    parser.add_argument("--from", dest="base", metavar="MODEL", help="Name or folder of the model to start from")
    parser.add_argument(
        "--target",
        choices=get_args(TargetName),
        help="What the model learns: 'instances' for objects on a background, 'boundaries' for objects that fill the"
        " stack, such as cells in a tissue, or 'affinities' for boundaries with gaps, such as those in electron"
        " microscopy (default: the same as the model of --from, or 'instances')",
    )
    defaults = Training().model_dump() | {"learning_rate": "0.001, or 0.003 without a base model"}
    for option, value_type, description in TRAINING_OPTIONS:
        default = defaults[option.removeprefix("--").replace("-", "_")]
        parser.add_argument(
            option, type=value_type, help=f"{description} (default: {'none' if default is None else default})"
        )
    parser.add_argument("--resume", action="store_true", help="Resume from the checkpoint in --out")
    parser.add_argument(
        "--keep", action="store_true", help="Keep the new model even if it is not better than the model of --from"
    )
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="Only measure the speed of training steps, with and without mixed precision",
    )
    parser.set_defaults(run=run, reword=use_training_options, extra="train")


def _add_stack_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the annotated stacks."""
    add_annotated_stacks(parser, "Stacks to train on")
    parser.add_argument("--channel", help="Name or zero-based index of the channel, if there are several channels")
    parser.add_argument(
        "--axes",
        help="Axes of the stored arrays, one letter of TZCYXS per dimension (default: the axes in the metadata)",
    )
    parser.add_argument(
        "--voxel-size",
        metavar="Z,Y,X",
        help="Voxel size in micrometers, for example 0.5,0.2,0.2 (default: the voxel size in the metadata)",
    )
    add_unknown_voxels(parser)
    parser.add_argument(
        "--partial",
        action="store_true",
        help="Only some objects are annotated: voxels without a label are unknown, except in a rim around the objects",
    )
    parser.add_argument(
        "--diameter",
        help="Object diameter, for example 15px, 6.5um, or 7,15,15px along z, y, x; 'auto' measures it on the"
        " annotated objects, and 'none' trains at the original resolution (default: 'auto')",
    )


def use_training_options(message: str | StackSegError) -> str:
    """Replace request parameters in a message with the options of this command."""
    return use_option_names(message).replace("target=", "--target ")


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Train a model and write its folder, or measure the speed of training steps. Requires the `train` extra."""
    from service.cli.model_packages import train_model  # noqa: PLC0415 - its imports take several seconds

    return train_model.run(options, settings)
