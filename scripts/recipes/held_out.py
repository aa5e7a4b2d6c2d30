"""Score a model on the validation stacks for selecting weights.

    python -m scripts.recipes.held_out [--model NAME] [--embryos FOLDER]

The validation stacks are synthetic, from seeds that are not used for training. With `--embryos`, they also include the
mouse embryos in the test set of https://bbbc.broadinstitute.org/BBBC050. FOLDER contains the unpacked files
`Images.zip` and `GroundTruth.zip`. Embryos with at least 16 labeled nuclei are *late*, the others are *early*.

The table lists the mean F1 at an IoU of 0.5 for each kind of stack. In the last column, the model does not know the
voxel size. No object diameter is specified.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
from numpy.typing import NDArray

from scripts.recipes.segmenters import start_segmenter
from scripts.recipes.trials import make_stacks
from service.core.quantities import VoxelSize
from service.core.types import Options, Volume
from service.inference.segment import segment
from service.training.evaluate import score

MIN_LATE_NUCLEI = 16
# In micrometers, from the web page of BBBC050. The files do not contain it.
EMBRYO_VOXEL_SIZE = VoxelSize(1.75, 0.8, 0.8)


class Stack(NamedTuple):
    """A stack [1, Z, Y, X] of one kind with its labels [Z, Y, X], and the name of its file."""

    kind: str
    volume: Volume
    truth: NDArray[Any]
    name: str = ""


def find_embryos(folder: Path) -> Iterator[Stack]:
    """Yield the stacks with labeled nuclei in the test set of BBBC050.

    Raises FileNotFoundError if the folder contains no stacks.
    """
    images = sorted((folder / "Images/test/Images").glob("*.tif"))
    if not images:
        raise FileNotFoundError(
            f"There are no TIFF files in {folder}/Images/test/Images. "
            f"Unpack Images.zip and GroundTruth.zip of BBBC050 into {folder}."
        )
    for path in images:
        truth = tifffile.imread(folder / "GroundTruth/test/GroundTruth_QCANet" / path.name)
        if count := len(np.unique(truth[truth > 0])):
            volume = Volume.from_array(tifffile.imread(path)[None], EMBRYO_VOXEL_SIZE)
            yield Stack("late" if count >= MIN_LATE_NUCLEI else "early", volume, truth, path.stem)


def report(segment: Callable[[Volume], NDArray[Any]], stacks: Iterable[Stack]) -> Iterator[str]:
    """Yield the lines of the table, and write the F1 of each stack to standard error.

    `segment` returns the labels [Z, Y, X] of a volume.
    """
    f1_by_kind = dict[str, list[tuple[float, float]]]()
    for stack in stacks:
        sizes = dict.fromkeys((stack.volume.voxel_size, None))
        f1 = {size: score(stack.truth, segment(_with_size(stack.volume, size))).f1 for size in sizes}
        f1_by_kind.setdefault(stack.kind, []).append((f1[stack.volume.voxel_size], f1[None]))
        sys.stderr.write(f"{stack.kind}: {' '.join(f'{value:.2f}' for value in f1_by_kind[stack.kind][-1])}\n")
    yield "| stacks | number | F1 with voxel size | F1 without voxel size |\n|---|---|---|---|"
    for kind, scores in f1_by_kind.items():
        with_size, without_size = np.mean(scores, axis=0)
        yield f"| {kind} | {len(scores)} | {with_size:.3f} | {without_size:.3f} |"


def _with_size(volume: Volume, voxel_size: VoxelSize | None) -> Volume:
    return Volume.from_array(volume.read_all(), voxel_size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nuclei", help="name or folder of the model")
    parser.add_argument("--stacks", type=int, default=32, help="number of synthetic stacks of each kind")
    parser.add_argument(
        "--embryos", type=Path, metavar="FOLDER", help="folder with Images/ and GroundTruth/ of BBBC050"
    )
    options = parser.parse_args(arguments)
    runner = start_segmenter(options.model)
    stacks = [Stack(*stack) for stack in make_stacks(runner.spec.name, options.stacks)]
    # F1 is meaningless for noise, which contains no objects.
    stacks = [stack for stack in stacks if stack.truth.any()]
    if options.embryos is not None:
        stacks += find_embryos(options.embryos)
    lines = report(lambda volume: segment(runner, volume, Options()).segmentation.pixels, stacks)
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
