"""What decoding instances costs beside the network, on a dense synthetic stack.

python benchmarks/decode.py [--size 64 512 512] [--model models/nuclei] [--engine eager] [--threads 0] [--repeats 2]

The stack is full of nuclei that touch. Seconds are the least of all runs, the share is their median: of one run, both
stages share the same load of the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import numpy as np

from service.config import read_settings
from service.repository import read_spec
from service.segmenter import Segmenter
from service.training.synthesis import Scene, synthesise
from service.volume import Options, Volume

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=[64, 512, 512])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--engine", default="eager")
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument("--repeats", type=int, default=2)
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


if __name__ == "__main__":
    main()
