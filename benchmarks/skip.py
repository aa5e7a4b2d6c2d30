"""What does it bring not to compute windows in which there is nothing?

python benchmarks/skip.py STACK [STACK ...] [--skip-below auto] [--model models/nuclei] [--repeats 5] [--threads 1]

Each stack is segmented by one segmenter in turn with all of its windows and without the dark ones. CPU seconds are
those of the whole, looking for dark windows included; ratios are of pairs that ran one after the other. Beside them the
share of windows that was skipped, and of voxels that are labelled in one result and not in the other.
"""

from __future__ import annotations

import statistics

import numpy as np
import tifffile
from alone import parser, timed, warm_segmenter

from service.core.volume import Options, Volume, parse_grey


def main() -> None:
    arguments = parser(__doc__, stacks="+", repeats=5)
    arguments.add_argument("--skip-below", default="auto", help="as the parameter of POST /segment")
    options = arguments.parse_args()
    segmenter = warm_segmenter(options)
    every_window = Options(diameter="none", skip_below="none")
    bright_ones = Options(diameter="none", skip_below=parse_grey(options.skip_below))
    print("| stack | skipped | CPU s, all windows | CPU s, skipping | ratio | voxels that differ |")
    print("|---|---|---|---|---|---|")
    for stack in options.stacks:
        volume = Volume.from_array(tifffile.imread(stack)[None])
        pairs = [
            (timed(segmenter, volume, every_window), timed(segmenter, volume, bright_ones))
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
