"""Prepare the training stacks of tumor organoids: `python -m scripts.recipes.organoids FOLDER OUT`.

FOLDER contains the three stacks of Cellos (The Jackson Laboratory, MIT license) in `STACKS`, each in a subfolder with
`image.tif` and `mask.tif`. The command writes a folder for each stack to OUT, with the same two files. In `mask.tif`,
voxels that may belong to an unlabeled nucleus have the label `UNKNOWN_LABEL`.

The labels of one stack are nearly complete. In the other two, only some nuclei are labeled. There, the voxels without a
label are background only if they are near a labeled nucleus, or darker than most of the organoid.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt, find_objects

from scripts.recipes.sources import UNKNOWN_LABEL
from service.training.examples import compute_median_extents

STACKS = ("cellos_organoid_egfp_d0_108", "cellos_organoid_hoechst_d4_120", "cellos_organoid_mcherry_d4_1")
# Stacks in which nearly all nuclei are labeled.
COMPLETE_STACKS = ("cellos_organoid_egfp_d0_108",)
# The background around a labeled nucleus: a rim in its planes, as a fraction of the object width, and its outline in
# this number of planes above and below it.
RIM_FRACTION = 0.25
RIM_PLANES = 2
# This fraction of the voxels of an organoid, the darkest ones, is background.
DARK_FRACTION = 0.2


def find_unknown_voxels(image: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the voxels [Z, Y, X] that may belong to an unlabeled nucleus.

    The image is zero outside the organoid.
    """
    extents = compute_median_extents(labels)
    if extents is None:
        raise ValueError("No nucleus is labeled.")
    unknown: NDArray[np.bool_] = (labels == 0) & (image > np.quantile(image[image > 0], DARK_FRACTION))
    boxes = find_objects(labels)
    for number in np.unique(labels[labels > 0]).tolist():
        planes = boxes[number - 1][0]
        outline = (labels[planes] == number).any(axis=0)
        unknown[planes, distance_transform_edt(~outline) <= RIM_FRACTION * extents[1]] = False
        unknown[max(planes.start - RIM_PLANES, 0) : planes.stop + RIM_PLANES, outline] = False
    return unknown


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the training stacks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.organoids", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with the recorded stacks")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    for name in STACKS:
        image, labels = (tifffile.imread(options.folder / name / f"{part}.tif") for part in ("image", "mask"))
        if name not in COMPLETE_STACKS:
            labels = np.where(find_unknown_voxels(image, labels), UNKNOWN_LABEL, labels).astype(np.uint16)
        (options.out / name).mkdir(parents=True, exist_ok=True)
        for part, content in (("image", image), ("mask", labels)):
            tifffile.imwrite(options.out / name / f"{part}.tif", content, compression="zlib")


if __name__ == "__main__":
    main()
