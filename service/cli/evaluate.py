"""`stackseg evaluate` scores a model on annotated stacks, beside a classical method."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.models import choose_model
from service.core.config import Settings
from service.core.errors import BadParameter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from service.core.types import Volume


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
    from service.inference.runner.model_runner import ModelRunner  # noqa: PLC0415
    from service.training.evaluate import HEADER, format_row, score_classical, score_model, stack_name  # noqa: PLC0415

    pairs = _list_pairs(options)
    runner = ModelRunner(choose_model(options.model, settings), settings)
    if runner.spec.decoding.kind != "instances":
        raise BadParameter(f"{runner.spec.name} tells classes apart, not objects, so there is nothing to match.")
    runner.warm_up()
    results: list[dict[str, Any]] = []
    for path, truth_path in pairs:
        volume, pixels = _read(path, truth_path, options.channel, settings)
        stack = stack_name(path)
        methods = [partial(score_model, runner, volume, pixels, diameter) for diameter in options.diameter or [None]]
        if not options.no_floor:
            methods.append(partial(score_classical, volume, pixels))
        for score in methods:
            line = score()
            if not results and not options.json:
                sys.stdout.write(HEADER + "\n")
            results.append({"stack": stack, "method": line.method, "diameter": line.diameter, **line.scores._asdict()})
            if not options.json:
                sys.stdout.write(format_row(stack, line) + "\n")
                sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return 0


def _list_pairs(options: argparse.Namespace) -> list[tuple[Path, Path]]:
    """Return the files of stacks, each with that of its labels. Raises BadParameter."""
    images = [*options.images, *(folder / "image.tif" for folder in options.folders)]
    labels = [*options.labels, *(folder / "mask.tif" for folder in options.folders)]
    if len(images) != len(labels) or not images:
        raise BadParameter(f"Every image needs its labels: there are {len(images)} images and {len(labels)} labels.")
    return list(zip(images, labels, strict=True))


def _read(image: Path, labels: Path, channel: str | None, settings: Settings) -> tuple[Volume, NDArray[Any]]:
    """Read one channel of a stack, and its labels [Z, Y, X]. Raises BadFile, and BadParameter for unequal shapes."""
    from service.core.quantities import is_index  # noqa: PLC0415
    from service.core.types import Selection  # noqa: PLC0415
    from service.formats import stack_reader  # noqa: PLC0415

    selected = int(channel) if channel and is_index(channel) else channel
    limit = settings.limits.decoded_bytes
    volume = stack_reader.read(image, Selection(channel=selected), limit)
    truth = stack_reader.read(labels, Selection(), limit)
    if truth.shape != (1, *volume.shape[1:]):
        raise BadParameter(f"{image} and {labels} differ in shape: {volume.shape[1:]} and {truth.shape}.")
    return volume, truth.array()[0]
