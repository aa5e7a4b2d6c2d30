"""Compare the service with a plain script on the same stack, weights and windows.

python benchmarks/end_to_end.py [--repeats 3] [--threads N] [--plain-batch 1] [--no-plain] [--json FILE]

Each repeat runs `benchmarks/plain.py` in a separate process, then sends the same file to a real server. The time of the
script is from reading the file to its labels on disk, without imports, loading the model, and a first forward pass. The
time of the service is from opening the connection to the last byte of the labels on the client's disk. The server is
running, and its result cache is disabled. CPU seconds are those of the script, and of the server with its child
processes.

The last two ratios are the seconds of HTTP, reading and writing (everything except preparing, windows and decoding),
divided by the seconds in which the device computed windows, and divided by the seconds in which the request waited for
windows. The latter are fewer, because a request decodes some windows while others are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from common import ROOT, parse_server_timing, post_file, request, run_server
from numpy.typing import NDArray
from processes import cpu_seconds
from scipy.ndimage import gaussian_filter


def synthetic_nuclei(shape: tuple[int, int, int], seed: int = 0) -> NDArray[np.uint16]:
    """Return blurred ellipsoids on a jittered lattice, with background, shot noise and read noise, uint16 [Z, Y, X]."""
    rng = np.random.default_rng(seed)
    light = np.full(shape, 0.08, np.float32)
    pitch = np.array((14, 22, 22))
    for cell in np.ndindex(*(np.array(shape) // pitch)):
        center = (np.array(cell) + 0.5 + rng.uniform(-0.2, 0.2, 3)) * pitch
        radii = np.array((5.0, 8.0, 8.0)) * rng.uniform(0.7, 1.1)
        low = np.maximum(center - radii - 1, 0).astype(int)
        high = np.minimum(center + radii + 2, shape).astype(int)
        box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        grid = np.ogrid[box]
        inside = sum(((g - c) / r) ** 2 for g, c, r in zip(grid, center, radii, strict=True)) < 1
        light[box][inside] = rng.lognormal(0, 0.3)
    light = gaussian_filter(light, (1.5, 1.0, 1.0))
    counts = rng.poisson(light * 80) + rng.normal(0, 1.5, shape)
    return (counts * 40 + 300).clip(0, 65535).astype(np.uint16)


def serve_model(model: Path, threads: int, folder: Path) -> AbstractContextManager[tuple[int, int]]:
    """Run a server with only this model and without a result cache; yield its process ID and port."""
    return run_server(
        folder,
        STACKSEG_MODELS__FOLDER=str(model.resolve().parent),
        STACKSEG_MODELS__SERVE=json.dumps([model.name]),
        STACKSEG_DEVICE__THREADS=str(threads),
        # The same stack is sent repeatedly, and must be computed each time.
        STACKSEG_LIMITS__CACHE_BYTES="0",
    )


def read_metrics(port: int) -> dict[str, float]:
    """Return all values of the server's metrics, by name and labels."""
    lines = (
        line.rsplit(" ", 1) for line in request(port, "GET", "/metrics")[1].decode().splitlines() if line[:1] != "#"
    )
    return {name: float(value) for name, value in lines}


def _device_seconds(port: int) -> float:
    """Return the total time in which the server's device has computed windows."""
    return sum(value for name, value in read_metrics(port).items() if name.startswith("stackseg_device_seconds_total"))


def post(port: int, stack: Path, result: Path, overlap: float) -> dict[str, Any]:
    """Post a file and save the labels; return the total seconds, the seconds of each stage, and the object count."""
    began = time.perf_counter()
    headers = post_file(port, f"/segment?overlap={overlap}&diameter=none", stack, result)
    total = time.perf_counter() - began
    stages = parse_server_timing(headers["Server-Timing"])
    stages["transfer and rest"] = total - stages.pop("total")
    return {"total": total, "stages": stages, "objects": int(headers["X-StackSeg-Objects"])}


def run_plain_script(options: argparse.Namespace, stack: Path, result: Path) -> dict[str, Any]:
    """Run the plain script; return its results."""
    command = [sys.executable, "benchmarks/plain.py", str(stack), str(result), "--model", str(options.model)]
    command += ["--sw-batch-size", str(options.plain_batch), "--overlap", str(options.overlap)]
    command += ["--threads", str(options.threads)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.threads)}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    measured["total"] = sum(measured["stages"].values())
    return measured


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all repeats, alternating between script and service, after a request that warms up the server."""
    stack = options.stack or folder / "stack.tif"
    if options.stack is None:
        image = synthetic_nuclei(tuple(options.shape))
        tifffile.imwrite(
            stack, image, imagej=True, resolution=(4, 4), metadata={"axes": "ZYX", "spacing": 0.5, "unit": "um"}
        )
    runs: dict[str, list[dict[str, Any]]] = {"service": []} if options.no_plain else {"plain": [], "service": []}
    with serve_model(options.model, options.threads, folder) as (pid, port):
        post(port, stack, folder / "service.tif", options.overlap)
        for repeat in range(options.repeats):
            if not options.no_plain:
                runs["plain"].append(run_plain_script(options, stack, folder / "plain.tif"))
            before = cpu_seconds(pid), _device_seconds(port)
            measured = post(port, stack, folder / "service.tif", options.overlap)
            after = cpu_seconds(pid), _device_seconds(port)
            cpu, device = (now - then for now, then in zip(after, before, strict=True))
            runs["service"].append(measured | {"cpu": cpu, "device": device})
            for name, results in runs.items():
                print(f"repeat {repeat + 1}: {name} {results[-1]['total']:.2f} s", file=sys.stderr)
        engine = json.loads(request(port, "GET", f"/models/{options.model.name}")[1])
    return {"runs": runs, "engine": engine.get("engine", engine), "load": os.getloadavg()[1]}


def print_report(measured: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Print the tables; return the numbers in them."""
    print(f"\n{_describe_machine(options.threads)}; torch {torch.__version__}; load average {measured['load']:.1f}")
    print(f"model {options.model.name}, overlap {options.overlap}, plain script sw_batch_size {options.plain_batch}")
    print(f"engine: {json.dumps(measured['engine'])}\n")
    medians: dict[str, dict[str, float]] = {}
    for name, runs in measured["runs"].items():
        stages = list(runs[0]["stages"])
        columns = {stage: [run["stages"].get(stage, 0.0) for run in runs] for stage in stages}
        columns |= {key: [run[key] for run in runs] for key in ("total", "cpu", "device") if key in runs[0]}
        medians[name] = {stage: statistics.median(values) for stage, values in columns.items()}
        print(f"| {name} ({runs[-1]['objects']} objects) | median s | min | max |\n|---|---|---|---|")
        for stage, values in columns.items():
            print(f"| {stage} | {medians[name][stage]:.2f} | {min(values):.2f} | {max(values):.2f} |")
        print()
    ratios = _compute_ratios(measured["runs"])
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.3g} (from {min(values):.3g} to {max(values):.3g})")
    return {"medians": medians, "ratios": ratios, "threads": options.threads, **measured}


def _compute_ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Return the ratios of script to service, and the relative cost of HTTP, reading and writing, for each repeat."""
    overhead = {
        "HTTP, reading and writing / device time": [_overhead_seconds(run) / run["device"] for run in runs["service"]],
        "HTTP, reading and writing / time waiting for windows": [
            _overhead_seconds(run) / run["stages"]["windows"] for run in runs["service"]
        ],
    }
    if "plain" not in runs:
        return overhead
    ratios: dict[str, list[float]] = {
        "ratio": [],
        "ratio if the script used our decoder": [],
        "CPU ratio": [],
    }
    for script, service in zip(runs["plain"], runs["service"], strict=True):
        adjusted = script["total"] - script["stages"]["decode"] + script["decode_by_stackseg"]
        ratios["ratio"].append(script["total"] / service["total"])
        ratios["ratio if the script used our decoder"].append(adjusted / service["total"])
        ratios["CPU ratio"].append(script["cpu"] / service["cpu"])
    return ratios | overhead


def _overhead_seconds(run: dict[str, Any]) -> float:
    """Return the seconds of HTTP, reading and writing."""
    stages = run["stages"]
    return run["total"] - sum(stages[stage] for stage in ("prepare", "windows", "decode"))


def _describe_machine(threads: int) -> str:
    names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return f"{next(names, platform.machine()).partition(': ')[2]}, {threads} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--stack", type=Path, help="segment this TIFF instead of synthetic nuclei")
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 512, 512), metavar=("Z", "Y", "X"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for both script and service")
    parser.add_argument("--plain-batch", type=int, default=1, help="sw_batch_size of the plain script")
    parser.add_argument("--no-plain", action="store_true", help="measure only the service")
    parser.add_argument("--overlap", type=float, default=0.25, help="for both script and service")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        numbers = print_report(measure(options, Path(folder)), options)
    if options.json is not None:
        options.json.write_text(json.dumps(numbers, indent=1, default=str))


if __name__ == "__main__":
    main()
