"""Many small stacks at once against one large stack: how much of the device's pace do they get?

python benchmarks/share.py [--repeats 5] [--clients 8] [--threads N] [--json FILE]

A real server with the bundled model computes the large stack, posted by one client, and then as many windows again in
stacks of a single window, posted by several clients at once, each over one connection that is kept; and so on in turn.
Windows per second count from the first byte that is sent to the last that is received; CPU seconds are the server's,
with its child processes, and hardly depend on what else the machine does. Raises SystemExit where small stacks come
back with other labels than when they are posted alone. With STACKSEG_LIMITS__AT_ONCE=1 nothing is shared.
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
from common import ROOT, TIFF, stage_seconds
from end_to_end import read_metrics, serve_model, synthetic_nuclei
from numpy.typing import NDArray
from processes import cpu_seconds

from service.inference.windows.grid import Grid
from service.models.repository import read_spec

# Different from each other, so that no client's labels could be mistaken for another's.
STACKS = 8


def fingerprint(answer: bytes) -> str:
    """Return a hash of the labels alone; every file has another identifier."""
    return hashlib.sha256(tifffile.imread(io.BytesIO(answer)).tobytes()).hexdigest()


def as_tiff(pixels: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(
        file, pixels, imagej=True, resolution=(4, 4), metadata={"axes": "ZYX", "spacing": 0.5, "unit": "um"}
    )
    return file.getvalue()


def slots(port: int, model: str) -> tuple[float, float]:
    """Return the windows computed so far, and the capacity of their batches."""
    metrics = read_metrics(port)
    names = ("stackseg_windows_total", "stackseg_batch_slots_total")
    windows, capacity = (metrics.get(f'{name}{{model="{model}"}}', 0.0) for name in names)
    return windows, capacity


def post_one_by_one(port: int, overlap: float, stacks: list[bytes]) -> dict[str, Any]:
    """Post stacks over one connection; return the seconds that passed, those of the stages, and the answers."""
    stages, answers = Counter[str](), list[bytes]()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=3600)) as connection:
        began = time.perf_counter()
        for stack in stacks:
            connection.request("POST", f"/segment?overlap={overlap}&diameter=none", stack, TIFF)
            response = connection.getresponse()
            answers.append(response.read())
            if response.status != 200:
                raise SystemExit(f"The server answered {response.status}: {answers[-1].decode()}")
            stages.update(stage_seconds(response.headers["Server-Timing"]))
        return {"seconds": time.perf_counter() - began, "stages": dict(stages), "answers": answers}


def post_at_once(port: int, overlap: float, shares: list[list[bytes]]) -> dict[str, Any]:
    """Post with one client per share at once; return the seconds, the stages and the answers."""
    with ThreadPoolExecutor(len(shares)) as pool:
        began = time.perf_counter()
        parts = list(pool.map(partial(post_one_by_one, port, overlap), shares))
        seconds = time.perf_counter() - began
    stages = sum((Counter(part["stages"]) for part in parts), Counter[str]())
    return {"seconds": seconds, "stages": dict(stages), "answers": [part["answers"] for part in parts]}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All repeats, interleaved; one large stack that is not counted makes the server's buffers warm."""
    spec = read_spec(options.model)
    large = synthetic_nuclei(tuple(options.shape))
    windows = Grid.cover(large.shape, spec.input.roi_size, options.overlap).count
    smalls = [as_tiff(synthetic_nuclei(spec.input.roi_size, seed)) for seed in range(1, STACKS + 1)]
    each = -(-windows // options.clients)
    shares = [[smalls[(client + turn) % STACKS] for turn in range(each)] for client in range(options.clients)]
    runs: dict[str, list[dict[str, Any]]] = {"large": [], "small": []}
    with serve_model(options.model, options.threads, folder) as (pid, port):
        alone = dict(
            zip(smalls, map(fingerprint, post_one_by_one(port, options.overlap, smalls)["answers"]), strict=True)
        )
        if len(set(alone.values())) < STACKS:
            raise SystemExit("Different stacks have the same labels: nothing could be told from them.")
        content = as_tiff(large)
        post_one_by_one(port, options.overlap, [content])
        for repeat in range(options.repeats):
            for name, results in runs.items():
                before, busy = slots(port, spec.name), cpu_seconds(pid)
                run = (
                    post_one_by_one(port, options.overlap, [content])
                    if name == "large"
                    else post_at_once(port, options.overlap, shares)
                )
                after, run["cpu"] = slots(port, spec.name), cpu_seconds(pid) - busy
                run["windows"], run["slots"] = (now - then for now, then in zip(after, before, strict=True))
                results.append(run)
                rate = run["windows"] / run["seconds"]
                print(f"repeat {repeat + 1}: {name} {rate:.2f} windows/s", file=sys.stderr)
            # Only now: clients that decode what they get would take the cores of the server beside them.
            answers = {name: results[-1].pop("answers") for name, results in runs.items()}
            labels = [[fingerprint(answer) for answer in share] for share in answers["small"]]
            if labels != [[alone[stack] for stack in share] for share in shares]:
                raise SystemExit("Stacks that were posted together came back with other labels than alone.")
    return runs


def report(runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Print the figures and return them."""
    print(f"{options.clients} clients, {options.threads} threads, load average {os.getloadavg()[1]:.1f}")
    rates = {name: [run["windows"] / run["seconds"] for run in many] for name, many in runs.items()}
    for name, many in runs.items():
        fill = sum(run["windows"] for run in many) / sum(run["slots"] for run in many)
        print(f"{name}: {statistics.median(rates[name]):.2f} windows/s in the median, batches {fill:.0%} full")
        stages = sum((Counter(run["stages"]) for run in many), Counter[str]())
        every = sum(run["windows"] for run in many)
        print(f"   CPU ms per window: {1000 * sum(run['cpu'] for run in many) / every:.0f}")
        print("   ms per window:", ", ".join(f"{stage} {1000 * spent / every:.1f}" for stage, spent in stages.items()))
    ratios = [small / large for small, large in zip(rates["small"], rates["large"], strict=True)]
    print(f"small / large: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")
    return {"rates": rates, "ratios": ratios, "runs": runs, "clients": options.clients, "threads": options.threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei", help="of instances")
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 512, 512), metavar=("Z", "Y", "X"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--overlap", type=float, default=0.25, help="0: a window of either kind has as many voxels")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the server's network")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        figures = report(measure(options, Path(folder)), options)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
