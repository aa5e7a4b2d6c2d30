"""Run `stackseg train`: read the annotated stacks, train, and print the result."""

from __future__ import annotations

import argparse
import sys

from service.cli.model_packages.annotated_files import list_pairs
from service.cli.models import choose_model
from service.cli.segmentation.parameters import use_option_names
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.quantities import VoxelSize, parse_diameter, parse_index_or_name, parse_voxel_size
from service.core.sections.computing import Training
from service.core.types import Selection
from service.models.spec import ModelSpec, get_target
from service.training.fine_tune import MAX_STEPS, FineTuningTask, check_output_folder, fine_tune
from service.training.stacks.annotated_stack import (
    AnnotatedStack,
    LabelOptions,
    StackFiles,
    name_stack,
    read_stack,
)
from service.training.throughput import HEADER, measure_steps

# Exit status if the new model is not better than the base model.
NOT_BETTER_STATUS = 3


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Train a model and write its folder, or measure the speed of training steps. Return the exit status."""
    settings = _override_training(options, settings)
    base = None if options.base is None else choose_model(options.base, settings)
    if options.benchmark:
        costs = measure_steps(_read_stacks(options, base), settings, base, options.target)
        rows = [cost.format_row() for cost in costs]
        sys.stdout.write("\n".join([HEADER, *rows]) + "\n")
        return 0
    if options.out is None:
        raise BadParameter("--out is missing. Set it to a folder for the new model, for example models/mine.")
    check_output_folder(options.out, resumes=options.resume)
    task = FineTuningTask(
        base,
        options.out,
        settings,
        lambda _progress: None,
        is_private=False,
        target=options.target,
        keeps_worse=options.keep,
        resumes=options.resume,
    )
    result = fine_tune(_read_stacks(options, base), task)
    message = use_option_names(result.message)
    if result.spec is None:
        sys.stderr.write(f"stackseg: {message}\n")
        return NOT_BETTER_STATUS
    sys.stdout.write(f"{message}\n{options.out}: {result.spec.identifier}, {result.summary}\n")
    return 0


def _override_training(options: argparse.Namespace, settings: Settings) -> Settings:
    """Return the settings with the options for training. If only the time is given, it determines the steps."""
    overrides = {name: value for name in Training.model_fields if (value := getattr(options, name, None)) is not None}
    if options.minutes is not None and options.steps is None:
        overrides["steps"] = MAX_STEPS
    return override_settings(settings, "training", overrides)


def _read_stacks(options: argparse.Namespace, base: ModelSpec | None) -> list[AnnotatedStack]:
    """Read the annotated stacks. Raises BadFile and BadParameter."""
    selection = Selection(
        channel=parse_index_or_name(options.channel),
        axes=options.axes,
        voxel_size=None if options.voxel_size is None else _parse_voxel_size(options.voxel_size),
    )
    label_options = _make_label_options(options, base)
    return [
        read_stack(StackFiles(name_stack(image), image, label_file, selection=selection), label_options)
        for image, label_file in list_pairs(options)
    ]


def _make_label_options(options: argparse.Namespace, base: ModelSpec | None) -> LabelOptions:
    diameter = parse_diameter(options.diameter or "auto")
    target = options.target or ("instances" if base is None else get_target(base))
    if target != "instances" and options.diameter not in {None, "none"}:
        raise BadParameter(f"--diameter cannot be used with --target {target}, which uses the original resolution.")
    has_diameter = target == "instances" and diameter != "none" and (base is None or base.input.diameter is not None)
    return LabelOptions(
        None if isinstance(diameter, str) else diameter,
        has_diameter,
        options.ignore_label,
        options.partial,
        options.partial_planes,
    )


def _parse_voxel_size(text: str) -> VoxelSize:
    try:
        return parse_voxel_size(text)
    except BadParameter as error:
        raise BadParameter(f"--voxel-size: {error}.") from error
