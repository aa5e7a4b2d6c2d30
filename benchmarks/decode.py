"""What decoding instances costs beside the network, on a dense synthetic stack.

python benchmarks/decode.py [--size 64 512 512] [--model models/nuclei] [--engine eager] [--threads 0] [--repeats 2]

The stack is full of nuclei that touch. The network and the decoder take turns; seconds are the least of all runs, CPU
seconds those of all threads together: on a machine shared with other work they are the ones to trust.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from service import hardware
from service.config import read_settings
from service.engine import select
from service.networks import load
from service.postprocess import make_decoder
from service.preprocess import prepare
from service.repository import read_spec
from service.training.synthesis import Scene, synthesise
from service.volume import Volume
from service.windows import Blending, SlidingWindow

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


class Seconds(NamedTuple):
    """Of one stage: by the clock, and of all threads together."""

    wall: float
    cpu: float


@contextmanager
def timed(into: list[Seconds]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    into.append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))


def least(runs: list[Seconds]) -> Seconds:
    return Seconds(*(min(column) for column in zip(*runs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=[64, 512, 512])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads or hardware.usable_cores())
    spec = read_spec(options.model)
    module = load(spec).to(memory_format=torch.channels_last_3d)
    window = SlidingWindow(
        module,
        1,
        spec.input.roi_size,
        1,
        blending=Blending(),
        device=torch.device("cpu"),
        memory_format=torch.channels_last_3d,
    )
    settings = read_settings(None, {"STACKSEG_ENGINE__KIND": options.engine}).engine
    window = window.with_network(select.build(module, window.batch, settings).network)
    depth, height, width = options.size
    image, truth = synthesise(np.random.default_rng(3), (depth, height, width), SCENE)
    prepared = prepare(Volume.from_array(image[None]), spec).image
    network, decoding = list[Seconds](), list[Seconds]()
    for _ in range(options.repeats):
        with timed(network):
            slabs = list(window.run(prepared, 0.25))
        with timed(decoding), torch.inference_mode():
            decoder = make_decoder(spec, (depth, height, width), "labels", None)
            for slab in slabs:
                decoder.add(slab.z0, slab.y0, slab.scores)
            found = decoder.finish()
    print(f"{truth.max()} nuclei, {found.count} found, {np.count_nonzero(found.pixels) / truth.size:.0%} foreground")
    print("| stage | s | CPU s |\n|---|---|---|")
    for stage, seconds in (("network", least(network)), ("decode", least(decoding))):
        print(f"| {stage} | {seconds.wall:.2f} | {seconds.cpu:.2f} |")
    ratios = (d / n for d, n in zip(least(decoding), least(network), strict=True))
    print("| decode / network | {:.1%} | {:.1%} |".format(*ratios))


if __name__ == "__main__":
    main()
