"""Compare the throughput of many concurrent small stacks with that of one large stack.

python benchmarks/share.py [--repeats 5] [--clients 8] [--threads N] [--json FILE]

One client sends the large stack to a real server with the bundled model. Then several concurrent clients, each over one
persistent connection, send the same number of windows as stacks of a single window. Both alternate for --repeats
rounds. Windows per second are measured from the first byte sent to the last byte received. CPU seconds are those of
the server with its child processes, and depend little on other work on the machine.

Raises SystemExit if the labels of a small stack differ from those of the same stack sent alone. With
STACKSEG_LIMITS__AT_ONCE=1, requests do not share batches.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import tifffile
from common import ROOT, TIFF, parse_server_timing
from end_to_end import read_metrics, serve_model, synthetic_nuclei
from numpy.typing import NDArray
from processes import cpu_seconds

from service.inference.windows.grid import Grid
from service.models.repository import read_spec

# Number of different small stacks. They differ so that swapped labels would be noticed.
STACKS = 8


def fingerprint(content: bytes) -> str:
    """Return a hash of the labels in a file. The files themselves differ, because each contains a unique identifier."""
    return hashlib.sha256(tifffile.imread(io.BytesIO(content)).tobytes()).hexdigest()


def encode_tiff(pixels: NDArray[Any]) -> bytes:
    """Return an ImageJ TIFF of a stack [Z, Y, X]."""
    file = io.BytesIO()
    tifffile.imwrite(
        file, pixels, imagej=True, resolution=(4, 4), metadata={"axes": "ZYX", "spacing": 0.5, "unit": "um"}
    )
    return file.getvalue()


def count_windows(port: int, model: str) -> tuple[float, float]:
    """Return the number of windows computed so far, and the total number of slots in their batches."""
    metrics = read_metrics(port)
    names = ("stackseg_windows_total", "stackseg_batch_slots_total")
    windows, capacity = (metrics.get(f'{name}{{model="{model}"}}', 0.0) for name in names)
    return windows, capacity


def post_sequentially(port: int, overlap: float, stacks: list[bytes]) -> dict[str, Any]:
    """Send stacks over one connection; return the elapsed seconds, the seconds of each stage, and the responses."""
    stages, responses = Counter[str](), list[bytes]()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=3600)) as connection:
        began = time.perf_counter()
        for stack in stacks:
            connection.request("POST", f"/segment?overlap={overlap}&diameter=none", stack, TIFF)
            response = connection.getresponse()
            responses.append(response.read())
            if response.status != 200:
                raise SystemExit(f"The server responded with status {response.status}: {responses[-1].decode()}")
            stages.update(parse_server_timing(response.headers["Server-Timing"]))
        return {"seconds": time.perf_counter() - began, "stages": dict(stages), "answers": responses}


def post_concurrently(port: int, overlap: float, client_stacks: list[list[bytes]]) -> dict[str, Any]:
    """Send each list of stacks with a separate client, concurrently; return the same as `post_sequentially`."""
    with ThreadPoolExecutor(len(client_stacks)) as pool:
        began = time.perf_counter()
        results = list(pool.map(partial(post_sequentially, port, overlap), client_stacks))
        seconds = time.perf_counter() - began
    stages = sum((Counter(result["stages"]) for result in results), Counter[str]())
    return {
        "seconds": seconds,
        "stages": dict(stages),
        "answers": [result["answers"] for result in results],
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all repeats, alternating between large and small stacks, after a large stack that warms up the server."""
    spec = read_spec(options.model)
    large = synthetic_nuclei(tuple(options.shape))
    windows = Grid.cover(large.shape, spec.input.roi_size, options.overlap).num_windows
    small_stacks = [encode_tiff(synthetic_nuclei(spec.input.roi_size, seed)) for seed in range(1, STACKS + 1)]
    stacks_per_client = -(-windows // options.clients)
    client_stacks = [
        [small_stacks[(client + turn) % STACKS] for turn in range(stacks_per_client)]
        for client in range(options.clients)
    ]
    runs: dict[str, list[dict[str, Any]]] = {"large": [], "small": []}
    with serve_model(options.model, options.threads, folder) as (pid, port):
        expected_labels = dict(
            zip(
                small_stacks,
                map(fingerprint, post_sequentially(port, options.overlap, small_stacks)["answers"]),
                strict=True,
            )
        )
        if len(set(expected_labels.values())) < STACKS:
            raise SystemExit("Different stacks have the same labels, so swapped labels would not be noticed.")
        content = encode_tiff(large)
        post_sequentially(port, options.overlap, [content])
        for repeat in range(options.repeats):
            for name, results in runs.items():
                before, cpu_before = count_windows(port, spec.name), cpu_seconds(pid)
                run = (
                    post_sequentially(port, options.overlap, [content])
                    if name == "large"
                    else post_concurrently(port, options.overlap, client_stacks)
                )
                after, run["cpu"] = count_windows(port, spec.name), cpu_seconds(pid) - cpu_before
                run["windows"], run["slots"] = (now - then for now, then in zip(after, before, strict=True))
                results.append(run)
                rate = run["windows"] / run["seconds"]
                print(f"repeat {repeat + 1}: {name} {rate:.2f} windows/s", file=sys.stderr)
            # Decode the labels only now: during the measurement, it would compete with the server for cores.
            responses = {name: results[-1].pop("answers") for name, results in runs.items()}
            labels = [[fingerprint(content) for content in share] for share in responses["small"]]
            if labels != [[expected_labels[stack] for stack in share] for share in client_stacks]:
                raise SystemExit("Labels of concurrent stacks differ from the labels of the same stacks sent alone.")
    return runs


def report(runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Print the results and return them."""
    print(f"{options.clients} clients, {options.threads} threads, load average {os.getloadavg()[1]:.1f}")
    rates = {name: [run["windows"] / run["seconds"] for run in results] for name, results in runs.items()}
    for name, results in runs.items():
        fill = sum(run["windows"] for run in results) / sum(run["slots"] for run in results)
        print(f"{name}: {statistics.median(rates[name]):.2f} windows/s in the median, batches {fill:.0%} full")
        stages = sum((Counter(run["stages"]) for run in results), Counter[str]())
        windows = sum(run["windows"] for run in results)
        print(f"   CPU ms per window: {1000 * sum(run['cpu'] for run in results) / windows:.0f}")
        print(
            "   ms per window:",
            ", ".join(f"{stage} {1000 * seconds / windows:.1f}" for stage, seconds in stages.items()),
        )
    ratios = [small / large for small, large in zip(rates["small"], rates["large"], strict=True)]
    print(f"small / large: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")
    return {"rates": rates, "ratios": ratios, "runs": runs, "clients": options.clients, "threads": options.threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei", help="instance segmentation model")
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 512, 512), metavar=("Z", "Y", "X"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--overlap", type=float, default=0.25, help="0: all windows cover the same number of voxels")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of the server")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        report_values = report(measure(options, Path(folder)), options)
    if options.json is not None:
        options.json.write_text(json.dumps(report_values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
