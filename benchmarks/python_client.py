"""Compare the Python client with curl, and measure its memory for a stack of 2 GiB.

PYTHONPATH=clients/python python benchmarks/python_client.py [--rounds 15]

curl saves the labels of a stack of 64 x 512 x 512 voxels. The client either saves them too, or decodes them into an
array. The methods alternate. The server is measured with its cache of results, so that it only receives the stack and
sends the labels, and without. The time beyond the computation is that of a request without the stages of the server
after the upload (`Server-Timing`); it varies less. The last column is its difference from curl, relative to the whole
request with curl. The large stack is submitted as a job, which is then canceled.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tifffile
from common import ROOT, parse_server_timing, run_server
from memory import write_stack
from stackseg_client import Client


class Times(NamedTuple):
    """Seconds of a request, and of the computation after the upload, as reported by the server."""

    request: float
    computation: float


LARGE_SHAPE = (1024, 1024, 1024)
# Submits a stack as a job, and prints the seconds of the upload and the peak memory of the process.
SUBMIT_LARGE = """
import re, sys, time
from pathlib import Path
import numpy as np
from stackseg_client import Client
path, url, kind = sys.argv[1:]
array = np.broadcast_to(np.uint16(7), {shape})  # converted slab by slab, like a Zarr array
start = time.perf_counter()
with Client(url) as client:
    job = client.submit(path if kind == "file" else array)
    seconds = time.perf_counter() - start
    job.cancel()
    assert list(job.progress())[-1].state == "cancelled"
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(seconds, peak * 1024)
"""


def measure_curl(url: str, stack: Path, result: Path) -> Times:
    """Measure a request, without the start of curl."""
    command = ["curl", "-sS", "--fail-with-body", "--data-binary", f"@{stack}", "-H", "Content-Type: image/tiff"]
    command += ["-o", str(result), "-w", "%{time_total} %header{server-timing}", f"{url}/segment"]
    seconds, _, timing = subprocess.run(command, check=True, capture_output=True, text=True).stdout.partition(" ")
    stages = parse_server_timing(timing)
    return Times(float(seconds), stages["total"] - stages["receive"])


def measure_client(client: Client, stack: Path, save_to: Path | None) -> Times:
    """Measure a request, including the decoding of the labels unless they are saved."""
    start = time.perf_counter()
    result = client.segment(stack, save_to=save_to)
    if save_to is None:
        result.labels  # noqa: B018 - decodes the labels
    return Times(time.perf_counter() - start, result.seconds["total"] - result.seconds["receive"])


def compare(url: str, folder: Path, rounds: int, title: str) -> None:
    """Measure all methods in turn, and print the medians."""
    stack = folder / "stack.tif"
    with Client(url) as client:
        methods: dict[str, Callable[[], Times]] = {
            "curl": lambda: measure_curl(url, stack, folder / "curl.tif"),
            "client, file": lambda: measure_client(client, stack, folder / "client.tif"),
            "client, array": lambda: measure_client(client, stack, None),
        }
        times: dict[str, list[Times]] = {name: [] for name in methods}
        for round_number in range(rounds + 1):
            for name, run in methods.items():
                measured = run()
                if round_number:
                    times[name].append(measured)
        assert np.array_equal(client.segment(stack).labels, tifffile.imread(folder / "curl.tif"))
    curl_seconds, curl_beyond = take_medians(times["curl"])
    for name, values in times.items():
        seconds, beyond = take_medians(values)
        more = (beyond - curl_beyond) / curl_seconds
        print(f"| {title} | {name} | {1000 * seconds:.0f} | {1000 * beyond:.0f} | {more:+.1%} |", flush=True)


def take_medians(times: list[Times]) -> tuple[float, float]:
    """Return the median time of a request, and of the part beyond the computation."""
    others = [each.request - each.computation for each in times]
    return statistics.median(each.request for each in times), statistics.median(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")
        pixels = np.tile(sample, (2, 3, 3))[:64, :512, :512]
        tifffile.imwrite(folder / "stack.tif", pixels, imagej=True, metadata={"axes": "ZYX"})
        print("| server | method | request, ms | beyond the computation, ms | overhead |\n|---|---|---|---|---|")
        for title, cache_bytes in (("cached", 2**30), ("computes", 0)):
            rounds = options.rounds if cache_bytes else max(5, options.rounds // 4)
            with run_server(folder, STACKSEG_LIMITS__CACHE_BYTES=str(cache_bytes)) as (_, port):
                compare(f"http://127.0.0.1:{port}", folder, rounds, title)
        large = folder / "large.tif"
        write_stack(large, LARGE_SHAPE)
        print(f"\nstack of {large.stat().st_size / 2**30:.2f} GiB\n\n| stack | upload, s | VmHWM, MB |\n|---|---|---|")
        with run_server(folder) as (_, port):
            for kind in ("file", "array"):
                code = SUBMIT_LARGE.replace("{shape}", str(LARGE_SHAPE))
                command = [sys.executable, "-c", code, str(large), f"http://127.0.0.1:{port}", kind]
                seconds, peak = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
                print(f"| {kind} | {float(seconds):.1f} | {int(peak) / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
