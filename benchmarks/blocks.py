"""Block-wise segmentation against one piece, and its memory:

python benchmarks/blocks.py overhead [--shape 128 512 512] [--pairs 3] [--workers 2] [--records FILE]
python benchmarks/blocks.py memory [--gigabytes 20] [--workers 2] [--model FOLDER] [--overlap 0.083] [--folder FOLDER]
    [--records FILE]

overhead segments one OME-Zarr of bright balls in turn by one process with as many threads as there are workers, and by
workers of one thread each. Models are loaded and warm; reading and writing count. Prints seconds of the clock and of
the processor, and their ratio. Raises AssertionError where a label differs.

memory makes an OME-Zarr of so many gigabytes (10^9) that is full of balls, and segments it with labels. Its chunks are
drawn from a few that were made, which balls across their faces fit together. The model smooths and takes a threshold,
unless another is named. Prints seconds of each step, the memory of each worker and of the driver at most (anonymous
pages, those of mapped files, shared ones, each sampled twice a second, and all together as the system counts them), and
the bytes of the scratch folder at most, looked at every ten seconds. Raises AssertionError where a process takes more
than 2 GB, or where there are not as many objects as balls. What is interrupted goes on with the same command where
FOLDER is named.

--records keeps what every block took, for benchmarks/blocks_scaling.py.
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
from common import ROOT, write_figures
from numpy.typing import NDArray
from processes import Sampler, cpu_seconds, family, proc_text
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
from service.models.architectures import ShuffleUNet
from service.models.repository import read_spec

MODEL = ROOT / "models/nuclei"
BUDGET = 2 * 10**9
CHUNK = (64, 128, 128)
# Of the large image: voxels of a chunk, how many lie along y and x at most, and how many differ.
BLOCK, MOST_ACROSS, BLOCKS = (104, 208, 208), 10, 16
RESIDENT = ("RssAnon", "RssFile", "RssShmem", "VmHWM")
_OPEN = ExitStack()
WARM_UP = -1
BALL, APART, DARK, BRIGHT = 9, 26, 300, 3000


def balls(shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Make noise with balls of 18 voxels at jittered places of a lattice."""
    rng = np.random.default_rng(0)
    pixels = rng.normal(DARK, 30, shape)
    near = np.indices((2 * BALL + 1,) * 3) - BALL
    ball = BRIGHT * np.clip(1.2 - np.sqrt((near**2).sum(0)) / BALL, 0, 1)
    for place in np.stack(np.meshgrid(*(np.arange(BALL + 4, n - BALL - 4, APART) for n in shape)), -1).reshape(-1, 3):
        z, y, x = place + rng.integers(-4, 5, 3) - BALL
        pixels[z : z + len(ball), y : y + len(ball), x : x + len(ball)] += ball
    return pixels.clip(0, 2**16 - 1).astype(np.uint16)


def write_image(path: Path, shape: tuple[int, ...], pixels: NDArray[np.uint16]) -> Path:
    """Write an OME-Zarr."""
    make_image(path, shape, CHUNK)[...] = pixels
    return path


def make_image(path: Path, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Any:
    """Make an OME-Zarr; return its array, of which nothing is stored yet."""
    group = zarr.open_group(path, mode="w")
    array = group.create_array("0", shape=shape, dtype=np.uint16, chunks=chunk, fill_value=DARK)
    axes = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
    scale = {"type": "scale", "scale": [0.3, 0.3, 0.3]}
    datasets = [{"path": "0", "coordinateTransformations": [scale]}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    return array


@cache
def warm(threads: int) -> tuple[ModelRunner, WindowBatcher]:
    settings = Settings(device=Device(name="cpu", threads=threads))
    # As long as the process lives.
    device = _OPEN.enter_context(open_batcher(settings))
    runner = ModelRunner(read_spec(MODEL), settings)
    device.call(runner.warm_up)
    return runner, device


def segment_whole(source: Path, out: Path, threads: int, options: Options) -> tuple[float, float]:
    """Segment in one piece; return seconds of the clock and of the processor."""
    runner, device = warm(threads)
    began, cpu = time.monotonic(), time.process_time()
    volume = stack_reader.read(source, Selection(), sys.maxsize)
    zarr_writer.write(segment(runner, volume, options, callbacks=Callbacks(device.run)).segmentation, out)
    return time.monotonic() - began, time.process_time() - cpu


def warm_or_work(task: BlockTask) -> dict[str, Any]:
    """Do a block, or load the model and have it warm."""
    if task.number == WARM_UP:
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
    """Segment block by block; return seconds of the clock and of the processor, and the records of all blocks."""
    settings = Settings(device=Device(name="cpu"), windows=Windows(), engine=engine)
    settings = share_threads(settings, workers.count)
    plan = make_plan(source, Selection(), read_spec(model), options, settings, workers=workers.count)
    folder = RunFolder(out.with_name("scratch"))
    folder.create_or_resume(plan, settings)
    # Each worker has one of them.
    wait([workers.submit(BlockTask(str(folder.path), "scores", WARM_UP)) for _ in range(workers.count)])
    began, cpu = time.monotonic(), cpu_seconds(os.getpid())
    Driver(folder, workers, lambda *step: print(*step, file=sys.stderr)).run(out, dict)
    spent = time.monotonic() - began, cpu_seconds(os.getpid()) - cpu
    steps = get_args(Step)
    records = {
        step: [folder.read_record(step, number) for number in sorted(folder.finished_blocks(step))] for step in steps
    }
    facts = {"shape": plan.layout.size, "roi": plan.layout.roi, "windows": plan.layout.windows, "records": records}
    shutil.rmtree(folder.path)
    return *spent, facts


def overhead(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = tuple(options.shape)
    source = write_image(folder / "in.zarr", shape, balls(shape))
    asked, pairs = Options(diameter="none"), list[tuple[Any, ...]]()
    with (
        ProcessPoolExecutor(1, get_context("spawn"), exit_with_parent, (os.getpid(),)) as whole,
        closing(LocalWorkers(options.workers, warm_or_work)) as workers,
    ):
        whole.submit(warm, options.workers)
        for _ in range(options.pairs):
            one = whole.submit(segment_whole, source, folder / "whole.zarr", options.workers, asked).result()
            many = segment_blocks(source, folder / "blocks.zarr", workers, asked, engine=Engine())
            pairs.append((*one, *many[:2]))
            print(pairs[-1], file=sys.stderr)
        labels = [zarr.open_group(folder / name)["0"][...] for name in ("whole.zarr", "blocks.zarr")]
        assert np.array_equal(*labels), "labels differ"
    write_records(many[2], options.records)
    columns = [list(column) for column in zip(*pairs, strict=True)]
    names = ("whole_seconds", "whole_cpu_seconds", "blocks_seconds", "blocks_cpu_seconds")
    ratios = {
        "clock_ratio": statistics.median(b / a for a, _, b, _ in pairs),
        "cpu_ratio": statistics.median(b / a for _, a, _, b in pairs),
    }
    return {"shape": shape, "objects": int(labels[0].max())} | dict(zip(names, columns, strict=True)) | ratios


class Peaks:
    """Bytes that each process of this family has taken at most, and files in a folder together."""

    def __init__(self, scratch: Path) -> None:
        self.processes = dict[int, Counter[str]]()
        self.scratch, self._folder, self._looks = 0, scratch, 0

    def note(self) -> None:
        """Look once."""
        for pid in family(os.getpid()):
            fields = dict(line.split(":", 1) for line in proc_text(pid, "status").splitlines() if ":" in line)
            sizes = {name: int(fields.get(name, "0").split()[0]) * 1024 for name in RESIDENT}
            now = {"anonymous": sizes["RssAnon"], "files": sizes["RssFile"], "shared": sizes["RssShmem"]}
            self.processes[pid] = self.processes.get(pid, Counter()) | Counter(now | {"all": sizes["VmHWM"]})
        # Looking at so many files takes long.
        if self._looks % 20 == 0:
            self.scratch = max(self.scratch, sum(map(disk_bytes, self._folder.rglob("*"))))
        self._looks += 1


def disk_bytes(path: Path) -> int:
    """Return the bytes that a file takes on disk, 0 for one that is gone meanwhile."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def make_blocks() -> list[NDArray[np.uint16]]:
    """Make blocks of noise with balls around a lattice, across their faces too, that fit together in any order."""
    shape, blocks = BLOCK, list[NDArray[np.uint16]]()
    near = np.indices((2 * BALL + 1,) * 3) - BALL
    ball = BRIGHT * np.clip(1.2 - np.sqrt((near**2).sum(0)) / BALL, 0, 1)
    places = np.stack(np.meshgrid(*(np.arange(0, n, APART) for n in shape)), -1).reshape(-1, 3)
    for seed in range(BLOCKS):
        rng = np.random.default_rng(seed)
        pixels = rng.normal(DARK, 30, shape)
        # Balls at the faces are the same in all blocks.
        moved = places + np.where((places > 0).all(1)[:, None], rng.integers(-4, 5, places.shape), 0)
        for place in moved:
            z, y, x = (np.arange(at - BALL, at + BALL + 1) % n for at, n in zip(place, shape, strict=True))
            pixels[np.ix_(z, y, x)] += ball
        blocks.append(pixels.clip(0, 2**16 - 1).astype(np.uint16))
    return blocks


def write_dense(path: Path, gigabytes: float) -> tuple[int, ...]:
    """Write an OME-Zarr of such blocks, in any order, each a chunk; equal ones are one file. Return its shape."""
    number = max(round(gigabytes * 1e9 / 2 / math.prod(BLOCK)), 1)
    across = min(max(round((number / 2) ** (1 / 3)), 1), MOST_ACROSS)
    counts = (-(-number // across**2), across, across)
    shape = tuple(n * edge for n, edge in zip(counts, BLOCK, strict=True))
    if not path.exists():
        partial, rng = path.with_name("partial.zarr"), np.random.default_rng(0)
        shutil.rmtree(partial, ignore_errors=True)
        array = make_image(partial, shape, BLOCK)
        for block, place in zip(make_blocks(), np.ndindex(counts), strict=False):
            array[tuple(slice(at * edge, (at + 1) * edge) for at, edge in zip(place, BLOCK, strict=True))] = block
        chunks = [partial / "0/c" / "/".join(map(str, place)) for place in np.ndindex(counts)]
        for chunk in chunks[BLOCKS:]:
            chunk.parent.mkdir(parents=True, exist_ok=True)
            chunk.hardlink_to(chunks[rng.integers(min(BLOCKS, len(chunks)))])
        partial.rename(path)
    return shape


def make_model(folder: Path) -> Path:
    """Make a model that smooths the image and tells balls by a threshold, at little cost; return its folder."""
    module = ShuffleUNet(1, 2, widths=(8,))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        first, second = (layer for layer in module.stem if isinstance(layer, nn.Conv3d))
        first.weight[0] = 1 / 8 / 27
        # Each of the 8 voxels of a block is interpolated at its own place, so that there are no plateaus.
        sides = torch.tensor([[3.0, 4.0, 1.0], [1.0, 4.0, 3.0]]) / 8
        for voxel, (z, y, x) in enumerate(itertools.product(sides, repeat=3)):
            second.weight[voxel, 0] = z[:, None, None] * y[:, None] * x
            module.head.weight[[voxel, 8 + voxel], voxel] = torch.tensor([40.0, 8.0])[:, None, None, None]
        for norm in (layer for layer in module.stem if isinstance(layer, nn.BatchNorm3d)):
            norm.weight[:] = 1
        # Of foreground and distance.
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
    """Return seconds of the clock and of the processor of each step; scores and tiles overlap."""
    return {
        step: {
            "clock": round(max(each["ended"] for each in done) - min(each["began"] for each in done), 1),
            "cpu": round(sum(each["cpu"] for each in done), 1),
            "blocks": len(done),
        }
        for step, done in records.items()
        if done
    }


def memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape, model = write_dense(folder / "in.zarr", options.gigabytes), options.model or make_model(folder / "balls")
    engine = Engine() if options.model else Engine(kind="openvino", precision="fp32")
    asked, peaks = Options(diameter="none", overlap=options.overlap), Peaks(folder / "scratch")
    with closing(LocalWorkers(options.workers, warm_or_work)) as workers, Sampler(peaks.note, 0.5):
        # Making the image has taken more than driving the run will.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        seconds, cpu, facts = segment_blocks(
            folder / "in.zarr", folder / "out.zarr", workers, asked, model=model, engine=engine
        )
    write_records(facts, options.records)
    joined = facts["records"]["join"][0]
    figures = {
        "input_bytes": 2 * math.prod(shape),
        "shape": shape,
        "balls": math.prod(n // APART + 1 for n in shape),
        "objects": joined["objects"],
        "pieces": joined["pieces"],
        "basins": joined["basins"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "steps": time_steps(facts["records"]),
        "peak_bytes": {("driver" if pid == os.getpid() else pid): dict(most) for pid, most in peaks.processes.items()},
        "peak_scratch_bytes": peaks.scratch,
        "tile_bytes": sum(record.get("bytes", 0) for record in facts["records"]["tile"]),
        "budget_bytes": BUDGET,
    }
    print(json.dumps(figures), file=sys.stderr)
    return figures


def check(figures: dict[str, Any]) -> None:
    """Raise AssertionError for memory beyond the budget, or objects that are not the balls."""
    # Windows see nothing beyond their ends, which splits some.
    assert 0.9 < figures["objects"] / figures["balls"] < 2, "not as many objects as balls"
    assert max(most["all"] for most in figures["peak_bytes"].values()) <= BUDGET, "more memory than the budget allows"


def write_records(facts: Any, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(facts) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "memory"))
    parser.add_argument("--shape", type=int, nargs=3, default=[128, 512, 512])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--model", type=Path, help="folder of a model of instances")
    parser.add_argument("--overlap", type=float, default=1 / 12)
    parser.add_argument("--folder", type=Path, help="new folder on a disk with room enough")
    parser.add_argument("--records", type=Path, help="what every block took")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="blocks-"))
    folder.mkdir(exist_ok=True)
    figures = overhead(options, folder) if options.what == "overhead" else memory(options, folder)
    shutil.rmtree(folder)
    if options.what == "memory":
        check(figures)
    write_figures(figures, options.json)


if __name__ == "__main__":
    main()
