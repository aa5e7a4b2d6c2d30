"""Measure the detection of objects in the scores of a stack: how fast it is, and how it scales with threads.

python benchmarks/decode.py [--shape 64 512 512] [--threads 1 2 4 ...] [--repeats 9] [--slab 48] [--scores FILE]

The scores are those of ellipsoids on a jittered lattice. They arrive in slabs of `--slab` rows, as from a row of
windows, and thread counts alternate. `all slabs` is the time from the first slab to the labels, and `last slab` is
the time from the last slab to the labels, which a request waits for after its last window. The serial fraction is
that of Karp and Flatt: (n / speed-up - 1) / (n - 1) for n threads. Raises AssertionError if labels differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import ROOT
from torch import Tensor

from service.inference.decoding.decoders import make_decoder
from service.inference.windows.grid import as_size
from service.models.repository import read_spec
from service.models.spec import ModelSpec

# Distance between the centers of the ellipsoids, and their mean radii, in voxels along (z, y, x).
PITCH = (14, 22, 22)
RADII = (6.0, 9.5, 9.5)


class Timing(NamedTuple):
    """Wall-clock seconds from the first slab to the labels, from the last slab to the labels, and CPU seconds."""

    all_slabs: float
    last_slab: float
    cpu: float


def make_scores(shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    """Return logits of the foreground and of the distance, float32 [1, 2, Z, Y, X]."""
    rng = np.random.default_rng(seed)
    distance = np.full(shape, -1.0, np.float32)
    for cell in np.ndindex(*(np.array(shape) // PITCH)):
        center = (np.array(cell) + 0.5 + rng.uniform(-0.2, 0.2, 3)) * PITCH
        radii = np.array(RADII) * rng.uniform(0.7, 1.1)
        low, high = np.maximum(center - 2 * radii, 0).astype(int), np.minimum(center + 2 * radii, shape).astype(int)
        box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        terms = [((g - c) / r) ** 2 for g, c, r in zip(np.ogrid[box], center, radii, strict=True)]
        distance[box] = np.maximum(distance[box], 1 - np.sqrt(terms[0] + terms[1] + terms[2]))
    distance += rng.normal(0, 0.01, shape).astype(np.float32)
    probability = distance.clip(0.001, 0.999)
    return torch.from_numpy(np.stack([8 * distance, np.log(probability / (1 - probability))]))[None]


def decode(spec: ModelSpec, scores: Tensor, slab: int, threads: int) -> tuple[Timing, str]:
    """Decode scores [1, K, Z, Y, X] in slabs of `slab` rows; return the times and a hash of the labels."""
    slabs = [part.contiguous() for part in scores.split(slab, 3)]
    decoder = make_decoder(spec, as_size(scores.shape[2:]), "labels", None, threads=threads)
    began, cpu, row = time.perf_counter(), time.process_time(), 0
    last = began
    for part in slabs:
        last = time.perf_counter()
        decoder.add(0, row, part)
        row += part.shape[3]
    labels = decoder.finish().pixels
    ended = time.perf_counter()
    timing = Timing(ended - began, ended - last, time.process_time() - cpu)
    return timing, hashlib.sha256(labels.tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 512, 512), metavar=("Z", "Y", "X"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--slab", type=int, default=48, help="number of rows that arrive together")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    options = parser.parse_args()
    spec, scores = read_spec(options.model), make_scores(tuple(options.shape))
    timings: dict[int, list[Timing]] = {threads: [] for threads in options.threads}
    hashes = set[str]()
    for _ in range(options.repeats):
        for threads, results in timings.items():
            timing, digest = decode(spec, scores, options.slab, threads)
            results.append(timing)
            hashes.add(digest)
    if len(hashes) != 1:
        raise AssertionError("the labels depend on the number of threads")
    print(
        "| threads | all slabs, ms | last slab, ms | CPU ms | speed-up | serial fraction |\n|---|---|---|---|---|---|"
    )
    baseline = statistics.median(timing.all_slabs for timing in timings[options.threads[0]])
    for threads, results in timings.items():
        medians = Timing(*(statistics.median(column) for column in zip(*results, strict=True)))
        speed_up = baseline / medians.all_slabs
        serial = f"{(threads / speed_up - 1) / (threads - 1):.3f}" if threads > 1 else ""
        milliseconds = " | ".join(f"{1000 * seconds:.0f}" for seconds in medians)
        print(f"| {threads} | {milliseconds} | {speed_up:.2f} | {serial} |")


if __name__ == "__main__":
    main()
