"""Score a model on annotated stacks and compare it with a classical method, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from service.cli.model_packages.annotated_files import list_pairs
from service.cli.models import choose_model
from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.quantities import is_index
from service.core.types import Selection, Volume
from service.formats import stack_reader
from service.inference.runner.model_runner import ModelRunner
from service.training.evaluate import HEADER, ScoreRow, format_row, get_stack_name, score_classical, score_model
from service.training.stacks.annotated_stack import LabelOptions, convert_labels, separate_unknown_voxels


def run(options: argparse.Namespace, settings: Settings) -> None:
    """Print the scores of each stack, row by row, or all at the end if the output is JSON. Raises BadParameter."""
    results: list[dict[str, Any]] = []
    for stack, row in _score_all(options, settings):
        if not results and not options.json:
            sys.stdout.write(HEADER + "\n")
        results.append({"stack": stack, "method": row.method, "diameter": row.diameter, **row.scores._asdict()})
        if not options.json:
            sys.stdout.write(format_row(stack, row) + "\n")
            sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")


def _score_all(options: argparse.Namespace, settings: Settings) -> Iterator[tuple[str, ScoreRow]]:
    """Yield the scores of each method on each stack."""
    _check_diameters(options)
    pairs = list_pairs(options)
    label_options = LabelOptions(ignored=options.ignore_label, has_partial_planes=options.partial_planes)
    runner = ModelRunner(choose_model(options.model, settings), settings)
    if not runner.spec.has_objects:
        raise BadParameter(f"{runner.spec.name} segments classes, not objects. Choose a model that separates objects.")
    runner.warm_up()
    for path, truth_path in pairs:
        volume, labels = _read_pair(path, truth_path, options.channel, settings)
        truth, mask = separate_unknown_voxels(labels, label_options)
        unknown = mask if mask.any() else None
        score_functions: list[Callable[[], ScoreRow]] = [
            partial(score_model, runner, volume, truth, diameter, unknown) for diameter in options.diameter or [None]
        ]
        # The classical method gets a diameter that is measured on whole objects.
        if not (options.no_floor or options.partial_planes):
            score_functions.append(partial(score_classical, volume, truth, unknown))
        yield from ((get_stack_name(path), score()) for score in score_functions)


def _check_diameters(options: argparse.Namespace) -> None:
    if options.partial_planes and {"mean", "extents"} & set(options.diameter):
        raise BadParameter(
            "--diameter mean and extents measure whole objects, so they cannot be combined with --partial-planes."
            " Specify the diameter along z, y and x, such as 7,15,15px."
        )


def _read_pair(image: Path, labels: Path, channel: str | None, settings: Settings) -> tuple[Volume, NDArray[Any]]:
    """Read one channel of a stack, and its labels [Z, Y, X].

    Raises BadFile, and BadParameter if the shapes differ or the labels are not whole numbers from 0.
    """
    channel_selection = int(channel) if channel and is_index(channel) else channel
    limit_bytes = settings.limits.decoded_bytes
    volume = stack_reader.read(image, Selection(channel=channel_selection), limit_bytes)
    truth = stack_reader.read(labels, Selection(is_labels=True), limit_bytes)
    if truth.shape != (1, *volume.shape[1:]):
        raise BadParameter(
            f"{image} and {labels} must have the same shape, but have {volume.shape[1:]} and {truth.shape}."
        )
    return volume, convert_labels(truth.read_all()[0], get_stack_name(labels))
