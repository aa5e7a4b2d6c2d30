"""What does it cost to estimate how wide the objects of a stack are?

python benchmarks/sizes.py [STACK ...] [--model models/nuclei] [--repeats 3] [--threads 1]

Each stack, or a synthetic one of 64 x 512 x 512 voxels if none is named, is segmented by one segmenter in turn with
diameter=auto, with auto once more, which remembers the stack, and with the width that was found stated. CPU seconds of
each in the median; the estimate's share is what auto takes longer than the stated width, of auto. Where no width is
found, the stated one is none.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from end_to_end import ROOT, synthetic_nuclei
from numpy.typing import NDArray

from service.config import overruled, read_settings
from service.repository import read_spec
from service.segmenter import Result, Segmenter
from service.volume import ObjectSize, Options, Volume


def timed(segmenter: Segmenter, volume: Volume, diameter: ObjectSize) -> tuple[Result, float]:
    began = time.process_time()
    result = segmenter.segment(volume, Options(diameter=diameter))
    return result, time.process_time() - began


def measure(segmenter: Segmenter, pixels: NDArray[Any], repeats: int) -> tuple[Result, list[float]]:
    """The result, and the median seconds of auto, of auto again, and of the width stated."""
    seconds = list[tuple[float, ...]]()
    for repeat in range(repeats):
        # Another stack, if only by one voxel, is not remembered.
        other = pixels.copy()
        other[0, 0, repeat] += 1
        volume = Volume.from_array(other[None])
        result, first = timed(segmenter, volume, "auto")
        found = "none" if result.diameter is None else result.diameter
        seconds.append((first, timed(segmenter, volume, "auto")[1], timed(segmenter, volume, found)[1]))
    return result, [statistics.median(column) for column in zip(*seconds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", type=Path, nargs="*", metavar="STACK", help="TIFF of one channel, ZYX")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = overruled(read_settings(None), "device", {"name": "cpu", "threads": options.threads})
    segmenter = Segmenter(read_spec(options.model), settings)
    segmenter.warm_up()
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
