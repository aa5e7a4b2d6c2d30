"""Check the advice of low-confidence warnings.

    python -m scripts.recipes.advice [FOLDER] [--model NAME] [--embryos FOLDER] [--tissues FOLDER]

The stacks and requests are those of `scripts.recipes.calibration`, except noise and organoids. If a warning suggests a
parameter, the stack is segmented again with this parameter. The table lists F1 before and after. A stated diameter is
not corrected automatically.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from scripts.recipes.calibration_cases import Case, Folders, make_cases
from scripts.recipes.segmenters import start_segmenter
from service.core.quantities import parse_diameter
from service.core.types import Options, PostprocessingOptions
from service.inference.segment import segment
from service.inference.types import Result
from service.training.evaluate import score


class Outcome(NamedTuple):
    """F1 of a result with a warning, and F1 after following its advice."""

    case: str
    suggestion: str
    before: float
    after: float


SegmentCase = Callable[[Case, str | None, Options], Result]
"""Function that segments the stack of a case with a model, None for the model to check, and options."""


def follow_advice(cases: Iterable[Case], segment_case: SegmentCase) -> Iterator[Outcome]:
    """Segment the stacks; follow the advice of each warning."""
    for case in cases:
        if case.truth is None:
            continue
        options = Options(diameter=case.diameter, may_correct_diameter=False)
        result = segment_case(case, None, options)
        warning = result.quality_warning
        if warning is None or not warning.suggestion:
            continue
        followed = segment_case(case, *apply_suggestion(options, warning.suggested_parameters))
        before, after = (score(case.truth, each.segmentation.pixels).f1 for each in (result, followed))
        yield Outcome(f"{case.stack}, {case.condition}", warning.suggestion, before, after)


def apply_suggestion(options: Options, parameters: dict[str, str]) -> tuple[str | None, Options]:
    """Return the suggested model, None if it is the same, and the options with the suggested parameters."""
    model = parameters.get("model")
    if model is not None:
        # A diameter of nuclei says nothing about cells.
        options = replace(options, diameter=None)
    if "diameter" in parameters:
        options = replace(options, diameter=parse_diameter(parameters["diameter"]))
    if "min_confidence" in parameters:
        filters = PostprocessingOptions(min_confidence=float(parameters["min_confidence"]))
        options = replace(options, postprocessing=filters)
    return model, options


def report(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield the lines of the table, and how often F1 increased."""
    yield "| stack | advice | F1 before | after |\n|---|---|---|---|"
    increases = []
    for case, suggestion, before, after in outcomes:
        increases.append(after > before)
        yield f"| {case} | {suggestion} | {before:.2f} | {after:.2f} |"
    yield f"F1 increased in {sum(increases)} of {len(increases)} cases."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of recorded stacks")
    parser.add_argument("--model", default="nuclei", help="name or folder of the model")
    parser.add_argument("--embryos", type=Path, help="folder of BBBC050")
    parser.add_argument("--tissues", type=Path, help="folder of the stacks of `scripts.recipes.tissues`")
    arguments = parser.parse_args()
    folders = Folders(arguments.folder, arguments.embryos, arguments.tissues)
    runner = start_segmenter(arguments.model)
    start = functools.cache(start_segmenter)
    outcomes = follow_advice(
        make_cases(runner.spec.name, folders),
        lambda case, model, options: segment(start(model) if model else runner, case.volume, options),
    )
    for line in report(outcomes):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
