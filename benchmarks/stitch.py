"""CPU time of what stands beside the network: cutting windows, and blending their scores, by the kernel and without it.

python benchmarks/stitch.py --shape 64 512 512 --overlap 0.25 --outputs 2 --repeats 7

Both ways in turn, on one thread, on noise of uint16, with scores in either layout; CPU ms per window, least (median),
and what share that is of a forward of so many milliseconds (`--forward`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from service import preprocess
from service.blending import Blending, Grid, blender
from service.core.volume import Volume
from service.preprocess import Image, Scaling
from service.stitching import Stitching, stitching

CPU = torch.device("cpu")
# As many scores as leave a processor's cache before they come again, as those of a network would.
WINDOWS = 24


def cut(image: Image, grid: Grid, kernel: Stitching, out: Tensor) -> None:
    preprocess.stitching = kernel
    for place in grid.positions():
        z, y, x = (slice(start, start + edge) for start, edge in zip(place, grid.roi, strict=True))
        image.write((0, slice(None), z, y, x), out)


def blend(windows: list[Tensor], grid: Grid, kernel: Stitching) -> None:
    made = blender(grid, len(windows[0]), Blending(), CPU, kernel)
    for index, place in enumerate(grid.positions()):
        made.add(place, windows[index % len(windows)])


def spent(call: Callable[[], None], windows: int) -> float:
    """CPU ms per window."""
    began = time.process_time()
    call()
    return (time.process_time() - began) / windows * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 512, 512), metavar=("Z", "Y", "X"))
    parser.add_argument("--roi", type=int, nargs=3, default=(64, 64, 64), metavar=("Z", "Y", "X"))
    parser.add_argument("--overlap", type=float, default=0.25)
    parser.add_argument("--outputs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--forward", type=float, default=37.0, metavar="MS", help="of a window, to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stitching.prepare()
    assert stitching.suits(CPU), "no kernel: is there a C++ compiler?"
    grid = Grid.cover(tuple(options.shape), tuple(options.roi), options.overlap)
    pixels = np.random.default_rng(0).integers(0, 4000, (1, *options.shape), np.uint16)
    image, out = Image(Volume.from_array(pixels), [Scaling(300.0, 2000.0)]), torch.zeros(1, *grid.roi)
    scores = torch.randn(WINDOWS, options.outputs, *grid.roi)
    last = list(scores.to(memory_format=torch.channels_last_3d))
    narrow = list(scores.bfloat16())
    calls = {
        "cut": lambda kernel: cut(image, grid, kernel, out),
        "blend": lambda kernel: blend(list(scores), grid, kernel),
        "blend, bfloat16": lambda kernel: blend(narrow, grid, kernel),
        "blend, channels last": lambda kernel: blend(last, grid, kernel),
    }
    print(f"{grid.count} windows\n\n| part | torch, ms per window | kernel | times as fast | share of a forward |")
    print("|---|---|---|---|---|")
    with torch.inference_mode():
        for name, call in calls.items():
            ways = {"torch": Stitching(), "kernel": stitching}
            for kernel in ways.values():
                call(kernel)
            taken = [
                {way: spent(lambda kernel=kernel, call=call: call(kernel), grid.count) for way, kernel in ways.items()}
                for _ in range(options.repeats)
            ]
            columns = {way: [one[way] for one in taken] for way in ways}
            times = [f"{min(column):.2f} ({statistics.median(column):.2f})" for column in columns.values()]
            ratio = statistics.median(one["torch"] / one["kernel"] for one in taken)
            print(f"| {name} | {' | '.join(times)} | {ratio:.1f} | {min(columns['kernel']) / options.forward:.1%} |")


if __name__ == "__main__":
    main()
