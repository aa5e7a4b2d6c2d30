"""Score a model of classes: `python -m scripts.recipes.evaluate_classes --images a.tif --labels a_labels.tif`.

Labels are those of cells, and the classes are made of them. Prints one Markdown table of Dice coefficients, the model
beside a classical method: a Gaussian and Otsu's thresholds between as many classes, the darkest being background.
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

from scripts.recipes.class_targets import CLASSES, classes_of, dice
from service.core.config import read_settings
from service.core.quantities import Diameter
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import read_spec
from service.training.evaluate import stack_name
from service.training.examples import read_pairs


def classical(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Tell background, cell and membrane apart by brightness alone; image and classes [Z, Y, X]."""
    smooth = gaussian_filter(image.astype(np.float32), 1)
    thresholds = threshold_multiotsu(smooth, len(CLASSES))  # type: ignore[no-untyped-call]
    return np.digitize(smooth, thresholds).astype(np.uint8)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.evaluate_classes", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tissue"), help="model folder")
    parser.add_argument("--images", type=Path, nargs="+", required=True, help="stacks, one channel each")
    parser.add_argument(
        "--labels", type=Path, nargs="+", required=True, help="labels of their cells, in the same order"
    )
    parser.add_argument("--diameter", help="of the cells in all stacks, as the parameter of POST /segment")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    settings = read_settings(None, {"STACKSEG_ENGINE__KIND": "eager", "STACKSEG_DEVICE__THREADS": str(options.threads)})
    runner = ModelRunner(read_spec(options.model), settings)
    runner.warm_up()
    request = Options(diameter=None if options.diameter is None else Diameter.parse(options.diameter))
    print(f"| stack | method | {' | '.join(CLASSES)} | mean |\n|{'---|' * (len(CLASSES) + 3)}")
    for path, (image, labels) in zip(options.images, read_pairs(options.images, options.labels), strict=True):
        truth = classes_of(labels)
        predicted = segment(runner, Volume.from_array(image[None]), request).segmentation.pixels
        for method, classes in ((runner.spec.identifier, predicted), ("classical", classical(image))):
            scores = dice(truth, classes)
            cells = " | ".join(f"{value:.2f}" for value in [*scores, float(np.nanmean(scores))])
            print(f"| {stack_name(path)} | {method} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
