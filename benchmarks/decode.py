"""What decoding instances costs beside the network, on a dense synthetic stack.

python benchmarks/decode.py [--size 64 512 512] [--model models/nuclei] [--engine eager] [--threads 0] [--repeats 2]
                            [--kernel 0]

The stack is full of nuclei that touch. Seconds are the least of all runs, the share is their median: of one run, both
stages share the same load of the machine. With `--kernel N` the scores of a run are then decoded N times by torch alone
and N times with the kernel in C++, in turn and on one thread: CPU time, and the labels must be the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from service.ascent import Ascent, ascent
from service.blending import Slab
from service.core.config import read_settings
from service.core.volume import Options, Volume
from service.models.repository import Instances, ModelSpec, read_spec
from service.postprocess import InstanceDecoder
from service.segmenter import Segmenter
from service.training.synthesis import Scene, synthesise
from service.windows import SlidingWindow

ROOT = Path(__file__).resolve().parent.parent

SCENE = Scene(
    diameter=20,
    anisotropy=1.6,
    fill=0.3,
    clustering=0.6,
    contact=0.86,
    spread=0.3,
    texture=0.4,
    margin=1.03,
    blur=1.0,
    elongation=0.9,
    haze=0.1,
    floor=0.08,
    glow=0.05,
    ghosts=3,
    shading=0.15,
    attenuation=0.25,
    photons=90,
    read_noise=1.5,
    bits=16,
    saturation=0.0005,
    debris=2,
)


class Recorder:
    """Computes windows as any run does, and keeps a copy of the slabs."""

    def __init__(self) -> None:
        self.slabs: list[Slab] = []

    def __call__(self, *arguments: Any, **others: Any) -> Iterator[Slab]:
        for slab in SlidingWindow.run(*arguments, **others):
            self.slabs.append(slab._replace(scores=slab.scores.clone()))
            yield slab


def decoded(spec: ModelSpec, slabs: list[Slab], kernel: Ascent) -> tuple[NDArray[Any], float]:
    """Labels of recorded slabs, and the CPU seconds that they took."""
    assert isinstance(spec.decoding, Instances)
    size = (
        slabs[-1].z0 + slabs[-1].scores.shape[2],
        slabs[-1].y0 + slabs[-1].scores.shape[3],
        slabs[0].scores.shape[4],
    )
    begin = time.thread_time()
    decoder = InstanceDecoder(spec, spec.decoding, size, None, kernel)
    for slab in slabs:
        decoder.add(slab.z0, slab.y0, slab.scores)
    return decoder.finish().pixels, time.thread_time() - begin


def compare(spec: ModelSpec, slabs: list[Slab], repeats: int) -> None:
    """Print the CPU time of decoding by torch alone and with the kernel."""
    assert ascent.suits(torch.device("cpu")), "no kernel: is there a C++ compiler?"
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"torch": [], "C++": []}
    with torch.inference_mode():
        for _ in range(repeats):
            (expected, slow), (found, fast) = (decoded(spec, slabs, one) for one in (Ascent(), ascent))
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)
            times["torch"].append(slow)
            times["C++"].append(fast)
    print(f"{repeats} times each, the same labels\n\n| decoded by | least, CPU ms | median |\n|---|---|---|")
    for way, taken in times.items():
        print(f"| {way} | {1e3 * min(taken):.2f} | {1e3 * median(taken):.2f} |")
    ratio = median(slow / fast for slow, fast in zip(times["torch"], times["C++"], strict=True))
    print(f"torch / C++: {ratio:.2f} (median)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=[64, 512, 512])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kernel", type=int, default=0, metavar="N", help="compare the ways of decoding, N times")
    options = parser.parse_args()
    settings = {"STACKSEG_ENGINE__KIND": options.engine, "STACKSEG_DEVICE__THREADS": str(options.threads)}
    segmenter = Segmenter(read_spec(options.model), read_settings(None, settings))
    segmenter.warm_up()
    depth, height, width = options.size
    image, truth = synthesise(np.random.default_rng(3), (depth, height, width), SCENE)
    runs = [segmenter.segment(Volume.from_array(image[None]), Options(diameter="none")) for _ in range(options.repeats)]
    found = runs[0].segmentation
    print(f"{truth.max()} nuclei, {found.count} found, {np.count_nonzero(found.pixels) / truth.size:.0%} foreground")
    network, decode = (min(run.seconds[stage] for run in runs) for stage in ("windows", "decode"))
    shares = [run.seconds["decode"] / run.seconds["windows"] for run in runs]
    print("| windows, s | decode, s | decode / windows |\n|---|---|---|")
    print(f"| {network:.2f} | {decode:.2f} | {median(shares):.1%} |")
    if options.kernel:
        recorder = Recorder()
        segmenter.segment(Volume.from_array(image[None]), Options(diameter="none"), run=recorder)
        compare(segmenter.spec, recorder.slabs, options.kernel)


if __name__ == "__main__":
    main()
