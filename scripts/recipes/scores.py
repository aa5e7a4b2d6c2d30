"""Score the bundled models on recorded stacks: `python -m scripts.recipes.scores FOLDER`.

FOLDER contains the recorded stacks. Each one is in a subfolder with `image.tif` and, if the objects are known,
`mask.tif`. The requests specify no object diameter, and the voxel size is used only if the file contains it. The README
of a model lists its training stacks.

With `--grid`, the command prints scores on synthetic nuclei instead, by diameter and signal-to-noise ratio. This needs
no FOLDER.
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
from scripts.recipes.synthetic_nuclei import TYPICAL_NUCLEI, Scene, synthesize
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.evaluate import score

MAX_PIXEL_BYTES = 2**31
# The grid of synthetic stacks: object diameters in voxels, signal-to-noise ratios, and stacks per combination.
DIAMETERS = (4, 7, 12, 20, 32)
NOISE_RATIOS = (2, 4, 8, 16)
STACKS_PER_CELL = 2
# Detection of spots in the mesoSPIM stack: standard deviation of the Laplacian of a Gaussian, in voxels, and threshold
# in standard deviations of the response.
SPOT_SIGMA = 1.5
SPOT_THRESHOLD = 8.0


class RecordedStack(NamedTuple):
    """A recorded stack, the model to segment it with, and the measure to score the result with."""

    stack: str
    model: str
    measure: str


STACKS = (
    RecordedStack("mouse_embryo_8cell", "nuclei", "F1"),
    RecordedStack("arabidopsis_ovule_nuclei_1135", "nuclei", "F1"),
    RecordedStack("synthetic_nuclei_stardist", "nuclei", "F1"),
    RecordedStack("celegans_membrane_t046", "membranes", "F1"),
    RecordedStack("mesospim_brain_nuclei_c5", "nuclei", "recall of spots"),
    RecordedStack("drosophila_nuclear_envelope", "nuclei", "fraction of fragments"),
)


def find_spots(image: NDArray[Any]) -> NDArray[np.intp]:
    """Find blobs about five voxels wide in an image [Z, Y, X]; return their positions [spots, 3] in voxels.

    Blobs are local maxima (in cubes with an edge of five voxels) of the negative Laplacian of a Gaussian. They must
    exceed its median by `SPOT_THRESHOLD` standard deviations. The standard deviation is estimated robustly as 1.4826
    times the median absolute deviation.
    """
    response = -gaussian_laplace(image.astype(np.float32), SPOT_SIGMA)
    median = np.median(response)
    level = median + SPOT_THRESHOLD * 1.4826 * np.median(np.abs(response - median))
    return np.argwhere((response == maximum_filter(response, size=5)) & (response > level))


def spot_recall(image: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the fraction of the spots in an image that are covered by an object; both arrays [Z, Y, X].

    An object that covers several spots counts only once.
    """
    spots = find_spots(image)
    hits = np.unique(labels[tuple(spots.T)])
    return float(np.count_nonzero(hits) / max(1, len(spots)))


def fragment_fraction(labels: NDArray[Any]) -> float:
    """Return the fraction of the objects in labels [Z, Y, X] that are fragments.

    A fragment is smaller than a quarter of the mean size of the larger half of the objects. If there are no objects,
    the fraction is 1.
    """
    sizes = np.sort(np.bincount(labels.ravel())[1:])
    return float(np.mean(sizes < sizes[len(sizes) // 2 :].mean() / 4)) if sizes.size else 1.0


def score_recorded(folder: Path, segmenters: dict[str, ModelRunner], options: Options) -> Iterator[str]:
    """Yield the lines of the table of recorded stacks."""
    yield "| stack | model | measure | score | found | diameter | seconds |\n|---|---|---|---|---|---|---|"
    for recorded in STACKS:
        path = folder / recorded.stack / "image.tif"
        selection = Selection(axes="ZYX") if recorded.stack in {"mesospim_brain_nuclei_c5"} else Selection()
        volume = stack_reader.read(path, selection, MAX_PIXEL_BYTES)
        runner = segmenters[recorded.model]
        start = time.perf_counter()
        result = segment(runner, volume, options)
        seconds = time.perf_counter() - start
        labels = result.segmentation.pixels
        match recorded.measure:
            case "F1":
                truth = stack_reader.read(
                    path.with_name("mask.tif"), Selection(axes="ZYX"), MAX_PIXEL_BYTES
                ).read_all()[0]
                scores = score(truth, labels)
                value, found = f"{scores.f1:.2f}", f"{scores.found} of {scores.true}"
            case "recall of spots":
                count = len(find_spots(volume.read_all()[0]))
                value, found = f"{spot_recall(volume.read_all()[0], labels):.2f}", f"{labels.max()} of {count}"
            case _:
                value, found = f"{fragment_fraction(labels):.2f}", str(labels.max())
        diameter = result.diameter_text or "original resolution"
        cells = [recorded.stack, runner.spec.name, recorded.measure, value, found, diameter, f"{seconds:.1f}"]
        yield f"| {' | '.join(cells)} |"


def score_grid(runner: ModelRunner, options: Options) -> Iterator[str]:
    """Yield the lines of a table of mean F1 on synthetic nuclei, by diameter in voxels and signal-to-noise ratio."""
    header = " | ".join(f"SNR {ratio}" for ratio in NOISE_RATIOS)
    yield "| diameter | " + header + " |\n|---|" + "---|" * len(NOISE_RATIOS)
    for diameter in DIAMETERS:
        f1_scores = [
            np.mean([_score_synthetic(runner, options, diameter, ratio, seed) for seed in range(STACKS_PER_CELL)])
            for ratio in NOISE_RATIOS
        ]
        yield f"| {diameter} | " + " | ".join(f"{f1:.2f}" for f1 in f1_scores) + " |"


def _score_synthetic(runner: ModelRunner, options: Options, diameter: int, ratio: float, seed: int) -> float:
    rng = np.random.default_rng([diameter, seed])
    edge = int(np.clip(5 * diameter, 36, 96))
    image, truth = synthesize(rng, (edge, edge, edge), _make_sharp_scene(diameter))
    inside, outside = image[truth > 0], image[truth == 0]
    contrast = float(np.median(inside)) - float(np.median(outside))
    noisy = image + rng.normal(0, contrast / ratio, image.shape)
    return score(
        truth, segment(runner, Volume.from_array(noisy.astype(np.float32)[None]), options).segmentation.pixels
    ).f1


def _make_sharp_scene(diameter: float) -> Scene:
    """Return a scene of sharp nuclei of this diameter with very little noise."""
    return replace(
        TYPICAL_NUCLEI,
        diameter=diameter,
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
    parser.add_argument("folder", type=Path, nargs="?", help="folder of recorded stacks")
    parser.add_argument("--nuclei", default="nuclei", help="name or folder of the model for nuclei")
    parser.add_argument("--membranes", default="membranes", help="name or folder of the model for membranes")
    parser.add_argument("--grid", action="store_true", help="score synthetic nuclei by diameter and noise instead")
    parser.add_argument("--quality", choices=("fast", "best"), default="fast")
    parser.add_argument("--overlap", type=float, help="overlap of windows (default: depends on --quality)")
    parsed = parser.parse_args(arguments)
    options = Options(quality=parsed.quality, overlap=parsed.overlap)
    if parsed.folder is None and not parsed.grid:
        parser.error("specify the FOLDER of recorded stacks, or --grid")
    names = ("nuclei",) if parsed.grid else ("nuclei", "membranes")
    segmenters = {name: start_segmenter(getattr(parsed, name)) for name in names}
    lines = (
        score_grid(segmenters["nuclei"], options) if parsed.grid else score_recorded(parsed.folder, segmenters, options)
    )
    for line in lines:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
