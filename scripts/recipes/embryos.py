"""Choose the stacks of BBBC050 that `embryos` learns from: `python -m scripts.recipes.embryos FOLDER OUT`.

FOLDER has what is in `Images.zip` and `GroundTruth.zip` of https://bbbc.broadinstitute.org/BBBC050: preimplantation
mouse embryos with stained histones by Tokuoka et al. (npj Systems Biology and Applications, 2020). OUT gets a folder
for each stack with `image.tif` and `mask.tif`.

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

EMBRYOS = (1, 4, 5, 6, 7, 8, 9, 11)
TIMES = (151, *range(251, 502, 50))
LEFT_OUT = "Emb08_t501"
# Voxels. What is smaller marks the place of a nucleus that was not outlined.
SMALLEST = 60


def drop_marks(labels: NDArray[Any]) -> NDArray[np.uint16]:
    """Return labels [Z, Y, X] without those of less than `SMALLEST` voxels."""
    kept = np.bincount(labels.ravel()) >= SMALLEST
    return np.where(kept[labels], labels, 0).astype(np.uint16)


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
        tifffile.imwrite(target / "image.tif", tifffile.imread(image), compression="zlib")
        tifffile.imwrite(target / "mask.tif", drop_marks(tifffile.imread(labels)), compression="zlib")


if __name__ == "__main__":
    main()
