"""Draw example images of the bundled models on synthetic stacks: `python -m scripts.recipes.pictures`.

Each image, `docs/images/MODEL-NAME.png`, shows the middle plane of a stack twice, without and with the outlines of the
labels. For each image, the command prints the numbers of objects found and present, and the F1 at an IoU of 0.5. For
models that predict classes, it prints Dice coefficients. The requests specify neither voxel size nor object diameter.
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

from scripts.recipes.class_targets import compute_dice, labels_to_classes
from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.synthetic_nuclei import EMBRYO, TYPICAL_NUCLEI, Scene, synthesize
from scripts.recipes.synthetic_tissue import TYPICAL_TISSUE, Tissue, synthesize_tissue
from service.core.types import Options, Segmentation, Volume
from service.formats import writers
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.evaluate import score

OUTPUT_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
SHAPE = (40, 112, 112)
SEED = 77

Pair = tuple[NDArray[Any], NDArray[Any]]


def nuclei_factory(scene: Scene) -> Callable[[Generator], Pair]:
    """Return a function that generates a stack of nuclei."""
    return lambda rng: synthesize(rng, SHAPE, scene)


def cells_factory(tissue: Tissue, depth: int = 64) -> Callable[[Generator], Pair]:
    """Return a function that generates a stack of cells with stained membranes."""
    return lambda rng: synthesize_tissue(rng, (depth, *SHAPE[1:]), tissue)


SPOTS = replace(TYPICAL_NUCLEI, diameter=5, fill=0.02, texture=0, blur=0.6, haze=0)

PICTURES = {
    "embryos": {
        "usual": nuclei_factory(EMBRYO),
        "dense": nuclei_factory(replace(EMBRYO, fill=0.25, clustering=0.9)),
        "faint": nuclei_factory(replace(EMBRYO, photons=4)),
        "spots": nuclei_factory(SPOTS),
    },
    "nuclei": {
        "usual": nuclei_factory(TYPICAL_NUCLEI),
        "dense": nuclei_factory(replace(TYPICAL_NUCLEI, fill=0.4, clustering=0.9)),
        "faint": nuclei_factory(replace(TYPICAL_NUCLEI, photons=5)),
        "uneven": nuclei_factory(replace(TYPICAL_NUCLEI, tissue=0.4, shading=0.5)),
        "spots": nuclei_factory(SPOTS),
        "envelopes": nuclei_factory(replace(TYPICAL_NUCLEI, envelope=0.1, diameter=30, margin=1)),
    },
    "membranes": {
        "usual": cells_factory(TYPICAL_TISSUE),
        "uneven": cells_factory(replace(TYPICAL_TISSUE, patchiness=0.5, unevenness=0.6, attenuation=0.6)),
        "small": cells_factory(replace(TYPICAL_TISSUE, diameter=14)),
        "faint": cells_factory(replace(TYPICAL_TISSUE, photons=6)),
        "gaps": cells_factory(replace(TYPICAL_TISSUE, gaps=0.25)),
        "thin": cells_factory(TYPICAL_TISSUE, SHAPE[0]),
        "tube": cells_factory(replace(TYPICAL_TISSUE, lumen=0.4, diameter=24)),
        "apart": cells_factory(replace(TYPICAL_TISSUE, separation=0.35, body_size=2)),
    },
    "tissue": {
        "usual": cells_factory(TYPICAL_TISSUE),
        "faint": cells_factory(replace(TYPICAL_TISSUE, photons=6)),
        "small": cells_factory(replace(TYPICAL_TISSUE, diameter=14)),
        "uneven": cells_factory(replace(TYPICAL_TISSUE, patchiness=0.5, unevenness=0.6, attenuation=0.6)),
    },
}


def draw(runner: ModelRunner, make: Callable[[Generator], Pair]) -> tuple[bytes, str]:
    """Segment a stack; return a PNG of the stack without and with labels, and a line with the scores."""
    image, truth = make(np.random.default_rng(SEED))
    volume = Volume.from_array(image[None])
    result = segment(runner, volume, Options()).segmentation
    pictures = [
        writers.draw_thumbnail(volume, labels) for labels in (Segmentation(np.zeros_like(truth), "labels"), result)
    ]
    combined = np.hstack([np.asarray(png_decode(picture)) for picture in pictures])
    if result.kind == "classes":
        coefficients = zip(result.names, compute_dice(labels_to_classes(truth), result.pixels), strict=True)
        line = ", ".join(f"{name} {value:.2f}" for name, value in coefficients)
    else:
        scores = score(truth, result.pixels)
        line = f"{scores.found} of {scores.true} objects found, F1 {scores.f1:.2f}"
    return bytes(png_encode(combined, level=9)), line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(PICTURES), choices=list(PICTURES))
    for name in parser.parse_args().models:
        runner = start_segmenter(name)
        for kind, make in PICTURES[name].items():
            picture, line = draw(runner, make)
            (OUTPUT_FOLDER / f"{name}-{kind}.png").write_bytes(picture)
            sys.stdout.write(f"{name}-{kind}: {line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
