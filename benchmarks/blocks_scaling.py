"""Simulate block-wise segmentation with many workers, from the measured times of recorded blocks.

python benchmarks/blocks.py overhead --records FILE
python benchmarks/blocks.py memory --records LARGE
python benchmarks/blocks_scaling.py FILE --large LARGE [--voxels 1e12] [--faster 30] [--storage 20] [--client 2]
    [--workers 1 8 64 512]

The blocks of one volume with --voxels voxels are assigned to the next free worker. A block takes the CPU seconds
that such blocks took on one core in the recorded run: to read and score its windows, to blend and decode its tile, and
to write its labels. A GPU computes windows --faster times as fast as that core; the other work remains on one core per
worker. Reading and writing are added: the shared storage provides --storage GB/s in total, and up to --client GB/s to
each worker. Before the blocks, all workers count gray values, and one process merges the counts. After the blocks, all
workers join the pieces of regions of tiles, and one process joins the regions.

Prints a row for each number of workers: hours, speed-up, the share of the time in which windows are computed, and the
bottleneck.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from common import write_results


class Rates(NamedTuple):
    """CPU seconds: `network` and `window` per window (in the network, and around it), the others per voxel."""

    network: float
    window: float
    tile: float
    labels: float
    count: float
    merge: float
    region: float
    join: float


class Bytes(NamedTuple):
    """Bytes moved to and from the storage per voxel."""

    pixels: float
    scores: float
    pieces: float
    labels: float


def measure(recorded_run: dict[str, Any], large_run: dict[str, Any]) -> tuple[Rates, Bytes, float, float]:
    """Return the rates, the bytes, the windows per voxel, and the voxels per tile of a recorded run.

    The rates of the single-process steps are those of the `large` run. In a small run, their fixed costs dominate.
    """
    records, voxels = recorded_run["records"], math.prod(recorded_run["shape"])
    single_process = {
        step: sum(record["cpu"] for record in large_run["records"][step]) / math.prod(large_run["shape"])
        for step in ("survey", "join", "objects")
    }
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
        single_process["survey"],
        cpu["region"] / voxels,
        single_process["join"] + single_process["objects"],
    )
    # A tile also reads one layer of windows on each axis that it shares with the previous tile.
    reread = math.prod((n + 1) / n for n in recorded_run["windows"])
    pieces = sum(record["bytes"] for record in records["tile"] if not record["empty"]) / voxels
    return (
        rates,
        Bytes(2 * reread, sum(record["bytes"] for record in scores) / voxels * (1 + reread), 2 * pieces, 4),
        windows / voxels,
        voxels / len(records["tile"]),
    )


def simulate(recorded_run: dict[str, Any], workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each step and the bottleneck for a number of workers."""
    rates, moved, density, tile = measure(recorded_run, options.large)
    tiles = max(round(options.voxels / tile), 1)
    bandwidth = 1e9 * min(options.client, options.storage / workers)
    network_seconds = tile * density * rates.network / options.faster
    core_seconds = tile * (density * rates.window + rates.tile)
    storage_seconds = tile * (moved.pixels + moved.scores + moved.pieces / 2) / bandwidth
    free_at = [0.0] * workers
    for _ in range(tiles):
        heapq.heapreplace(free_at, free_at[0] + network_seconds + core_seconds + storage_seconds)
    steps = {
        "count": options.voxels * (rates.count + 2 / bandwidth) / workers,
        "merge": options.voxels * rates.merge,
        "blocks": max(free_at),
        "region": options.voxels * rates.region / workers,
        "join": options.voxels * rates.join,
        "labels": options.voxels * (rates.labels / workers + (moved.pieces / 2 + moved.labels) / bandwidth / workers),
    }
    total = sum(steps.values())
    parts = {
        "windows": tiles * network_seconds / workers,
        "cores next to the network": (
            tiles * core_seconds + options.voxels * (rates.count + rates.region + rates.labels)
        )
        / workers,
        "storage": (tiles * storage_seconds + options.voxels * (2 + moved.pieces / 2 + moved.labels) / bandwidth)
        / workers,
        "merging counts in one process": steps["merge"],
        "joining in one process": steps["join"],
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
    parser.add_argument("--large", type=Path, help="records of a larger run, for the single-process steps")
    parser.add_argument("--voxels", type=float, default=1e12)
    parser.add_argument("--faster", type=float, default=30)
    parser.add_argument("--storage", type=float, default=20)
    parser.add_argument("--client", type=float, default=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    recorded_run = json.loads(options.records.read_text(encoding="utf-8"))
    options.large = json.loads(options.large.read_text(encoding="utf-8")) if options.large else recorded_run
    rows = [simulate(recorded_run, workers, options) for workers in options.workers]
    for row in rows:
        print(
            f"| {row['workers']} | {row['hours']:.2f} | {rows[0]['hours'] / row['hours']:.1f} | {row['busy']:.0%} |"
            f" {row['most']} |"
        )
    write_results({"rates": measure(recorded_run, options.large)[0]._asdict(), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
