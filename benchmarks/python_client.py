"""Compare the Python client with curl, and measure its memory for a stack of 2 GiB.

PYTHONPATH=clients/python python benchmarks/python_client.py [--rounds 15]

curl saves the labels of a stack of 64 x 512 x 512 voxels. The client either saves them too, or decodes them into an
array. The rounds alternate. The server is measured with its cache of results, so that it only receives the stack and
sends the labels, and without. The large stack is submitted as a job, which is then canceled.
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

import numpy as np
import tifffile
from common import ROOT, run_server
from memory import write_stack

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


def measure_curl(url: str, stack: Path, result: Path) -> float:
    """Return the seconds of a request, without the start of curl."""
    command = ["curl", "-sS", "--fail-with-body", "--data-binary", f"@{stack}", "-H", "Content-Type: image/tiff"]
    command += ["-o", str(result), "-w", "%{time_total}", f"{url}/segment"]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def measure(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def compare(url: str, folder: Path, rounds: int, title: str) -> None:
    from stackseg_client import Client  # noqa: PLC0415 - the other half of this script runs without it

    stack, saved = folder / "stack.tif", folder / "client.tif"
    with Client(url) as client:
        methods: dict[str, Callable[[], float]] = {
            "curl": lambda: measure_curl(url, stack, folder / "curl.tif"),
            "client, saved": lambda: measure(lambda: client.segment(stack, save_to=saved)),
            "client, array": lambda: measure(lambda: client.segment(stack).labels),
        }
        times: dict[str, list[float]] = {name: [] for name in methods}
        for round_number in range(rounds + 1):
            for name, run in methods.items():
                seconds = run()
                if round_number:
                    times[name].append(seconds)
        assert np.array_equal(client.segment(stack).labels, tifffile.imread(folder / "curl.tif"))
    base = statistics.median(times["curl"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {title} | {name} | {1000 * median:.0f} | {(median - base) / base:+.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")
        pixels = np.tile(sample, (2, 3, 3))[:64, :512, :512]
        tifffile.imwrite(folder / "stack.tif", pixels, imagej=True, metadata={"axes": "ZYX"})
        print("| server | method | median, ms | beyond curl |\n|---|---|---|---|")
        for title, cache_bytes in (("cached", 2**30), ("computes", 0)):
            rounds = options.rounds if cache_bytes else max(3, options.rounds // 3)
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
