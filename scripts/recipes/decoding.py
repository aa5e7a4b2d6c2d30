"""Compare decoding parameters on synthetic stacks: `python -m scripts.recipes.decoding membranes`.

The objects in the stacks are close to the diameter of the model, and the stacks are not resampled. The command
prints one line for each key of the section `decoding` in `model.yaml`: the mean F1 at an IoU of 0.5 for several values
of this key, with all other keys unchanged. The network computes the scores of each stack only once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.synthetic_nuclei import Scene, synthesize
from scripts.recipes.synthetic_tissue import Tissue, synthesize_tissue
from service.core.types import Options, Volume
from service.inference.decoding.instances import InstanceDecoder
from service.inference.segment import segment
from service.inference.windows.grid import as_size
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances
from service.training.evaluate import score

SHAPE = (56, 104, 104)
CANDIDATE_VALUES: dict[str, tuple[float, ...]] = {
    "minimum_fraction": (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4),
    "persistence": (0.05, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3),
    "threshold": (0.4, 0.5, 0.6, 0.7, 0.8),
    "smoothing": (0, 1, 2),
    "min_confidence": (0, 0.7, 0.8, 0.85),
    "min_relative_odds": (0, 0.25, 0.37, 0.5),
}


def make_stacks(model: str, count: int) -> Iterator[tuple[Volume, NDArray[Any]]]:
    """Yield stacks [1, Z, Y, X] of objects close to the diameter of the model, with their labels [Z, Y, X]."""
    for seed in range(count):
        rng = np.random.default_rng([8200, seed])
        if model == "membranes":
            image, truth = synthesize_tissue(rng, SHAPE, Tissue.draw(rng, 24, 42))
        else:
            scenes = (Scene.draw(rng) for _ in range(1000))
            image, truth = synthesize(rng, SHAPE, next(scene for scene in scenes if 15 < scene.diameter < 26))
        yield Volume.from_array(image[None]), truth


def decode(spec: ModelSpec, changes: dict[str, float], scores: Tensor) -> NDArray[Any]:
    """Decode raw scores [1, K, Z, Y, X] to labels [Z, Y, X], with changed values for some keys of `decoding`."""
    assert isinstance(spec.decoding, Instances)  # noqa: S101 - both models segment objects
    decoding = Instances.model_validate(spec.decoding.model_dump() | changes)
    decoder = InstanceDecoder(spec, decoding, as_size(scores.shape[2:]), None)
    decoder.add(0, 0, scores)
    return decoder.finish().pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("membranes", "nuclei"))
    parser.add_argument("--stacks", type=int, default=16, help="number of stacks")
    arguments = parser.parse_args()
    runner = start_segmenter(arguments.model)
    f1_scores: dict[tuple[str, float], list[float]] = {}
    for volume, truth in make_stacks(arguments.model, arguments.stacks):
        probabilities = segment(runner, volume, Options("probabilities", diameter="none")).segmentation.pixels
        scores = torch.logit(torch.from_numpy(probabilities), eps=1e-6)[None]
        for key, values in CANDIDATE_VALUES.items():
            for value in values:
                labels = decode(runner.spec, {key: value}, scores)
                f1_scores.setdefault((key, value), []).append(score(truth, labels).f1)
    for key, values in CANDIDATE_VALUES.items():
        cells = (f"{value:.3g}: {np.mean(f1_scores[key, value]):.3f}" for value in values)
        sys.stdout.write(f"{key}  {', '.join(cells)}\n")


if __name__ == "__main__":
    main()
