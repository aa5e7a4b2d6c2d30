"""Count results without a warning on stacks that no confidence was fitted to: `python -m scripts.recipes.doubts`.

Stacks of what the model is for, of what it is not for, and textures in which nothing is to be found, are told nothing
but a voxel size where they have one. The table says, for several thresholds of the confidence, how many good results
come with a warning, and how many wrong ones without. Widths are tried where the model's own threshold says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from scripts.recipes.confidence import kind_of, noise
from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.trials import stacks_for
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.evaluate import score

THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
# Beside those that `scripts.recipes.confidence` fits to, and those of `scripts.recipes.trials`.
FIRST_TEXTURE, TEXTURES = 600, 8


class Judged(NamedTuple):
    """A result: `kind` is good, bad, fair, foreign or texture; the confidence is None where nothing was found."""

    kind: str
    confidence: float | None


def known(model: str, count: int) -> Iterator[tuple[Volume, NDArray[Any]]]:
    """Yield stacks [1, Z, Y, X] of what a model is for, with labels [Z, Y, X]; `count` of each kind."""
    return ((volume, truth) for kind, volume, truth in stacks_for(model, count) if kind != "noise")


def collect(runner: ModelRunner, count: int) -> Iterator[Judged]:
    """Segment stacks of every kind."""
    model = runner.spec.name
    for volume, truth in known(model, count):
        result = segment(runner, volume, Options())
        yield Judged(kind_of(score(truth, result.segmentation.pixels).f1), result.confidence)
    for volume, _ in known("nuclei" if model == "membranes" else "membranes", count):
        yield Judged("foreign", segment(runner, volume, Options()).confidence)
    for seed in range(FIRST_TEXTURE, FIRST_TEXTURE + TEXTURES * count):
        yield Judged("texture", segment(runner, noise(seed).volume, Options()).confidence)


def report(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield the lines of the table, one for each threshold."""
    found = {kind: [each for each in judged if each.kind == kind] for kind in ("good", "bad", "foreign", "texture")}
    yield "| threshold | good, with a warning | bad, without | of other objects, without | textures, without |"
    yield "|---|" + 4 * "---|"
    for threshold in THRESHOLDS:
        sure = {
            kind: sum(each.confidence is not None and each.confidence >= threshold for each in results)
            for kind, results in found.items()
        }
        sure["good"] = len(found["good"]) - sure["good"]
        cells = (f"{number} of {len(found[kind])}" for kind, number in sure.items())
        yield f"| {threshold:g} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nuclei", help="name or folder")
    parser.add_argument("--stacks", type=int, default=12, help="of each kind, and eight times as many textures")
    chosen = parser.parse_args()
    runner = start_segmenter(chosen.model)
    sys.stdout.writelines(f"{line}\n" for line in report(list(collect(runner, chosen.stacks))))


if __name__ == "__main__":
    main()
