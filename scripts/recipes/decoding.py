"""Score ways to decode `membranes` or `nuclei` on synthetic stacks: `python -m scripts.recipes.decoding membranes`.

Objects are about as wide as the model wants them, and no diameter is told. The network scores every stack once; a line
for each key of `decoding` in the model's file has the mean F1 at an intersection over union of 0.5 with several values
of it, the other keys being as they are.
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
from scripts.recipes.synthetic_nuclei import Scene, synthesise
from scripts.recipes.synthetic_tissue import Tissue, synthesise_tissue
from service.core.types import Options, Volume
from service.inference.decoding.instances import InstanceDecoder
from service.inference.segment import segment
from service.inference.windows.grid import as_size
from service.models.spec import Instances, ModelSpec
from service.training.evaluate import score

SHAPE = (56, 104, 104)
VALUES: dict[str, tuple[float, ...]] = {
    "minimum_fraction": (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4),
    "persistence": (0.05, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3),
    "threshold": (0.4, 0.5, 0.6, 0.7, 0.8),
    "smoothing": (0, 1, 2),
    "min_confidence": (0, 0.7, 0.8, 0.85),
    "min_relative_odds": (0, 0.25, 0.37, 0.5),
}


def stacks(model: str, count: int) -> Iterator[tuple[Volume, NDArray[Any]]]:
    """Yield stacks [1, Z, Y, X] of objects as wide as the model wants them, with their labels [Z, Y, X]."""
    for seed in range(count):
        rng = np.random.default_rng([8200, seed])
        if model == "membranes":
            image, truth = synthesise_tissue(rng, SHAPE, Tissue.draw(rng, 24, 42))
        else:
            scenes = (Scene.draw(rng) for _ in range(1000))
            image, truth = synthesise(rng, SHAPE, next(scene for scene in scenes if 15 < scene.diameter < 26))
        yield Volume.from_array(image[None]), truth


def decode(spec: ModelSpec, changes: dict[str, float], scores: Tensor) -> NDArray[Any]:
    """Return the labels [Z, Y, X] of raw scores [1, K, Z, Y, X] with some keys of `decoding` changed."""
    assert isinstance(spec.decoding, Instances)  # noqa: S101 - both models have objects
    decoding = Instances.model_validate(spec.decoding.model_dump() | changes)
    decoder = InstanceDecoder(spec, decoding, as_size(scores.shape[2:]), None)
    decoder.add(0, 0, scores)
    return decoder.finish().pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("membranes", "nuclei"))
    parser.add_argument("--stacks", type=int, default=16)
    chosen = parser.parse_args()
    runner = start_segmenter(chosen.model)
    reached: dict[tuple[str, float], list[float]] = {}
    for volume, truth in stacks(chosen.model, chosen.stacks):
        found = segment(runner, volume, Options("probabilities", diameter="none")).segmentation.pixels
        scores = torch.logit(torch.from_numpy(found), eps=1e-6)[None]
        for key, values in VALUES.items():
            for value in values:
                labels = decode(runner.spec, {key: value}, scores)
                reached.setdefault((key, value), []).append(score(truth, labels).f1)
    for key, values in VALUES.items():
        cells = (f"{value:.3g}: {np.mean(reached[key, value]):.3f}" for value in values)
        sys.stdout.write(f"{key}  {', '.join(cells)}\n")


if __name__ == "__main__":
    main()
