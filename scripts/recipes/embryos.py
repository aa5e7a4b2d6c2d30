"""Prepare training stacks from the data set BBBC050: `python -m scripts.recipes.embryos FOLDER OUT`.

FOLDER contains the unpacked files `Images.zip` and `GroundTruth.zip` of https://bbbc.broadinstitute.org/BBBC050:
preimplantation mouse embryos with stained histones by Tokuoka et al. (npj Systems Biology and Applications, 2020). The
command writes a folder for each stack to OUT, with three files:

    image.tif   the image
    mask.tif    the labels, for training `embryos`
    core.tif    the same nuclei, trimmed to their bright region as in synthetic stacks, for training `nuclei`

Some stacks are excluded: embryos 2 and 3, because models are scored on an embryo of the same size; embryo 10, because
it stops dividing; and one stack in which a fifth of the nuclei is not labeled. Only one stack is used from the first
hours, in which the nuclei hardly change.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from scipy.ndimage import (
    binary_closing,
    binary_fill_holes,
    find_objects,
    gaussian_filter,
    generate_binary_structure,
    label,
)

EMBRYOS = (1, 4, 5, 6, 7, 8, 9, 11)
TIME_POINTS = (151, *range(251, 502, 50))
EXCLUDED_STACK = "Emb08_t501"
# Smaller labels are markers for nuclei that were not outlined.
MIN_NUCLEUS_VOXELS = 60
# A nucleus ends where its brightness above the background drops to this fraction of its 90th percentile.
EDGE_LEVEL = 0.25
# The background of a nucleus is measured up to this number of voxels outside its bounding box.
MARGIN_VOXELS = 4
# Standard deviation of the Gaussian filter that reduces noise, in voxels.
SIGMA_VOXELS = 0.6
# Number of iterations of the binary closing that fills clefts in the chromatin.
CLOSING_STEPS = 2


def remove_markers(labels: NDArray[Any]) -> NDArray[np.uint16]:
    """Remove labels with fewer than `MIN_NUCLEUS_VOXELS` voxels from a volume [Z, Y, X]."""
    is_nucleus = np.bincount(labels.ravel()) >= MIN_NUCLEUS_VOXELS
    return np.where(is_nucleus[labels], labels, 0).astype(np.uint16)


def trim_to_bright_region(image: NDArray[Any], labels: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Trim each nucleus in labels [Z, Y, X] to its bright region, without holes.

    The bright region is the largest connected component that exceeds `EDGE_LEVEL` times the 90th percentile of the
    nucleus. Both intensities are measured relative to the median of the surrounding background.
    """
    smooth, trimmed = gaussian_filter(image.astype(np.float32), SIGMA_VOXELS), np.zeros_like(labels)
    boxes = find_objects(labels)
    for number in np.unique(labels[labels > 0]):
        box = boxes[number - 1]
        inside = labels[box] == number
        neighborhood = tuple(slice(max(0, span.start - MARGIN_VOXELS), span.stop + MARGIN_VOXELS) for span in box)
        outside = smooth[neighborhood][labels[neighborhood] == 0]
        background = np.median(outside if outside.size > MIN_NUCLEUS_VOXELS else smooth[labels == 0])
        contrast = np.percentile(smooth[box][inside], 90) - background
        pieces, count = label(inside & (smooth[box] > background + EDGE_LEVEL * contrast))
        if count:
            largest = np.pad(pieces == 1 + np.argmax(np.bincount(pieces.ravel())[1:]), CLOSING_STEPS)
            closed = binary_closing(largest, generate_binary_structure(3, 1), CLOSING_STEPS)
            trimmed[box][binary_fill_holes(closed[(slice(CLOSING_STEPS, -CLOSING_STEPS),) * 3] & inside)] = number
    return trimmed


def find_stacks(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the name, the image file and the label file of each training stack.

    Raises FileNotFoundError if a file is missing.
    """
    for embryo in EMBRYOS:
        for time in TIME_POINTS:
            name = f"Emb{embryo:02d}_t{time:03d}"
            if name == EXCLUDED_STACK:
                continue
            image = folder / f"Images/train/Images/{name}.tif"
            labels = folder / f"GroundTruth/train/GroundTruth_QCANet/{name}.tif"
            for path in (image, labels):
                if not path.exists():
                    raise FileNotFoundError(f"{path} is missing. Unpack Images.zip and GroundTruth.zip into {folder}.")
            yield name, image, labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the training stacks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.embryos", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with Images/ and GroundTruth/ of BBBC050")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    for name, image, labels in find_stacks(options.folder):
        target = options.out / name
        target.mkdir(parents=True, exist_ok=True)
        pixels, mask = tifffile.imread(image), remove_markers(tifffile.imread(labels))
        for part, content in (("image", pixels), ("mask", mask), ("core", trim_to_bright_region(pixels, mask))):
            tifffile.imwrite(target / f"{part}.tif", content, compression="zlib")


if __name__ == "__main__":
    main()
