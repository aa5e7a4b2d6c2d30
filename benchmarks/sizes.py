"""What does it cost to estimate how wide the objects of a stack are?

python benchmarks/sizes.py [STACK ...] [--model models/nuclei] [--repeats 3] [--threads 1]

Each stack, or a synthetic one of 64 x 512 x 512 voxels if none is named, is segmented by one segmenter in turn with
diameter=auto, with auto once more, which remembers the stack, and with the width that was found stated. CPU seconds of
each in the median; the estimate's share is what auto takes longer than the stated width, of auto. Where no width is
found, the stated one is none.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import tifffile
from alone import parser, timed, warm_segmenter
from end_to_end import synthetic_nuclei
from numpy.typing import NDArray

from service.core.volume import Options, Volume
from service.segmenter import Result, Segmenter


def measure(segmenter: Segmenter, pixels: NDArray[Any], repeats: int) -> tuple[Result, list[float]]:
    """The result, and the median seconds of auto, of auto again, and of the width stated."""
    seconds = list[tuple[float, ...]]()
    for repeat in range(repeats):
        # Another stack, if only by one voxel, is not remembered.
        other = pixels.copy()
        other[0, 0, repeat] += 1
        volume = Volume.from_array(other[None])
        result, first = timed(segmenter, volume, Options(diameter="auto"))
        found = "none" if result.diameter is None else result.diameter
        again, stated = (timed(segmenter, volume, Options(diameter=said))[1] for said in ("auto", found))
        seconds.append((first, again, stated))
    return result, [statistics.median(column) for column in zip(*seconds, strict=True)]


def main() -> None:
    options = parser(__doc__, stacks="*", repeats=3).parse_args()
    segmenter = warm_segmenter(options)
    print("| stack | width | CPU s, auto | again | stated | share of the estimate |\n|---|---|---|---|---|---|")
    cases = [(stack.parent.name, tifffile.imread(stack)) for stack in options.stacks]
    for name, pixels in cases or [("synthetic", synthetic_nuclei((64, 512, 512)))]:
        result, (first, again, stated) = measure(segmenter, pixels, options.repeats)
        width = f"{result.diameter}" if result.diameter else "not found"
        shape = " x ".join(map(str, np.shape(pixels)))
        share = (first - stated) / first
        print(f"| {name}, {shape} | {width} | {first:.2f} | {again:.2f} | {stated:.2f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
