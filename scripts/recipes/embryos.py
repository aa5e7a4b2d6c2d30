"""Choose the stacks of BBBC050 that models learn from: `python -m scripts.recipes.embryos FOLDER OUT`.

FOLDER has what is in `Images.zip` and `GroundTruth.zip` of https://bbbc.broadinstitute.org/BBBC050: preimplantation
mouse embryos with stained histones by Tokuoka et al. (npj Systems Biology and Applications, 2020). OUT gets a folder
for each stack with `image.tif`, `mask.tif`, which `embryos` learns from, and `core.tif`, which `nuclei` learns from:
the same nuclei, which end where their light does, as synthetic ones do, rather than where annotators drew.

Embryos 2 and 3 stay out, as others are scored on stacks of an embryo of their size; 10, as it stops dividing; and one
stack of which a fifth of the nuclei has no label. Of the first hours, when nuclei hardly change, one stack is taken.
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
TIMES = (151, *range(251, 502, 50))
LEFT_OUT = "Emb08_t501"
# Voxels. What is smaller marks the place of a nucleus that was not outlined.
SMALLEST = 60
# Where a nucleus ends, as part of its height above what is around it; at most so many voxels away.
LEVEL, AROUND = 0.25, 4
# Voxels. Less noise, and clefts in the chromatin that belong to the nucleus.
SIGMA, CLEFT = 0.6, 2


def drop_marks(labels: NDArray[Any]) -> NDArray[np.uint16]:
    """Return labels [Z, Y, X] without those of less than `SMALLEST` voxels."""
    kept = np.bincount(labels.ravel()) >= SMALLEST
    return np.where(kept[labels], labels, 0).astype(np.uint16)


def end_with_light(image: NDArray[Any], labels: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return labels [Z, Y, X] without what is darker than `LEVEL` of the 90th percentile of their nucleus.

    Both are above the median of the background around. The largest piece of a nucleus remains, without holes.
    """
    smooth, ended = gaussian_filter(image.astype(np.float32), SIGMA), np.zeros_like(labels)
    boxes = find_objects(labels)
    for number in np.unique(labels[labels > 0]):
        box = boxes[number - 1]
        inside = labels[box] == number
        near = tuple(slice(max(0, span.start - AROUND), span.stop + AROUND) for span in box)
        outside = smooth[near][labels[near] == 0]
        background = np.median(outside if outside.size > SMALLEST else smooth[labels == 0])
        height = np.percentile(smooth[box][inside], 90) - background
        pieces, count = label(inside & (smooth[box] > background + LEVEL * height))
        if count:
            kept = np.pad(pieces == 1 + np.argmax(np.bincount(pieces.ravel())[1:]), CLEFT)
            closed = binary_closing(kept, generate_binary_structure(3, 1), CLEFT)
            ended[box][binary_fill_holes(closed[(slice(CLEFT, -CLEFT),) * 3] & inside)] = number
    return ended


def find_stacks(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield name, image and labels of every stack to learn from. Raises FileNotFoundError where one is missing."""
    for embryo in EMBRYOS:
        for time in TIMES:
            name = f"Emb{embryo:02d}_t{time:03d}"
            if name == LEFT_OUT:
                continue
            image = folder / f"Images/train/Images/{name}.tif"
            labels = folder / f"GroundTruth/train/GroundTruth_QCANet/{name}.tif"
            for path in (image, labels):
                if not path.exists():
                    raise FileNotFoundError(f"{path} is missing: unpack Images.zip and GroundTruth.zip into {folder}.")
            yield name, image, labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Copy the chosen stacks."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes.embryos", description=__doc__)
    parser.add_argument("folder", type=Path, help="with Images/ and GroundTruth/")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    for name, image, labels in find_stacks(options.folder):
        target = options.out / name
        target.mkdir(parents=True, exist_ok=True)
        pixels, mask = tifffile.imread(image), drop_marks(tifffile.imread(labels))
        for part, content in (("image", pixels), ("mask", mask), ("core", end_with_light(pixels, mask))):
            tifffile.imwrite(target / f"{part}.tif", content, compression="zlib")


if __name__ == "__main__":
    main()
