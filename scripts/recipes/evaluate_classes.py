"""Score a model for semantic segmentation on labeled stacks.

    python -m scripts.recipes.evaluate_classes --images a.tif --labels a_labels.tif

The label files contain cells, from which the command derives the true classes. It prints a Markdown table of Dice
coefficients for the model and for a classical method: a Gaussian filter followed by multi-level Otsu thresholds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from skimage.filters import threshold_multiotsu

from scripts.recipes.class_targets import CLASSES, compute_dice, labels_to_classes
from service.core.config import read_settings
from service.core.quantities import Diameter
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import read_spec
from service.training.evaluate import get_stack_name
from service.training.examples import read_pairs


def segment_by_threshold(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Classify the voxels of an image [Z, Y, X] as background, cell or membrane by brightness alone."""
    smooth = gaussian_filter(image.astype(np.float32), 1)
    thresholds = threshold_multiotsu(smooth, len(CLASSES))  # type: ignore[no-untyped-call]
    return np.digitize(smooth, thresholds).astype(np.uint8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of scores."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.evaluate_classes", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tissue"), help="model folder")
    parser.add_argument("--images", type=Path, nargs="+", required=True, help="stacks with one channel")
    parser.add_argument(
        "--labels", type=Path, nargs="+", required=True, help="labels of the cells, in the same order as the stacks"
    )
    parser.add_argument(
        "--diameter", help="diameter of the cells in all stacks, in the format of the parameter of POST /segment"
    )
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    options = parser.parse_args(arguments)
    settings = read_settings(None, {"STACKSEG_ENGINE__KIND": "eager", "STACKSEG_DEVICE__THREADS": str(options.threads)})
    runner = ModelRunner(read_spec(options.model), settings)
    runner.warm_up()
    request = Options(diameter=None if options.diameter is None else Diameter.parse(options.diameter))
    print(f"| stack | method | {' | '.join(CLASSES)} | mean |\n|{'---|' * (len(CLASSES) + 3)}")
    for path, (image, labels) in zip(options.images, read_pairs(options.images, options.labels), strict=True):
        truth = labels_to_classes(labels)
        predicted = segment(runner, Volume.from_array(image[None]), request).segmentation.pixels
        for method, classes in ((runner.spec.identifier, predicted), ("classical", segment_by_threshold(image))):
            scores = compute_dice(truth, classes)
            cells = " | ".join(f"{value:.2f}" for value in [*scores, float(np.nanmean(scores))])
            print(f"| {get_stack_name(path)} | {method} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
