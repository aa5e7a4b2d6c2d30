"""How block-wise segmentation scales: a simulation of many workers from the times of recorded blocks.

python benchmarks/blocks.py overhead --records FILE
python benchmarks/blocks.py memory --records LARGE
python benchmarks/blocks_scaling.py FILE --large LARGE [--voxels 1e12] [--faster 30] [--storage 20] [--client 2]
    [--workers 1 8 64 512]

Blocks of one volume of so many voxels are given to workers in the order in which they are ready, each with the
processor's seconds that blocks of its kind took on one core here: to read and score its windows, to blend and decode
its tile, to write labels. --faster says how many times as fast as that core a GPU computes windows; the rest stays as
it was on one core, which each worker has. To that come the bytes that a block reads and writes on shared storage, which
gives --storage GB/s to all workers together and --client GB/s to each. All workers count grey values before, and look
up after where paths go on in other tiles; one process merges the counts, and one joins the pieces. Prints a row for
each number of workers: seconds of each step, the share of all workers' time in which windows are computed, and what
takes most of it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from common import write_figures


class Rates(NamedTuple):
    """Seconds of one core for a window, in the network and around it, and for a voxel of each other step."""

    network: float
    window: float
    tile: float
    labels: float
    count: float
    merge: float
    link: float
    join: float


class Bytes(NamedTuple):
    """Bytes that go over the network for each voxel: pixels, scores written and read, pieces, labels."""

    pixels: float
    scores: float
    pieces: float
    labels: float


def measure(facts: dict[str, Any], large: dict[str, Any]) -> tuple[Rates, Bytes, float, float]:
    """Return rates and bytes of recorded blocks, windows for each voxel, and voxels of a tile.

    The steps of one process are those of a `large` run, as what they take for any run at all would count too often.
    """
    records, voxels = facts["records"], math.prod(facts["shape"])
    alone = {step: large["records"][step][0]["cpu"] / math.prod(large["shape"]) for step in ("survey", "join")}
    cpu = {step: sum(record["cpu"] for record in records[step]) for step in records}
    scores = records["scores"]
    windows = sum(record["windows"] for record in scores)
    clock = sum(sum(record["seconds"].values()) for record in scores)
    network = cpu["scores"] * sum(record["seconds"]["windows"] for record in scores) / clock
    rates = Rates(
        network / windows,
        (cpu["scores"] - network) / windows,
        cpu["tile"] / voxels,
        cpu["labels"] / voxels,
        cpu["count"] / voxels,
        alone["survey"],
        cpu["link"] / voxels,
        alone["join"],
    )
    # Of a cube of windows, each tile reads its own and one more on each side that it shares with groups before it.
    again = math.prod((n + 1) / n for n in facts["windows"])
    pieces = sum(record["bytes"] for record in records["tile"] if not record["empty"]) / voxels
    return (
        rates,
        Bytes(2 * again, sum(record["bytes"] for record in scores) / voxels * (1 + again), 2 * pieces, 4),
        windows / voxels,
        voxels / len(records["tile"]),
    )


def simulate(facts: dict[str, Any], workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of each step, and what limits them."""
    rates, moved, density, tile = measure(facts, options.large)
    tiles = max(round(options.voxels / tile), 1)
    bandwidth = 1e9 * min(options.client, options.storage / workers)
    compute = tile * density * rates.network / options.faster
    beside = tile * (density * rates.window + rates.tile)
    moving = tile * (moved.pixels + moved.scores + moved.pieces / 2) / bandwidth
    free = [0.0] * workers
    for _ in range(tiles):
        heapq.heapreplace(free, free[0] + compute + beside + moving)
    steps = {
        "count": options.voxels * (rates.count + 2 / bandwidth) / workers,
        "merge": options.voxels * rates.merge,
        "blocks": max(free),
        "link": options.voxels * rates.link / workers,
        "join": options.voxels * rates.join,
        "labels": options.voxels * (rates.labels / workers + (moved.pieces / 2 + moved.labels) / bandwidth / workers),
    }
    total = sum(steps.values())
    parts = {
        "windows": tiles * compute / workers,
        "cores beside the network": (tiles * beside + options.voxels * (rates.count + rates.link + rates.labels))
        / workers,
        "storage": (tiles * moving + options.voxels * (2 + moved.pieces / 2 + moved.labels) / bandwidth) / workers,
        "merging counts by one process": steps["merge"],
        "join by one process": steps["join"],
    }
    return {
        "workers": workers,
        "hours": total / 3600,
        "busy": parts["windows"] / total,
        "seconds": {name: round(seconds, 1) for name, seconds in steps.items()},
        "shares": {name: round(seconds / total, 3) for name, seconds in parts.items()},
        "most": max(parts, key=lambda name: parts[name]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--large", type=Path, help="records of a larger run, whose steps of one process count")
    parser.add_argument("--voxels", type=float, default=1e12)
    parser.add_argument("--faster", type=float, default=30)
    parser.add_argument("--storage", type=float, default=20)
    parser.add_argument("--client", type=float, default=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    facts = json.loads(options.records.read_text(encoding="utf-8"))
    options.large = json.loads(options.large.read_text(encoding="utf-8")) if options.large else facts
    rows = [simulate(facts, workers, options) for workers in options.workers]
    for row in rows:
        print(
            f"| {row['workers']} | {row['hours']:.2f} | {rows[0]['hours'] / row['hours']:.1f} | {row['busy']:.0%} |"
            f" {row['most']} |"
        )
    write_figures({"rates": measure(facts, options.large)[0]._asdict(), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
