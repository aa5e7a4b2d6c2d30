"""Score the bundled models on recorded stacks: `python -m scripts.recipes.scores FOLDER`.

FOLDER has the recorded stacks, each in a subfolder with `image.tif` and, where objects are known, `mask.tif`. Nothing
is told but the voxel size that a file states. Which stacks a model has learned from is in its README. `--grid` prints
instead scores on synthetic nuclei by diameter and by signal-to-noise ratio, which needs no FOLDER.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_laplace, maximum_filter

from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.synthetic_nuclei import PLAIN, Scene, synthesise
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.evaluate import score

LARGEST_BYTES = 2**31
WIDTHS, RATIOS, SEEDS = (4, 7, 12, 20, 32), (2, 4, 8, 16), 2
# Spots of the mesoSPIM stack: scale of the Laplacian in voxels, and threshold in deviations of its values.
SPOT_SIGMA, SPOT_THRESHOLD = 1.5, 8.0


class Recorded(NamedTuple):
    """A recorded stack, the model that it is for, and how it is scored."""

    stack: str
    model: str
    measure: str


STACKS = (
    Recorded("mouse_embryo_8cell", "nuclei", "F1"),
    Recorded("arabidopsis_ovule_nuclei_1135", "nuclei", "F1"),
    Recorded("synthetic_nuclei_stardist", "nuclei", "F1"),
    Recorded("celegans_membrane_t046", "membranes", "F1"),
    Recorded("mesospim_brain_nuclei_c5", "nuclei", "recall of spots"),
    Recorded("drosophila_nuclear_envelope", "nuclei", "part that is fragments"),
)


def find_spots(image: NDArray[Any]) -> NDArray[np.intp]:
    """Return the voxels [spots, 3] of blobs about five voxels wide in an image [Z, Y, X].

    They are the maxima, over cubes of five voxels, of the negative Laplacian of a Gaussian that exceed its median by
    `SPOT_THRESHOLD` standard deviations of what is not a blob (1.4826 times the median absolute deviation).
    """
    response = -gaussian_laplace(image.astype(np.float32), SPOT_SIGMA)
    middle = np.median(response)
    level = middle + SPOT_THRESHOLD * 1.4826 * np.median(np.abs(response - middle))
    return np.argwhere((response == maximum_filter(response, size=5)) & (response > level))


def recall_of_spots(image: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the part of the spots in an image that objects hold, each object counting for one; both [Z, Y, X]."""
    spots = find_spots(image)
    held = np.unique(labels[tuple(spots.T)])
    return float(np.count_nonzero(held) / max(1, len(spots)))


def share_of_fragments(labels: NDArray[Any]) -> float:
    """Return the part of the objects in labels [Z, Y, X] that is smaller than a quarter of the mean of the others.

    The mean is that of the larger half of the objects.
    """
    sizes = np.sort(np.bincount(labels.ravel())[1:])
    return float(np.mean(sizes < sizes[len(sizes) // 2 :].mean() / 4)) if sizes.size else 1.0


def rows(folder: Path, segmenters: dict[str, ModelRunner], options: Options) -> Iterator[str]:
    """Yield the lines of the table of recorded stacks."""
    yield "| stack | model | measure | score | found | width | seconds |\n|---|---|---|---|---|---|---|"
    for recorded in STACKS:
        path = folder / recorded.stack / "image.tif"
        selection = Selection(axes="ZYX") if recorded.stack in {"mesospim_brain_nuclei_c5"} else Selection()
        volume = stack_reader.read(path, selection, LARGEST_BYTES)
        runner = segmenters[recorded.model]
        began = time.perf_counter()
        result = segment(runner, volume, options)
        seconds = time.perf_counter() - began
        labels = result.segmentation.pixels
        match recorded.measure:
            case "F1":
                truth = stack_reader.read(path.with_name("mask.tif"), Selection(axes="ZYX"), LARGEST_BYTES).array()[0]
                scores = score(truth, labels)
                value, found = f"{scores.f1:.2f}", f"{scores.found} of {scores.true}"
            case "recall of spots":
                count = len(find_spots(volume.array()[0]))
                value, found = f"{recall_of_spots(volume.array()[0], labels):.2f}", f"{labels.max()} of {count}"
            case _:
                value, found = f"{share_of_fragments(labels):.2f}", str(labels.max())
        width = result.diameter_text or "as sampled"
        cells = [recorded.stack, runner.spec.name, recorded.measure, value, found, width, f"{seconds:.1f}"]
        yield f"| {' | '.join(cells)} |"


def grid(runner: ModelRunner, options: Options) -> Iterator[str]:
    """Yield the lines of a table: mean F1 on synthetic nuclei by their width in voxels and signal-to-noise ratio."""
    yield "| width | " + " | ".join(f"SNR {ratio}" for ratio in RATIOS) + " |\n|---|" + "---|" * len(RATIOS)
    for width in WIDTHS:
        reached = [
            np.mean([_score_synthetic(runner, options, width, ratio, seed) for seed in range(SEEDS)])
            for ratio in RATIOS
        ]
        yield f"| {width} | " + " | ".join(f"{value:.2f}" for value in reached) + " |"


def _score_synthetic(runner: ModelRunner, options: Options, width: int, ratio: float, seed: int) -> float:
    rng = np.random.default_rng([width, seed])
    edge = int(np.clip(5 * width, 36, 96))
    image, truth = synthesise(rng, (edge, edge, edge), _plain(width))
    inside, outside = image[truth > 0], image[truth == 0]
    contrast = float(np.median(inside)) - float(np.median(outside))
    noisy = image + rng.normal(0, contrast / ratio, image.shape)
    return score(
        truth, segment(runner, Volume.from_array(noisy.astype(np.float32)[None]), options).segmentation.pixels
    ).f1


def _plain(width: float) -> Scene:
    """Return a scene of nuclei of this width that is sharp and has hardly any noise of its own."""
    return replace(
        PLAIN,
        diameter=width,
        clustering=0.4,
        contact=0.95,
        texture=0.3,
        margin=1.0,
        blur=0.6,
        haze=0.0,
        photons=1000.0,
        read_noise=0.2,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="recorded stacks")
    parser.add_argument("--nuclei", default="nuclei", help="name or folder of a model")
    parser.add_argument("--membranes", default="membranes", help="name or folder of a model")
    parser.add_argument("--grid", action="store_true", help="scores by diameter and noise, on synthetic nuclei")
    parser.add_argument("--quality", choices=("fast", "best"), default="fast")
    parser.add_argument("--overlap", type=float, help="of windows; that of the quality if not given")
    chosen = parser.parse_args(arguments)
    options = Options(quality=chosen.quality, overlap=chosen.overlap)
    if chosen.folder is None and not chosen.grid:
        parser.error("name the FOLDER of recorded stacks, or say --grid")
    names = ("nuclei",) if chosen.grid else ("nuclei", "membranes")
    segmenters = {name: start_segmenter(getattr(chosen, name)) for name in names}
    lines = grid(segmenters["nuclei"], options) if chosen.grid else rows(chosen.folder, segmenters, options)
    for line in lines:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
