"""Measure the memory that a server needs for a stack that is larger than memory.

python benchmarks/large.py [--gigabytes 20] [--folder FOLDER] [--json FILE]

Writes an uncompressed, contiguous BigTIFF of each given size (in gigabytes, 10^9 bytes). The file is sparse, with
bright blocks in some planes. A real server segments it as a host file (`input=`), and writes the labels to a host
folder (`output_to=`). The network is nearly free (1x1x1 convolutions), so the time is that of everything around it:
statistics, windows, blending, labels and compression. Labels are checked in all planes with blocks, and in some others.

The resident memory of the server and its child processes is sampled every 20 ms, as anonymous pages and as pages of
mapped files. The kernel can reclaim the latter (program code, results that are being written to disk). Pages that
processes share are counted once per process. The budget is the input slab (the planes that one layer of windows reads)
plus 2 GB. Raises AssertionError if the budget is exceeded or a label is wrong. The folder (by default, the system's
temporary folder) needs room for the uncompressed labels of the largest stack.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import tifffile
import torch
from common import describe_model, make_model, write_results
from processes import Sampler, memory_bytes
from server import Server
from torch import nn

PLANE = (2048, 2048)
ROI = (16, 64, 256)
BLOCK = (256, 256)
EXTRA_BYTES = 2 * 10**9
THRESHOLD = 500
VOXEL_SIZE = (2.0, 0.5, 0.5)

# A network of 1x1x1 convolutions.
UNET = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "channels": [1, 1],
    "strides": [1],
    "kernel_size": 1,
    "up_kernel_size": 1,
    "norm": None,
    "act": None,
}
FULL_RANGE = {"kind": "percentile", "low": 0, "high": 100}
INPUT = {"channels": 1, "normalisation": FULL_RANGE, "roi_size": list(ROI)}
MODEL = describe_model("threshold", "UNet", UNET, ROI, ["dark", "bright"], input=INPUT)


def resident_bytes(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process and its descendants: of anonymous pages, and of mapped files."""
    return memory_bytes(pid, "RssAnon"), memory_bytes(pid, "RssFile", "RssShmem")


def make_stack(path: Path, depth: int) -> dict[int, Any]:
    """Write a sparse stack of `depth` planes; return the bright block of each plane that has one, by plane."""
    voxel_size = {f"PhysicalSize{axis}": size for axis, size in zip("ZYX", VOXEL_SIZE, strict=True)}
    tifffile.imwrite(
        path,
        shape=(depth, *PLANE),
        dtype=np.uint16,
        bigtiff=True,
        ome=True,
        photometric="minisblack",
        metadata={"axes": "ZYX", **voxel_size},
    )
    rng, blocks = np.random.default_rng(0), {}
    pixels = tifffile.memmap(path, mode="r+")
    for z in {0, depth // 3, depth // 2, depth - 1}:
        blocks[z] = rng.integers(0, 1001, BLOCK, dtype=np.uint16)
        # The threshold of the labels is half of the maximum, so every block contains the same maximum.
        blocks[z][0, 0] = 2 * THRESHOLD
        pixels[z, -BLOCK[0] :, -BLOCK[1] :] = blocks[z]
    pixels.flush()
    return blocks


def set_weights(network: nn.Module) -> None:
    """Make the score of `dark` 0.5 everywhere, and the score of `bright` the normalized pixel."""
    state = network.state_dict()
    for tensor in state.values():
        tensor.zero_()
    state["model.0.conv.weight"][:] = 1
    state["model.2.conv.weight"][0, 1] = 1
    state["model.2.conv.bias"][0] = 0.5


def segment(server: Server, http: httpx2.Client, depth: int, folder: Path) -> dict[str, Any]:
    """Segment a stack of `depth` planes with a job, and check its labels; return the results."""
    scan, labels = folder / "scans" / "stack.tif", folder / "results" / "labels.tif"
    blocks = make_stack(scan, depth)
    with Sampler(lambda: resident_bytes(server.process.pid), 0.02) as usage:
        began = time.monotonic()
        response = http.post("/jobs?input=scans/stack.tif&output_to=results/labels.tif")
        assert response.status_code == 202, response.text
        while (job := http.get(response.headers["location"]).json())["state"] in {"waiting", "running"}:
            time.sleep(0.2)
        seconds = time.monotonic() - began
    assert job["state"] == "done", job
    check_labels(labels, depth, blocks)
    results = {
        "input_bytes": scan.stat().st_size,
        "shape": [depth, *PLANE],
        "seconds": round(seconds, 1),
        "voxels_per_second": round(depth * PLANE[0] * PLANE[1] / seconds),
        "stage_seconds": job["seconds"],
        "label_file_bytes": labels.stat().st_size,
        "peak_resident_bytes": max(sum(pages) for _, pages in usage.samples),
        "peak_anonymous_bytes": max(anonymous for _, (anonymous, _mapped) in usage.samples),
        "budget_bytes": 2 * ROI[0] * PLANE[0] * PLANE[1] + EXTRA_BYTES,
    }
    labels.unlink()
    scan.unlink()
    return results


def check_labels(labels: Path, depth: int, blocks: dict[int, Any]) -> None:
    """Raise AssertionError if the axes, the shape, the voxel size or the labels of a file are wrong."""
    with tifffile.TiffFile(labels) as file:
        series = file.series[0]
        assert (series.axes, series.shape) == ("ZYX", (depth, *PLANE)), (series.axes, series.shape)
        pixels = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        assert tuple(pixels[f"PhysicalSize{axis}"] for axis in "ZYX") == VOXEL_SIZE, pixels
        for z in {*blocks, 1, depth // 4, depth // 2 + 1, depth - 2} & set(range(depth)):
            expected = np.zeros(PLANE, np.uint8)
            if z in blocks:
                expected[-BLOCK[0] :, -BLOCK[1] :] = blocks[z] > THRESHOLD
            assert np.array_equal(series.pages[z].asarray(), expected), f"The labels of plane {z} are wrong."


def run(gigabytes: list[float], folder: Path) -> list[dict[str, Any]]:
    """Segment stacks of these sizes one after the other; return the results. Raises AssertionError if a check fails."""
    for name in ("scans", "results"):
        (folder / name).mkdir(parents=True)
    make_model(folder / "models", MODEL, set_weights)
    depths = [max(round(size * 1e9 / (2 * PLANE[0] * PLANE[1])), 2) for size in gigabytes]
    server = Server(
        folder / "models",
        folder / "service",
        windows={"overlap": 0.0},
        # Labels are compared exactly. BF16 would round values near the threshold to the wrong side.
        engine={"precision": "fp32"},
        references={
            "inputs": {"scans": str(folder / "scans")},
            "outputs": {"results": str(folder / "results")},
            "decoded_bytes": 4 * max(depths) * PLANE[0] * PLANE[1],
        },
    )
    results = []
    with server.run() as http:
        anonymous, mapped = resident_bytes(server.process.pid)
        for depth in depths:
            results.append(segment(server, http, depth, folder) | {"idle_resident_bytes": anonymous + mapped})
            print(json.dumps(results[-1]), file=sys.stderr)
    for result in results:
        peak, budget = result["peak_resident_bytes"], result["budget_bytes"]
        assert peak <= budget, f"The server used {peak} bytes; the budget is {budget}."
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[20])
    parser.add_argument("--folder", type=Path, help="folder for the files, on a disk with enough free space")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="large-", dir=options.folder))
    try:
        results = run(options.gigabytes, folder)
    finally:
        shutil.rmtree(folder)
    content = {"stacks": results, "python": platform.python_version(), "torch": torch.__version__}
    write_results(content, options.json)


if __name__ == "__main__":
    main()
