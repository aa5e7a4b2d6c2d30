"""Draw what the bundled models find in synthetic stacks: `python -m scripts.recipes.pictures`.

Writes `docs/images/MODEL-NAME.png`, the middle plane beside the same with the outlines of the labels, and prints a line
for each: objects found, objects there, F1 at an intersection over union of 0.5; of classes their Dice coefficients.
Nothing is told of any stack.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from imagecodecs import png_decode, png_encode
from numpy.random import Generator
from numpy.typing import NDArray

from scripts.recipes.class_targets import classes_of, dice
from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.synthetic_nuclei import EMBRYO, PLAIN, Scene, synthesise
from scripts.recipes.synthetic_tissue import WALLS, Tissue, synthesise_tissue
from service.core.types import Options, Segmentation, Volume
from service.formats import thumbnail
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.evaluate import score

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
SHAPE = (40, 112, 112)
SEED = 77

Pair = tuple[NDArray[Any], NDArray[Any]]


def nuclei(scene: Scene) -> Callable[[Generator], Pair]:
    return lambda rng: synthesise(rng, SHAPE, scene)


def cells(tissue: Tissue, depth: int = 64) -> Callable[[Generator], Pair]:
    return lambda rng: synthesise_tissue(rng, (depth, *SHAPE[1:]), tissue)


SPOTS = replace(PLAIN, diameter=5, fill=0.02, texture=0, blur=0.6, haze=0)

PICTURES = {
    "embryos": {
        "usual": nuclei(EMBRYO),
        "dense": nuclei(replace(EMBRYO, fill=0.25, clustering=0.9)),
        "faint": nuclei(replace(EMBRYO, photons=4)),
        "spots": nuclei(SPOTS),
    },
    "nuclei": {
        "usual": nuclei(PLAIN),
        "dense": nuclei(replace(PLAIN, fill=0.4, clustering=0.9)),
        "faint": nuclei(replace(PLAIN, photons=5)),
        "uneven": nuclei(replace(PLAIN, tissue=0.4, shading=0.5)),
        "spots": nuclei(SPOTS),
        "envelopes": nuclei(replace(PLAIN, envelope=0.1, diameter=30, margin=1)),
    },
    "membranes": {
        "usual": cells(WALLS),
        "uneven": cells(replace(WALLS, patchiness=0.5, unevenness=0.6, attenuation=0.6)),
        "small": cells(replace(WALLS, diameter=14)),
        "faint": cells(replace(WALLS, photons=6)),
        "gaps": cells(replace(WALLS, gaps=0.25)),
        "thin": cells(WALLS, SHAPE[0]),
        "tube": cells(replace(WALLS, lumen=0.4, diameter=24)),
        "apart": cells(replace(WALLS, apart=0.35, body=2)),
    },
    "tissue": {
        "usual": cells(WALLS),
        "faint": cells(replace(WALLS, photons=6)),
        "small": cells(replace(WALLS, diameter=14)),
        "uneven": cells(replace(WALLS, patchiness=0.5, unevenness=0.6, attenuation=0.6)),
    },
}


def draw(runner: ModelRunner, make: Callable[[Generator], Pair]) -> tuple[bytes, str]:
    """Return a PNG of a stack beside its labels, and what was found in it."""
    image, truth = make(np.random.default_rng(SEED))
    volume = Volume.from_array(image[None])
    found = segment(runner, volume, Options()).segmentation
    pictures = [thumbnail.draw(volume, labels) for labels in (Segmentation(np.zeros_like(truth), "labels"), found)]
    together = np.hstack([np.asarray(png_decode(picture)) for picture in pictures])
    if found.kind == "classes":
        reached = zip(found.names, dice(classes_of(truth), found.pixels), strict=True)
        line = ", ".join(f"{name} {value:.2f}" for name, value in reached)
    else:
        scores = score(truth, found.pixels)
        line = f"{scores.found} found of {scores.true}, F1 {scores.f1:.2f}"
    return bytes(png_encode(together, level=9)), line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(PICTURES), choices=list(PICTURES))
    for name in parser.parse_args().models:
        runner = start_segmenter(name)
        for kind, make in PICTURES[name].items():
            picture, line = draw(runner, make)
            (FOLDER / f"{name}-{kind}.png").write_bytes(picture)
            sys.stdout.write(f"{name}-{kind}: {line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
