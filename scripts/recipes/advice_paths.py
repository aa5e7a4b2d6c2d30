"""Follow the advice of the web UI on recorded stacks: `python -m scripts.recipes.advice_paths FOLDER [--grid]`.

Starts with the default model and follows advice as the web UI gives it, for at most three steps:

- the suggestion of the low-confidence warning, unless it was tried;
- otherwise, if the confidence is still low, a comparison of all models on a part of the stack, without models whose
  results of the whole stack have low confidence;
- finally, the result with the highest confidence.

With `--grid`, the stacks are also segmented with all models that find objects, at several diameters in voxels. The last
row of a stack is then its best result.

The score is F1. Stacks without a ground truth are scored by their spots: F1 of the centers of objects that lie within
half a cell of a spot.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import center_of_mass, gaussian_laplace, maximum_filter
from scipy.optimize import linear_sum_assignment

from scripts.recipes.advice import apply_suggestion
from scripts.recipes.scores import MAX_PIXEL_BYTES, find_spots
from scripts.recipes.segmenters import start_segmenter
from service.core.quantities import parse_diameter
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.evaluate import score

MAX_STEPS = 3
MODELS = ("nuclei", "embryos", "membranes")
# Maximum size of the part on which the web UI tries models (MAX_CROP_VOXELS in gallery/crop.js).
MAX_PART_VOXELS = 4_000_000
# Minimum difference of log odds for which the web UI recommends another result (MIN_LOG_ODDS_DIFFERENCE in advice.js).
MIN_LOG_ODDS_DIFFERENCE = 0.5
# Diameters whose ratio is at most this factor are the same (MAX_DIAMETER_RATIO in advice.js).
MAX_DIAMETER_RATIO = 1.1
# Cells of the brain: standard deviations of the Laplacian of a Gaussian in voxels, its threshold in standard deviations
# of the response, and the gray value above which a voxel belongs to the tissue.
CELL_SIGMA = (1.0, 2.5, 2.5)
CELL_THRESHOLD = 8.0
MIN_TISSUE_GRAY_VALUE = 100

Scorer = Callable[[NDArray[Any]], float]
"""Function that scores labels [Z, Y, X]."""


class RecordedStack(NamedTuple):
    """A recorded stack. The diameters in voxels are those of the grid."""

    selection: Selection
    diameters: tuple[str, ...]


STACKS = {
    "mouse_brain_s2p_large": RecordedStack(Selection(), ("none", "14px", "20px", "30px")),
    "mesospim_brain_nuclei_c5": RecordedStack(Selection(axes="ZYX"), ("none", "5px", "6px", "7px", "9px")),
    "celegans_membrane_t046": RecordedStack(Selection(), ("none", "40px", "50px", "60px", "70px", "80px")),
}


class Step(NamedTuple):
    """One result: model, options, advice that led to it, labels [Z, Y, X], and the suggestion of its warning."""

    model: str
    options: Options
    advice: str
    labels: NDArray[Any]
    confidence: float
    diameter: str
    suggestion: dict[str, str]
    has_warning: bool


def find_cells(image: NDArray[Any]) -> NDArray[np.intp]:
    """Return the positions [cells, 3] of bright cells in serial-section images [Z, Y, X] of a brain, in voxels."""
    response = -gaussian_laplace(image.astype(np.float32), CELL_SIGMA)
    tissue = response[image > MIN_TISSUE_GRAY_VALUE]
    median = np.median(tissue)
    level = median + CELL_THRESHOLD * 1.4826 * np.median(np.abs(tissue - median))
    return np.argwhere((response == maximum_filter(response, size=(3, 7, 7))) & (response > level))


def score_centers(labels: NDArray[Any], spots: NDArray[np.intp], spacing: Sequence[float], radius: float) -> float:
    """Return F1 of the centers of objects that are matched with spots [N, 3] within `radius`."""
    ids = np.unique(labels[labels > 0])
    if not len(ids) or not len(spots):
        return 0.0
    centers = np.array(center_of_mass(labels > 0, labels, ids)) * spacing
    distances = np.linalg.norm(centers[:, None] - (spots * np.array(spacing))[None], axis=2)
    far = 2 * distances.max() + 1
    costs = np.where(distances <= radius, distances, far)
    matches = int((costs[linear_sum_assignment(costs)] < far).sum())
    return 2 * matches / (len(ids) + len(spots))


def make_scorer(folder: Path, image: NDArray[Any]) -> Scorer:
    """Return the function that scores the labels of a stack [Z, Y, X]."""
    if (mask := folder / "mask.tif").exists():
        truth = stack_reader.read(mask, Selection(axes="ZYX"), MAX_PIXEL_BYTES).read_all()[0]
        return lambda labels: score(truth, labels).f1
    if folder.name == "mouse_brain_s2p_large":
        cells = find_cells(image)
        return lambda labels: score_centers(labels, cells, (5.0, 2.0, 2.0), 12.0)
    spots = find_spots(image)
    return lambda labels: score_centers(labels, spots, (1.0, 1.0, 1.0), 3.5)


class AdvicePath(NamedTuple):
    """The steps of a path, and the step whose result the web UI recommends."""

    steps: list[Step]
    final: Step


def follow_advice(runners: dict[str, ModelRunner], volume: Volume) -> AdvicePath:
    """Follow the advice of the web UI from the default model."""
    steps = [run(runners, volume, "nuclei", Options(), "default")]
    while len(steps) <= MAX_STEPS:
        last = steps[-1]
        if not last.has_warning:
            break
        model, options = apply_suggestion(last.options, last.suggestion)
        model = model or last.model
        if last.suggestion and not any(is_tried(step, last, last.suggestion) for step in steps):
            advice = ", ".join(f"{name}={value}" for name, value in last.suggestion.items())
        else:
            confidences = compare_models(runners, volume)
            # The web UI does not mark models whose results of the whole stack have low confidence.
            doubted = {step.model for step in steps} - {step.model for step in steps if not step.has_warning}
            candidates = [name for name in confidences if name not in doubted] or list(confidences)
            model, options = max(candidates, key=lambda name: confidences[name]), Options()
            advice = "compare: " + ", ".join(f"{name} {value:.2f}" for name, value in confidences.items())
            if any(step.model == model for step in steps):
                break
        steps.append(run(runners, volume, model, options, advice))
    best = max(steps, key=lambda step: step.confidence)
    difference = compute_log_odds(best.confidence) - compute_log_odds(steps[-1].confidence)
    return AdvicePath(steps, best if difference >= MIN_LOG_ODDS_DIFFERENCE else steps[-1])


def run(runners: dict[str, ModelRunner], volume: Volume, model: str, options: Options, advice: str) -> Step:
    """Segment a stack."""
    result = segment(runners[model], volume, options)
    warning = result.quality_warning
    suggestion = {} if warning is None else warning.suggested_parameters
    labels, confidence = result.segmentation.pixels, result.confidence or 0.0
    diameter = result.diameter_text or ""
    return Step(model, options, advice, labels, confidence, diameter, suggestion, warning is not None)


def is_tried(step: Step, last: Step, suggestion: dict[str, str]) -> bool:
    """Return whether a step already followed a suggestion of the last step."""
    if "model" in suggestion:
        return step.model == suggestion["model"]
    if "diameter" not in suggestion or step.model != last.model:
        return False
    used, wanted = (_parse_lengths(text) for text in (step.diameter, suggestion["diameter"]))
    return bool(used and wanted) and abs(math.log(used / wanted)) <= math.log(MAX_DIAMETER_RATIO)


def _parse_lengths(text: str) -> float:
    """Return the geometric mean of the lengths in a text such as `6,15,15px; estimated`; 0 if there are none."""
    lengths = [float(length) for length in text.partition("px")[0].split(",")] if "px" in text else []
    return math.prod(lengths) ** (1 / len(lengths)) if lengths else 0.0


def compare_models(runners: dict[str, ModelRunner], volume: Volume) -> dict[str, float]:
    """Return the confidence of each model in its result for the middle part of a stack."""
    edge = max(volume.shape[1:])
    while math.prod(min(length, edge) for length in volume.shape[1:]) > MAX_PART_VOXELS:
        edge -= 1
    z, y, x = (
        slice((length - min(length, edge)) // 2, (length + min(length, edge)) // 2) for length in volume.shape[1:]
    )
    part = Volume.from_array(np.ascontiguousarray(volume.read_all()[:, z, y, x]), volume.voxel_size)
    return {name: segment(runner, part, Options()).confidence or 0.0 for name, runner in runners.items()}


def compute_log_odds(confidence: float) -> float:
    """Return the log odds of a confidence."""
    clipped = min(max(confidence, 1e-4), 1 - 1e-4)
    return math.log(clipped / (1 - clipped))


def report(folder: Path, names: Sequence[str], *, with_grid: bool) -> Iterator[str]:
    """Yield the lines of the table."""
    runners = {name: start_segmenter(name) for name in MODELS}
    yield "| stack | step | model | diameter | confidence | score |\n|---|---|---|---|---|---|"
    for name in names:
        recorded, path = STACKS[name], folder / name
        volume = stack_reader.read(path / "image.tif", recorded.selection, MAX_PIXEL_BYTES)
        compute_score = make_scorer(path, volume.read_all()[0])
        steps, final = follow_advice(runners, volume)
        scored = [(step, compute_score(step.labels)) for step in steps]
        for step, value in scored:
            yield format_row(name, step.advice, step, value)
        yield format_row(name, "recommended", final, compute_score(final.labels))
        if with_grid:
            for model, diameter in product(MODELS, recorded.diameters):
                step = run(runners, volume, model, Options(diameter=parse_diameter(diameter)), "grid")
                scored.append((step, compute_score(step.labels)))
                yield format_row(name, "grid", *scored[-1])
            yield format_row(name, "best", *max(scored, key=lambda pair: pair[1]))


def format_row(name: str, advice: str, step: Step, value: float) -> str:
    """Return a row of the table: the advice that led to a result of a stack, and the score of the result."""
    return f"| {name} | {advice} | {step.model} | {step.diameter} | {step.confidence:.2f} | {value:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of recorded stacks")
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=list(STACKS), help="names of the stacks")
    parser.add_argument("--grid", action="store_true", help="also find the best score of several diameters")
    arguments = parser.parse_args()
    for line in report(arguments.folder, arguments.stacks, with_grid=arguments.grid):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
