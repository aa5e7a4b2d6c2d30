"""What does it bring not to compute windows in which there is nothing?

python benchmarks/skip.py STACK [STACK ...] [--skip-below auto] [--model models/nuclei] [--repeats 5] [--threads 1]

Each stack is segmented by one segmenter in turn with all of its windows and without the dark ones. CPU seconds are
those of the whole, looking for dark windows included; ratios are of pairs that ran one after the other. Beside them the
share of windows that was skipped, and of voxels that are labelled in one result and not in the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import tifffile
from end_to_end import ROOT

from service.config import overruled, read_settings
from service.repository import read_spec
from service.segmenter import Result, Segmenter
from service.volume import Options, SkipBelow, Volume, parse_grey


def timed(segmenter: Segmenter, volume: Volume, below: SkipBelow) -> tuple[Result, float]:
    began = time.process_time()
    result = segmenter.segment(volume, Options(diameter="none", skip_below=below))
    return result, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", type=Path, nargs="+", metavar="STACK", help="TIFF of one channel, ZYX")
    parser.add_argument("--skip-below", default="auto", help="as the parameter of POST /segment")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = overruled(read_settings(None), "device", {"name": "cpu", "threads": options.threads})
    segmenter = Segmenter(read_spec(options.model), settings)
    segmenter.warm_up()
    print("| stack | skipped | CPU s, all windows | CPU s, skipping | ratio | voxels that differ |")
    print("|---|---|---|---|---|---|")
    for stack in options.stacks:
        volume = Volume.from_array(tifffile.imread(stack)[None])
        pairs = [
            (timed(segmenter, volume, "none"), timed(segmenter, volume, parse_grey(options.skip_below)))
            for _ in range(options.repeats)
        ]
        (whole, _), (part, _) = pairs[-1]
        differing = np.mean((whole.segmentation.pixels > 0) != (part.segmentation.pixels > 0))
        every, fewer = (statistics.median(seconds for _, seconds in runs) for runs in zip(*pairs, strict=True))
        ratios = [after / before for (_, before), (_, after) in pairs]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {stack.parent.name} | {part.skipped} | {every:.2f} | {fewer:.2f} | {spread} | {differing:.2e} |")
        for note in part.notes:
            print(note)


if __name__ == "__main__":
    main()
