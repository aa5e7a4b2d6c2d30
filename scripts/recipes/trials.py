"""Score diameter trials on synthetic stacks: `python -m scripts.recipes.trials [--model membranes]`.

If the confidence at the estimated diameter or at the original resolution is low, or if no estimate fits well, the
diameter estimator tries other diameters. It accepts one if the log odds of its confidence are better by a margin
(`service.inference.diameter.estimation.MIN_LOG_ODDS_GAIN`). For several margins and each kind of stack, the table
lists how often a trial selected the diameter, and the mean F1 of these stacks without and with trials.

Stacks of membranes have a voxel size, stacks of nuclei have none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scripts.recipes.confidence import make_noise
from scripts.recipes.optics import log_uniform
from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.synthetic_nuclei import Scene, synthesize
from scripts.recipes.synthetic_tissue import Tissue, synthesize_tissue
from service.core.quantities import VoxelSize, parse_diameter
from service.core.types import Options, Volume
from service.inference.diameter.estimation import DiameterEstimator
from service.inference.preprocessing.normalize import normalize_volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.loader import load_network
from service.training.evaluate import score

MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
MAX_SPOT_DIAMETER_VOXELS = 8.0


class TrialScores(NamedTuple):
    """Scores of one stack: F1 without trials, and F1 with trials for each of `MARGINS`.

    F1 is NaN if no trial selected the diameter.
    """

    before: float
    after: tuple[float, ...]


def make_nuclei_stacks(count: int) -> Iterator[tuple[str, Volume, NDArray[Any]]]:
    """Yield the kind, the pixels [1, Z, Y, X] and the labels [Z, Y, X] of `count` stacks of nuclei of each kind."""
    for seed in range(count):
        rng = np.random.default_rng([4100, seed])
        spots = next(scene for _ in range(1000) if (scene := Scene.draw_hard(rng)).diameter < MAX_SPOT_DIAMETER_VOXELS)
        for kind, scene in (("usual", Scene.draw(rng)), ("hard", Scene.draw_hard(rng)), ("spots", spots)):
            edge = int(np.clip(3 * scene.diameter, 44, 80))
            depth = max(int(edge / scene.anisotropy), 16)
            image, truth = synthesize(rng, (depth, edge, edge), scene)
            yield kind, Volume.from_array(image[None]), truth
        grain = make_noise(seed).volume
        yield "noise", grain, np.zeros(grain.shape[1:], np.uint16)


def make_tissue_stacks(count: int) -> Iterator[tuple[str, Volume, NDArray[Any]]]:
    """Yield the kind, the pixels [1, Z, Y, X] and the labels [Z, Y, X] of `count` stacks of membranes of each kind.

    Young embryos have few cells, which are much wider than a window at the original resolution.
    """
    for seed in range(count):
        rng = np.random.default_rng([4200, seed])
        flatness, diameter = float(rng.choice([1.0, 2.4])), log_uniform(rng, 60, 220)
        young = replace(
            Tissue.draw_embryo(rng),
            diameter=diameter,
            flatness=flatness,
            elongation=float(rng.uniform(1, 3.5)) / flatness,
            size_variation=float(rng.uniform(0.1, 0.4)),
            photons=log_uniform(rng, 20, 200),
        )
        edge = int(np.clip(2.2 * diameter, 180, 340))
        for kind, tissue, side in (
            ("tissue", Tissue.draw(rng), 112),
            ("embryo", Tissue.draw_embryo(rng), 128),
            ("young embryo", young, edge),
        ):
            depth = max(int(0.6 * side / tissue.flatness), 40)
            image, truth = synthesize_tissue(rng, (depth, side, side), tissue)
            yield kind, Volume.from_array(image[None], VoxelSize(tissue.flatness, 1.0, 1.0)), truth
        grain = make_noise(seed).volume
        yield "noise", grain, np.zeros(grain.shape[1:], np.uint16)


def make_stacks(model: str, count: int) -> Iterator[tuple[str, Volume, NDArray[Any]]]:
    """Yield the stacks for scoring a model: stacks of membranes for `membranes`, otherwise stacks of nuclei."""
    return (make_tissue_stacks if model == "membranes" else make_nuclei_stacks)(count)


def cache_scores(compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function so that the scores of identical windows are computed only once."""
    cache: dict[bytes, Tensor] = {}

    def score_windows(windows: Tensor) -> Tensor:
        key = windows.numpy().tobytes()
        if key not in cache:
            cache[key] = compute(windows)
        return cache[key]

    return score_windows


def compare(
    runner: ModelRunner, network: Callable[[Tensor], Tensor], volume: Volume, truth: NDArray[Any]
) -> TrialScores:
    """Score a stack without trials, and with the diameters that trials select for each margin."""
    spec = runner.spec
    image, _notes = normalize_volume(volume, spec)
    score_windows, f1_scores = cache_scores(network), dict[str, float]()

    def choose(margin: float) -> tuple[str, bool]:
        """Return the diameter for a margin, and whether a trial selected it."""
        estimator = DiameterEstimator(image, (1.0, 1.0, 1.0), spec, score_windows, volume.voxel_size, margin)
        estimate = estimator.estimate()
        diameter = "none" if estimate.diameter is None or estimate.matches_model else str(estimate.diameter)
        return diameter, estimate.trial is not None

    def compute_f1(diameter: str) -> float:
        if diameter not in f1_scores:
            labels = segment(runner, volume, Options(diameter=parse_diameter(diameter))).segmentation.pixels
            f1_scores[diameter] = score(truth, labels).f1
        return f1_scores[diameter]

    before, _ = choose(np.inf)
    choices = [choose(margin) for margin in MARGINS]
    after = tuple(compute_f1(diameter) if is_from_trial else np.nan for diameter, is_from_trial in choices)
    return TrialScores(compute_f1(before) if f1_scores else np.nan, after)


def report(results: dict[str, list[TrialScores]]) -> Iterator[str]:
    """Yield the lines of the table, one for each margin. The keys of `results` are the kinds of stacks."""
    yield "| margin | " + " | ".join(results) + " |\n|---|" + "---|" * len(results)
    for number, margin in enumerate(MARGINS):
        cells = [f"{margin:g}"]
        for stacks in results.values():
            pairs = [(stack.before, stack.after[number]) for stack in stacks if not np.isnan(stack.after[number])]
            before, after = np.mean(pairs, axis=0) if pairs else (0, 0)
            cells.append(f"{len(pairs)} of {len(stacks)}" + (f": {before:.2f} to {after:.2f}" if pairs else ""))
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nuclei", help="name or folder of the model")
    parser.add_argument("--stacks", type=int, default=12, help="number of stacks of each kind")
    arguments = parser.parse_args()
    runner = start_segmenter(arguments.model)
    network, results = load_network(runner.spec), dict[str, list[TrialScores]]()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for kind, volume, truth in make_stacks(runner.spec.name, arguments.stacks):
            result = compare(runner, lambda windows: network(windows).float(), volume, truth)
            results.setdefault(kind, []).append(result)
            sys.stderr.write(f"{kind}: {result.before:.2f} -> {' '.join(f'{f1:.2f}' for f1 in result.after)}\n")
    sys.stdout.writelines(f"{line}\n" for line in report(results))


if __name__ == "__main__":
    main()
