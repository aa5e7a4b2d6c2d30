"""Measure the overhead and the memory of block-wise segmentation.

python benchmarks/blocks.py overhead [--shape 128 512 512] [--pairs 3] [--workers 2] [--records FILE]
python benchmarks/blocks.py memory [--gigabytes 20] [--workers 2] [--model FOLDER] [--overlap 0.083] [--folder FOLDER]
    [--records FILE]

`overhead` segments an OME-Zarr of bright balls in two ways that alternate: in one piece, by one process with as many
threads as there are workers, and block by block, by workers of one thread each. Loading the models is not measured;
reading and writing are. Prints wall-clock seconds, CPU seconds, and their ratios. Raises AssertionError if a label
differs.

`memory` writes an OME-Zarr of the given size (in gigabytes, 10^9 bytes) that is full of balls, and segments it into
labels. Its chunks are copies of a few different ones. Balls that cross the faces of a chunk continue in any
neighboring chunk. By default, the model smooths the image and thresholds it. Prints the seconds of each step, the peak
memory of the driver and of each worker, and the peak size of the scratch folder. Anonymous, file-backed and shared
memory are sampled twice a second, the scratch folder every ten seconds; the peak of the total is the one that Linux
records. Raises AssertionError if a process uses more than 2 GB, or if the number of objects is far from the number of
balls. To resume an interrupted run, set --folder and repeat the command.

--records saves the measurements of each block for benchmarks/blocks_scaling.py.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import yaml
import zarr
from common import ROOT, write_results
from numpy.typing import NDArray
from processes import Sampler, cpu_seconds, process_tree, read_proc_file
from safetensors.torch import save_file
from torch import nn

from service.cli.segmentation.blocks import share_threads
from service.core.config import Settings
from service.core.sections.computing import Device, Engine, Windows
from service.core.types import Options, Selection
from service.formats import stack_reader
from service.formats.zarr import writer as zarr_writer
from service.inference.blockwise.driver import Driver, make_plan
from service.inference.blockwise.run_folder import BlockTask, RunFolder, Step
from service.inference.blockwise.workers import LocalWorkers, exit_with_parent, load_runner, run_block
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.windows.batching.batcher import WindowBatcher, open_batcher
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.models.repository import read_spec

MODEL = ROOT / "models/nuclei"
# Maximum memory of each process.
MEMORY_BUDGET_BYTES = 2 * 10**9
CHUNK_SHAPE = (64, 128, 128)
# The large image: the shape of a chunk, the maximum number of chunks along y and x, and the number of different chunks.
LARGE_CHUNK_SHAPE = (104, 208, 208)
MAX_CHUNKS_ACROSS = 10
DISTINCT_CHUNKS = 16
# Fields of /proc/PID/status.
MEMORY_FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmHWM")
# Closes the batchers when the process ends.
_EXIT_STACK = ExitStack()
# Number of a block that only makes a worker load the model.
WARM_UP_BLOCK = -1
# Balls on a lattice: sizes in voxels, then gray values.
BALL_RADIUS = 9
LATTICE_PITCH = 26
BACKGROUND = 300
BALL_BRIGHTNESS = 3000


def make_balls(shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Return a noisy image of balls 18 voxels in diameter at jittered positions of a lattice, uint16 [Z, Y, X]."""
    rng = np.random.default_rng(0)
    pixels = rng.normal(BACKGROUND, 30, shape)
    offsets = np.indices((2 * BALL_RADIUS + 1,) * 3) - BALL_RADIUS
    ball = BALL_BRIGHTNESS * np.clip(1.2 - np.sqrt((offsets**2).sum(0)) / BALL_RADIUS, 0, 1)
    for position in np.stack(
        np.meshgrid(*(np.arange(BALL_RADIUS + 4, n - BALL_RADIUS - 4, LATTICE_PITCH) for n in shape)), -1
    ).reshape(-1, 3):
        z, y, x = position + rng.integers(-4, 5, 3) - BALL_RADIUS
        pixels[z : z + len(ball), y : y + len(ball), x : x + len(ball)] += ball
    return pixels.clip(0, 2**16 - 1).astype(np.uint16)


def write_image(path: Path, shape: tuple[int, ...], pixels: NDArray[np.uint16]) -> Path:
    """Write an image as OME-Zarr; return its path."""
    make_image(path, shape, CHUNK_SHAPE)[...] = pixels
    return path


def make_image(path: Path, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Any:
    """Create an empty OME-Zarr; return its array."""
    group = zarr.open_group(path, mode="w")
    array = group.create_array("0", shape=shape, dtype=np.uint16, chunks=chunk, fill_value=BACKGROUND)
    axes = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
    scale = {"type": "scale", "scale": [0.3, 0.3, 0.3]}
    datasets = [{"path": "0", "coordinateTransformations": [scale]}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    return array


@cache
def load_model(threads: int) -> tuple[ModelRunner, WindowBatcher]:
    """Load the bundled model once per process, and warm it up."""
    settings = Settings(device=Device(name="cpu", threads=threads))
    device = _EXIT_STACK.enter_context(open_batcher(settings))
    runner = ModelRunner(read_spec(MODEL), settings)
    device.call(runner.warm_up)
    return runner, device


def segment_whole(source: Path, out: Path, threads: int, options: Options) -> tuple[float, float]:
    """Segment an image in one piece; return wall-clock seconds and CPU seconds."""
    runner, device = load_model(threads)
    began, cpu = time.monotonic(), time.process_time()
    volume = stack_reader.read(source, Selection(), sys.maxsize)
    zarr_writer.write(segment(runner, volume, options, callbacks=Callbacks(device.run)).segmentation, out)
    return time.monotonic() - began, time.process_time() - cpu


def run_or_warm_up(task: BlockTask) -> dict[str, Any]:
    """Compute a block. If its number is `WARM_UP_BLOCK`, only load the model."""
    if task.number == WARM_UP_BLOCK:
        load_runner(task.folder)
        return {}
    return run_block(task)


def segment_blocks(  # noqa: PLR0913
    source: Path,
    out: Path,
    workers: LocalWorkers,
    options: Options,
    *,
    model: Path = MODEL,
    engine: Engine,
) -> tuple[float, float, Any]:
    """Segment an image block by block; return wall-clock seconds, CPU seconds, and the records of all blocks."""
    settings = Settings(device=Device(name="cpu"), windows=Windows(), engine=engine)
    settings = share_threads(settings, workers.count)
    plan = make_plan(source, Selection(), read_spec(model), options, settings, workers=workers.count)
    folder = RunFolder(out.with_name("scratch"))
    folder.create_or_resume(plan, settings)
    # Each worker receives one of these tasks.
    wait([workers.submit(BlockTask(str(folder.path), "scores", WARM_UP_BLOCK)) for _ in range(workers.count)])
    began, cpu = time.monotonic(), cpu_seconds(os.getpid())
    Driver(folder, workers, lambda *step: print(*step, file=sys.stderr)).run(out, dict)
    elapsed = time.monotonic() - began, cpu_seconds(os.getpid()) - cpu
    steps = get_args(Step)
    records = {
        step: [folder.read_record(step, number) for number in sorted(folder.find_finished_blocks(step))]
        for step in steps
    }
    facts = {"shape": plan.layout.size, "roi": plan.layout.roi, "windows": plan.layout.group_shape, "records": records}
    shutil.rmtree(folder.path)
    return *elapsed, facts


def measure_overhead(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Segment the same image in one piece and block by block; return the seconds and ratios."""
    shape = tuple(options.shape)
    source = write_image(folder / "in.zarr", shape, make_balls(shape))
    request_options, pairs = Options(diameter="none"), list[tuple[Any, ...]]()
    with (
        ProcessPoolExecutor(1, get_context("spawn"), exit_with_parent, (os.getpid(),)) as pool,
        closing(LocalWorkers(options.workers, run_or_warm_up)) as workers,
    ):
        pool.submit(load_model, options.workers)
        for _ in range(options.pairs):
            whole = pool.submit(segment_whole, source, folder / "whole.zarr", options.workers, request_options).result()
            blockwise = segment_blocks(source, folder / "blocks.zarr", workers, request_options, engine=Engine())
            pairs.append((*whole, *blockwise[:2]))
            print(pairs[-1], file=sys.stderr)
        labels = [zarr.open_group(folder / name)["0"][...] for name in ("whole.zarr", "blocks.zarr")]
        assert np.array_equal(*labels), "The labels of the block-wise run differ."
    write_records(blockwise[2], options.records)
    columns = [list(column) for column in zip(*pairs, strict=True)]
    names = ("whole_seconds", "whole_cpu_seconds", "blocks_seconds", "blocks_cpu_seconds")
    ratios = {
        "clock_ratio": statistics.median(b / a for a, _, b, _ in pairs),
        "cpu_ratio": statistics.median(b / a for _, a, _, b in pairs),
    }
    return {"shape": shape, "objects": int(labels[0].max())} | dict(zip(names, columns, strict=True)) | ratios


class PeakUsage:
    """Peak memory of this process and its descendants, and peak size of a folder, in bytes."""

    def __init__(self, scratch: Path) -> None:
        self.processes = dict[int, Counter[str]]()
        self.scratch_bytes, self._folder, self._samples = 0, scratch, 0

    def sample(self) -> None:
        """Update the peaks."""
        for pid in process_tree(os.getpid()):
            fields = dict(line.split(":", 1) for line in read_proc_file(pid, "status").splitlines() if ":" in line)
            sizes = {name: int(fields.get(name, "0").split()[0]) * 1024 for name in MEMORY_FIELDS}
            now = {"anonymous": sizes["RssAnon"], "files": sizes["RssFile"], "shared": sizes["RssShmem"]}
            self.processes[pid] = self.processes.get(pid, Counter()) | Counter(now | {"all": sizes["VmHWM"]})
        # Listing many files is slow.
        if self._samples % 20 == 0:
            self.scratch_bytes = max(self.scratch_bytes, sum(map(disk_bytes, self._folder.rglob("*"))))
        self._samples += 1


def disk_bytes(path: Path) -> int:
    """Return the disk space that a file occupies, in bytes; 0 if it no longer exists."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def make_chunks() -> list[NDArray[np.uint16]]:
    """Return different chunks of noise and balls that can be placed next to each other in any order.

    Some balls cross the faces of a chunk and continue in its neighbors.
    """
    shape, chunks = LARGE_CHUNK_SHAPE, list[NDArray[np.uint16]]()
    offsets = np.indices((2 * BALL_RADIUS + 1,) * 3) - BALL_RADIUS
    ball = BALL_BRIGHTNESS * np.clip(1.2 - np.sqrt((offsets**2).sum(0)) / BALL_RADIUS, 0, 1)
    positions = np.stack(np.meshgrid(*(np.arange(0, n, LATTICE_PITCH) for n in shape)), -1).reshape(-1, 3)
    for seed in range(DISTINCT_CHUNKS):
        rng = np.random.default_rng(seed)
        pixels = rng.normal(BACKGROUND, 30, shape)
        # Balls at the faces are the same in all chunks.
        moved = positions + np.where((positions > 0).all(1)[:, None], rng.integers(-4, 5, positions.shape), 0)
        for position in moved:
            z, y, x = (
                np.arange(at - BALL_RADIUS, at + BALL_RADIUS + 1) % n for at, n in zip(position, shape, strict=True)
            )
            pixels[np.ix_(z, y, x)] += ball
        chunks.append(pixels.clip(0, 2**16 - 1).astype(np.uint16))
    return chunks


def write_large_image(path: Path, gigabytes: float) -> tuple[int, ...]:
    """Write an OME-Zarr of chunks in random order, with equal chunks as hard links to one file; return its shape."""
    number = max(round(gigabytes * 1e9 / 2 / math.prod(LARGE_CHUNK_SHAPE)), 1)
    across = min(max(round((number / 2) ** (1 / 3)), 1), MAX_CHUNKS_ACROSS)
    counts = (-(-number // across**2), across, across)
    shape = tuple(n * edge for n, edge in zip(counts, LARGE_CHUNK_SHAPE, strict=True))
    if not path.exists():
        partial, rng = path.with_name("partial.zarr"), np.random.default_rng(0)
        shutil.rmtree(partial, ignore_errors=True)
        array = make_image(partial, shape, LARGE_CHUNK_SHAPE)
        for pixels, position in zip(make_chunks(), np.ndindex(counts), strict=False):
            region = tuple(
                slice(at * edge, (at + 1) * edge) for at, edge in zip(position, LARGE_CHUNK_SHAPE, strict=True)
            )
            array[region] = pixels
        chunks = [partial / "0/c" / "/".join(map(str, position)) for position in np.ndindex(counts)]
        for chunk in chunks[DISTINCT_CHUNKS:]:
            chunk.parent.mkdir(parents=True, exist_ok=True)
            chunk.hardlink_to(chunks[rng.integers(min(DISTINCT_CHUNKS, len(chunks)))])
        partial.rename(path)
    return shape


def make_model(folder: Path) -> Path:
    """Make a cheap model that smooths the image and finds balls with a threshold; return its folder."""
    module = ShuffleUNet(1, 2, widths=(8,))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        first, second = (layer for layer in module.stem if isinstance(layer, nn.Conv3d))
        first.weight[0] = 1 / 8 / 27
        # The network computes 2 x 2 x 2 voxels at once. Each is interpolated at its own position, to avoid plateaus.
        sides = torch.tensor([[3.0, 4.0, 1.0], [1.0, 4.0, 3.0]]) / 8
        for voxel, (z, y, x) in enumerate(itertools.product(sides, repeat=3)):
            second.weight[voxel, 0] = z[:, None, None] * y[:, None] * x
            module.head.weight[[voxel, 8 + voxel], voxel] = torch.tensor([40.0, 8.0])[:, None, None, None]
        for norm in (layer for layer in module.stem if isinstance(layer, nn.BatchNorm3d)):
            norm.weight[:] = 1
        # The biases of the foreground and of the distance.
        module.head.bias[:8], module.head.bias[8:] = -8, -4
    folder.mkdir(exist_ok=True)
    save_file(module.state_dict(), folder / "weights.safetensors")
    digest = hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    content = yaml.safe_load((MODEL / "model.yaml").read_text(encoding="utf-8"))
    content = {key: value for key, value in content.items() if key not in {"confidence", "sample"}}
    content["architecture"]["arguments"]["widths"] = [8]
    content |= {"name": folder.name, "weights": {"file": "weights.safetensors", "sha256": digest}}
    content["input"]["roi_size"] = [96, 96, 96]
    content["decoding"] |= {"threshold": 0.5, "min_confidence": 0.0}
    (folder / "model.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


def time_steps(records: dict[str, list[Any]]) -> dict[str, dict[str, float]]:
    """Return the wall-clock and CPU seconds of each step. The steps `scores` and `tile` overlap in time."""
    return {
        step: {
            "clock": round(
                max(record["ended"] for record in step_records) - min(record["began"] for record in step_records), 1
            ),
            "cpu": round(sum(record["cpu"] for record in step_records), 1),
            "blocks": len(step_records),
        }
        for step, step_records in records.items()
        if step_records
    }


def measure_memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Segment a large image block by block; return the seconds and the peak memory."""
    shape = write_large_image(folder / "in.zarr", options.gigabytes)
    model = options.model or make_model(folder / "balls")
    engine = Engine() if options.model else Engine(kind="openvino", precision="fp32")
    request_options, peaks = Options(diameter="none", overlap=options.overlap), PeakUsage(folder / "scratch")
    with closing(LocalWorkers(options.workers, run_or_warm_up)) as workers, Sampler(peaks.sample, 0.5):
        # Writing the image used more memory than the driver will, so reset the recorded peak of this process.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        seconds, cpu, facts = segment_blocks(
            folder / "in.zarr", folder / "out.zarr", workers, request_options, model=model, engine=engine
        )
    write_records(facts, options.records)
    joined = facts["records"]["join"][0]
    results = {
        "input_bytes": 2 * math.prod(shape),
        "shape": shape,
        "balls": math.prod(n // LATTICE_PITCH + 1 for n in shape),
        "objects": joined["objects"],
        "pieces": joined["pieces"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "steps": time_steps(facts["records"]),
        "peak_bytes": {("driver" if pid == os.getpid() else pid): dict(most) for pid, most in peaks.processes.items()},
        "peak_scratch_bytes": peaks.scratch_bytes,
        "tile_bytes": sum(record.get("bytes", 0) for record in facts["records"]["tile"]),
        "budget_bytes": MEMORY_BUDGET_BYTES,
    }
    print(json.dumps(results), file=sys.stderr)
    return results


def check(results: dict[str, Any]) -> None:
    """Raise AssertionError if a process exceeded the memory budget, or if the number of objects is wrong."""
    # A ball at the edge of a window may be split, because a window has no context beyond its edges.
    ratio = results["objects"] / results["balls"]
    assert 0.9 < ratio < 2, f"Found {results['objects']} objects for {results['balls']} balls."
    peak = max(most["all"] for most in results["peak_bytes"].values())
    assert peak <= MEMORY_BUDGET_BYTES, f"A process used {peak} bytes; the budget is {MEMORY_BUDGET_BYTES}."


def write_records(facts: Any, path: Path | None) -> None:
    """Write the records of all blocks as JSON, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(facts) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("overhead", "memory"))
    parser.add_argument("--shape", type=int, nargs=3, default=[128, 512, 512])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--model", type=Path, help="folder of an instance segmentation model")
    parser.add_argument("--overlap", type=float, default=1 / 12)
    parser.add_argument(
        "--folder", type=Path, help="working folder; the disk needs room for the image, scratch files and labels"
    )
    parser.add_argument("--records", type=Path, help="save the measurements of each block to this file")
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="blocks-"))
    folder.mkdir(exist_ok=True)
    results = measure_overhead(options, folder) if options.benchmark == "overhead" else measure_memory(options, folder)
    shutil.rmtree(folder)
    if options.benchmark == "memory":
        check(results)
    write_results(results, options.json)


if __name__ == "__main__":
    main()
