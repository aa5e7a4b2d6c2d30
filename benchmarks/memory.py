"""Compare the peak memory of a request for a large stack with that of the plain script.

python benchmarks/memory.py [--shape 256 1024 1024] [--no-plain]

The semantic segmentation model has three classes and random weights, because the values of the labels do not matter
here. The stack is sent to a real server. Its memory is the sum of the peaks (VmHWM) of the server process and of its
reader processes, including the pages of the mapped upload. Like typical user code, the plain script holds the stack,
its float32 copy, and the scores of the whole volume in memory.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tifffile
import torch
from common import ROOT, describe_model, make_model, post_file
from end_to_end import serve_model
from monai.inferers.utils import sliding_window_inference
from processes import memory_bytes

from service.models.loader import load_network
from service.models.repository import read_spec

MODEL = describe_model(
    "tissue",
    "ShuffleUNet",
    {"in_channels": 1, "out_channels": 3, "widths": [16, 16], "block": [2, 2, 2]},
    (64, 64, 64),
    ["background", "matrix", "cells"],
    activation="softmax",
)
GIB = 2**30


def write_stack(path: Path, shape: tuple[int, int, int]) -> None:
    """Write a stack of noise plane by plane."""
    rng = np.random.default_rng(0)
    planes = (rng.integers(0, 4000, shape[1:], np.uint16) for _ in range(shape[0]))
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(planes, shape=shape, dtype=np.uint16, photometric="minisblack", metadata={"axes": "ZYX"})


def measure_service(model: Path, stack: Path, folder: Path, threads: int) -> tuple[int, int]:
    """Run a server; return its peak memory in bytes when it is ready, and after the request."""
    with serve_model(model, threads, folder) as (pid, port):
        ready = memory_bytes(pid, "VmHWM")
        post_file(port, "/segment", stack, folder / "classes.tif")
        return ready, memory_bytes(pid, "VmHWM")


def run_plain(model: Path, stack: Path, result: Path) -> None:
    """Run the plain script in this process, and print its peak memory in bytes."""
    spec = read_spec(model)
    network = load_network(spec)
    image = tifffile.imread(stack)
    low, high = np.percentile(image, (1, 99.8))
    scaled = ((image - low) / (high - low)).astype(np.float32)
    with torch.inference_mode():
        scores = sliding_window_inference(
            torch.from_numpy(scaled)[None, None], spec.input.roi_size, 1, network, overlap=0.25, mode="gaussian"
        )
        tifffile.imwrite(result, scores[0].argmax(0).numpy().astype(np.uint8), compression="zlib")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(256, 1024, 1024), metavar=("Z", "Y", "X"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--run-plain", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_plain:
        run_plain(*options.run_plain)
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        model, stack = make_model(folder, MODEL), folder / "stack.tif"
        write_stack(stack, tuple(options.shape))
        size = stack.stat().st_size
        print(f"stack {' x '.join(map(str, options.shape))} uint16, {size / GIB:.2f} GiB\n")
        print("| | peak, GiB | beyond the stack, GiB |\n|---|---|---|")
        ready, peak = measure_service(model, stack, folder, options.threads)
        print(f"| server, ready | {ready / GIB:.2f} | |")
        print(f"| server, after the request | {peak / GIB:.2f} | {(peak - size) / GIB:.2f} |", flush=True)
        if not options.no_plain:
            command = [sys.executable, __file__, "--run-plain", str(model), str(stack), str(folder / "plain.tif")]
            output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
            script_peak = int(output.split()[-1])
            print(f"| plain script | {script_peak / GIB:.2f} | {(script_peak - size) / GIB:.2f} |")
            same = np.mean(tifffile.imread(folder / "classes.tif") == tifffile.imread(folder / "plain.tif"))
            print(f"\nequal classes in {same:.4%} of the voxels")


if __name__ == "__main__":
    main()
