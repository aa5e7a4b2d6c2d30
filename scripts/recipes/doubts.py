"""Count missed and false confidence warnings on stacks that the confidence was not fitted to.

    python -m scripts.recipes.doubts

The stacks contain objects of the model, objects of another model, or texture without objects. The requests specify no
object diameter. The table lists, for several confidence thresholds, how many good results have a warning, and how many
wrong results do not. Diameter trials still use the threshold of the model itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from scripts.recipes.confidence import classify_f1, make_noise
from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.trials import make_stacks
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.evaluate import score

THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
# First seed of the textures. `scripts.recipes.confidence` and `scripts.recipes.trials` use smaller seeds.
FIRST_TEXTURE_SEED = 600
# Number of textures per stack of each kind.
TEXTURES_PER_STACK = 8


class Result(NamedTuple):
    """A segmentation: `kind` is good, bad, fair, foreign or texture. The confidence is None if there are no objects."""

    kind: str
    confidence: float | None


def make_object_stacks(model: str, count: int) -> Iterator[tuple[Volume, NDArray[Any]]]:
    """Yield stacks [1, Z, Y, X] of objects of a model with their labels [Z, Y, X]; `count` stacks of each kind."""
    return ((volume, truth) for kind, volume, truth in make_stacks(model, count) if kind != "noise")


def collect_results(runner: ModelRunner, count: int) -> Iterator[Result]:
    """Segment stacks of all kinds."""
    model = runner.spec.name
    for volume, truth in make_object_stacks(model, count):
        result = segment(runner, volume, Options())
        yield Result(classify_f1(score(truth, result.segmentation.pixels).f1), result.confidence)
    for volume, _ in make_object_stacks("nuclei" if model == "membranes" else "membranes", count):
        yield Result("foreign", segment(runner, volume, Options()).confidence)
    for seed in range(FIRST_TEXTURE_SEED, FIRST_TEXTURE_SEED + TEXTURES_PER_STACK * count):
        yield Result("texture", segment(runner, make_noise(seed).volume, Options()).confidence)


def report(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the table, one for each threshold."""
    by_kind = {
        kind: [result for result in results if result.kind == kind] for kind in ("good", "bad", "foreign", "texture")
    }
    yield (
        "| threshold | good results with a warning | bad results without a warning "
        "| objects of another model without a warning | textures without a warning |"
    )
    yield "|---|" + 4 * "---|"
    for threshold in THRESHOLDS:
        counts = {
            kind: sum(result.confidence is not None and result.confidence >= threshold for result in members)
            for kind, members in by_kind.items()
        }
        counts["good"] = len(by_kind["good"]) - counts["good"]
        cells = (f"{number} of {len(by_kind[kind])}" for kind, number in counts.items())
        yield f"| {threshold:g} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nuclei", help="name or folder of the model")
    parser.add_argument(
        "--stacks", type=int, default=12, help="number of stacks of each kind; there are eight times as many textures"
    )
    arguments = parser.parse_args()
    runner = start_segmenter(arguments.model)
    sys.stdout.writelines(f"{line}\n" for line in report(list(collect_results(runner, arguments.stacks))))


if __name__ == "__main__":
    main()
