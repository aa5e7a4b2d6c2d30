"""Score a model on what weights are chosen by: `python -m scripts.recipes.held_out [--model NAME] [--embryos FOLDER]`.

These are synthetic stacks from seeds that no training draws, and, where FOLDER has what is in `Images.zip` and
`GroundTruth.zip` of https://bbbc.broadinstitute.org/BBBC050, the early mouse embryos of its test set: *late* ones with
at least 16 labelled nuclei and *early* ones with fewer. Nothing is told but the voxel size, and in the last column not
even that. The table has the mean F1 at an IoU of 0.5 of each kind, with every label counted.
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
from scripts.recipes.trials import stacks_for
from service.core.quantities import VoxelSize
from service.core.types import Options, Volume
from service.inference.segment import segment
from service.training.evaluate import score

LATE_NUCLEI = 16
# Micrometres, by the page of BBBC050; its files do not say it.
EMBRYO_VOXEL = VoxelSize(1.75, 0.8, 0.8)


class Stack(NamedTuple):
    """A stack [1, Z, Y, X] with its labels [Z, Y, X], and its kind."""

    kind: str
    volume: Volume
    truth: NDArray[Any]


def find_embryos(folder: Path) -> Iterator[Stack]:
    """Yield the stacks of BBBC050's test set that have labels. Raises FileNotFoundError where there is none."""
    images = sorted((folder / "Images/test/Images").glob("*.tif"))
    if not images:
        raise FileNotFoundError(f"{folder}/Images/test/Images is empty: unpack Images.zip and GroundTruth.zip there.")
    for path in images:
        truth = tifffile.imread(folder / "GroundTruth/test/GroundTruth_QCANet" / path.name)
        if count := len(np.unique(truth[truth > 0])):
            volume = Volume.from_array(tifffile.imread(path)[None], EMBRYO_VOXEL)
            yield Stack("late" if count >= LATE_NUCLEI else "early", volume, truth)


def report(segment: Callable[[Volume], NDArray[Any]], stacks: Iterable[Stack]) -> Iterator[str]:
    """Yield the lines of the table; `segment` returns labels [Z, Y, X]. The F1 of each goes to standard error."""
    reached = dict[str, list[tuple[float, float]]]()
    for stack in stacks:
        sizes = dict.fromkeys((stack.volume.voxel_size, None))
        f1 = {size: score(stack.truth, segment(_with_size(stack.volume, size))).f1 for size in sizes}
        reached.setdefault(stack.kind, []).append((f1[stack.volume.voxel_size], f1[None]))
        sys.stderr.write(f"{stack.kind}: {' '.join(f'{value:.2f}' for value in reached[stack.kind][-1])}\n")
    yield "| stacks | number | told the voxel size | told nothing |\n|---|---|---|---|"
    for kind, scores in reached.items():
        told, untold = np.mean(scores, axis=0)
        yield f"| {kind} | {len(scores)} | {told:.3f} | {untold:.3f} |"


def _with_size(volume: Volume, voxel_size: VoxelSize | None) -> Volume:
    return Volume.from_array(volume.array(), voxel_size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nuclei", help="name or folder")
    parser.add_argument("--stacks", type=int, default=32, help="synthetic ones, of each kind")
    parser.add_argument("--embryos", type=Path, metavar="FOLDER", help="with Images/ and GroundTruth/ of BBBC050")
    chosen = parser.parse_args(arguments)
    runner = start_segmenter(chosen.model)
    stacks = [Stack(*each) for each in stacks_for(runner.spec.name, chosen.stacks)]
    # In noise there is nothing to find, so that F1 says nothing.
    stacks = [stack for stack in stacks if stack.truth.any()]
    if chosen.embryos is not None:
        stacks += find_embryos(chosen.embryos)
    lines = report(lambda volume: segment(runner, volume, Options()).segmentation.pixels, stacks)
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
