"""Score trials of widths on synthetic stacks: `python -m scripts.recipes.trials [--model membranes]`.

Stacks of nuclei tell nothing, those of membranes their voxel size.

Where the model doubts what it finds at the width that was estimated, or at its own, or nothing fits well, other widths
are tried, and one is taken whose odds of being right are better by a margin
(`service.inference.diameter.estimation.MIN_LOG_ODDS_GAIN`).
another width, and their mean F1 without and with that.
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

from scripts.recipes.confidence import noise
from scripts.recipes.optics import log_uniform
from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.synthetic_nuclei import Scene, synthesise
from scripts.recipes.synthetic_tissue import Tissue, synthesise_tissue
from service.core.quantities import VoxelSize, parse_diameter
from service.core.types import Options, Volume
from service.inference.diameter.estimation import DiameterEstimator
from service.inference.preprocessing.normalize import normalize_volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment as segment_volume
from service.models.loader import load_network
from service.training.evaluate import score

MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
WIDEST_SPOTS = 8.0


class Tried(NamedTuple):
    """F1 of a stack without a trial, and with the width that a trial by each of `MARGINS` chooses; NaN: not needed."""

    before: float
    after: tuple[float, ...]


def scenes(count: int) -> Iterator[tuple[str, Volume, NDArray[Any]]]:
    """Yield stacks of nuclei [1, Z, Y, X] with their labels [Z, Y, X], of each kind the same number."""
    for seed in range(count):
        rng = np.random.default_rng([4100, seed])
        spots = next(scene for _ in range(1000) if (scene := Scene.draw_hard(rng)).diameter < WIDEST_SPOTS)
        for kind, scene in (("usual", Scene.draw(rng)), ("hard", Scene.draw_hard(rng)), ("spots", spots)):
            edge = int(np.clip(3 * scene.diameter, 44, 80))
            depth = max(int(edge / scene.anisotropy), 16)
            image, truth = synthesise(rng, (depth, edge, edge), scene)
            yield kind, Volume.from_array(image[None]), truth
        grain = noise(seed).volume
        yield "noise", grain, np.zeros(grain.shape[1:], np.uint16)


def tissues(count: int) -> Iterator[tuple[str, Volume, NDArray[Any]]]:
    """Yield stacks of membranes [1, Z, Y, X] with their labels [Z, Y, X], of each kind the same number.

    Cells of young embryos are few, and much wider than what a window shows as the stack is sampled.
    """
    for seed in range(count):
        rng = np.random.default_rng([4200, seed])
        flatness, diameter = float(rng.choice([1.0, 2.4])), log_uniform(rng, 60, 220)
        young = replace(
            Tissue.draw_embryo(rng),
            diameter=diameter,
            flatness=flatness,
            elongation=float(rng.uniform(1, 3.5)) / flatness,
            variety=float(rng.uniform(0.1, 0.4)),
            photons=log_uniform(rng, 20, 200),
        )
        edge = int(np.clip(2.2 * diameter, 180, 340))
        for kind, tissue, side in (
            ("tissue", Tissue.draw(rng), 112),
            ("embryo", Tissue.draw_embryo(rng), 128),
            ("young embryo", young, edge),
        ):
            depth = max(int(0.6 * side / tissue.flatness), 40)
            image, truth = synthesise_tissue(rng, (depth, side, side), tissue)
            yield kind, Volume.from_array(image[None], VoxelSize(tissue.flatness, 1.0, 1.0)), truth
        grain = noise(seed).volume
        yield "noise", grain, np.zeros(grain.shape[1:], np.uint16)


def stacks_for(model: str, count: int) -> Iterator[tuple[str, Volume, NDArray[Any]]]:
    """Yield what a model is to be scored on: `tissues` for `membranes`, `scenes` for others."""
    return (tissues if model == "membranes" else scenes)(count)


def remember(compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the scores of the same windows once."""
    known: dict[bytes, Tensor] = {}

    def score_windows(windows: Tensor) -> Tensor:
        key = windows.numpy().tobytes()
        if key not in known:
            known[key] = compute(windows)
        return known[key]

    return score_windows


def compare(runner: ModelRunner, network: Callable[[Tensor], Tensor], volume: Volume, truth: NDArray[Any]) -> Tried:
    """Segment a stack with the widths that trials choose."""
    spec = runner.spec
    image, _notes = normalize_volume(volume, spec)
    score_windows, reached = remember(network), dict[str, float]()

    def choose(margin: float) -> tuple[str, bool]:
        sizing = DiameterEstimator(image, (1.0, 1.0, 1.0), spec, score_windows, volume.voxel_size, margin).estimate()
        width = "none" if sizing.diameter is None or sizing.matches_model else str(sizing.diameter)
        return width, sizing.trial is not None

    def segment(width: str) -> float:
        if width not in reached:
            found = segment_volume(runner, volume, Options(diameter=parse_diameter(width))).segmentation.pixels
            reached[width] = score(truth, found).f1
        return reached[width]

    before, _ = choose(np.inf)
    chosen = [choose(margin) for margin in MARGINS]
    after = tuple(segment(width) if is_tried else np.nan for width, is_tried in chosen)
    return Tried(segment(before) if reached else np.nan, after)


def report(tried: dict[str, list[Tried]]) -> Iterator[str]:
    """Yield the lines of the table, one for each margin."""
    yield "| margin | " + " | ".join(tried) + " |\n|---|" + "---|" * len(tried)
    for number, margin in enumerate(MARGINS):
        cells = [f"{margin:g}"]
        for stacks in tried.values():
            pairs = [(each.before, each.after[number]) for each in stacks if not np.isnan(each.after[number])]
            before, after = np.mean(pairs, axis=0) if pairs else (0, 0)
            cells.append(f"{len(pairs)} of {len(stacks)}" + (f": {before:.2f} to {after:.2f}" if pairs else ""))
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nuclei", help="name or folder")
    parser.add_argument("--stacks", type=int, default=12, help="of each kind")
    chosen = parser.parse_args()
    runner = start_segmenter(chosen.model)
    network, tried = load_network(runner.spec), dict[str, list[Tried]]()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for kind, volume, truth in stacks_for(runner.spec.name, chosen.stacks):
            found = compare(runner, lambda windows: network(windows).float(), volume, truth)
            tried.setdefault(kind, []).append(found)
            sys.stderr.write(f"{kind}: {found.before:.2f} -> {' '.join(f'{f1:.2f}' for f1 in found.after)}\n")
    sys.stdout.writelines(f"{line}\n" for line in report(tried))


if __name__ == "__main__":
    main()
