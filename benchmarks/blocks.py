"""Block-wise segmentation against one piece, and its memory:

python benchmarks/blocks.py overhead [--shape 128 512 512] [--pairs 3] [--workers 2] [--records FILE]
python benchmarks/blocks.py memory [--gigabytes 20] [--dense 64] [--workers 2] [--folder FOLDER] [--records FILE]

overhead segments one OME-Zarr of bright balls in turn by one process with as many threads as there are workers, and by
workers of one thread each. Models are loaded and warm; reading and writing count. Prints seconds of the clock and of
the processor, and their ratio. Raises AssertionError where a label differs.

memory makes an OME-Zarr of so many gigabytes (10^9), most of whose chunks are not stored, with balls in a part of
`--dense` planes, as wide as the volume and half as high, and segments it, with labels, and empty windows skipped.
Prints the resident memory of each worker and of the driver at most, as the system counts it, pages of mapped files too,
and of that the anonymous pages, sampled four times a second. Raises AssertionError where one of them takes more than
2 GB, or where labels are found away from that part. Needs room for labels and scratch.

--records keeps what every block took, for benchmarks/blocks_scaling.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import numpy as np
import zarr
from common import ROOT, write_figures
from numpy.typing import NDArray
from processes import Sampler, cpu_seconds, family, proc_text

from service.cli.segment_blocks import share_threads
from service.core.config import Device, Settings, Windows
from service.core.volume import Options, Selection
from service.formats import stack_reader, zarr_writer
from service.inference.batcher import WindowBatcher, open_batcher
from service.inference.blockwise.driver import Driver
from service.inference.blockwise.prepare import make_plan
from service.inference.blockwise.run_folder import BlockTask, RunFolder, Step
from service.inference.blockwise.worker import load_segmenter, run_block
from service.inference.blockwise.workers import LocalWorkers, end_with
from service.inference.segmenter import Segmenter
from service.models.repository import read_spec

MODEL = ROOT / "models/nuclei"
BUDGET = 2 * 10**9
CHUNK = (64, 128, 128)
PLANE = (2048, 2048)
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


def write_image(path: Path, shape: tuple[int, ...], pixels: NDArray[np.uint16], first: int = 0) -> Path:
    """Write an OME-Zarr with pixels in the planes from `first` on; other chunks are not stored."""
    group = zarr.open_group(path, mode="w")
    array = group.create_array("0", shape=shape, dtype=np.uint16, chunks=CHUNK, fill_value=DARK)
    array[first : first + len(pixels), : pixels.shape[1], : pixels.shape[2]] = pixels
    axes = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
    scale = {"type": "scale", "scale": [0.3, 0.3, 0.3]}
    datasets = [{"path": "0", "coordinateTransformations": [scale]}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    return path


@cache
def warm(threads: int) -> tuple[Segmenter, WindowBatcher]:
    settings = Settings(device=Device(name="cpu", threads=threads))
    # As long as the process lives.
    device = _OPEN.enter_context(open_batcher(settings))
    segmenter = Segmenter(read_spec(MODEL), settings)
    device.call(segmenter.warm_up)
    return segmenter, device


def segment_whole(source: Path, out: Path, threads: int, options: Options) -> tuple[float, float]:
    """Segment in one piece; return seconds of the clock and of the processor."""
    segmenter, device = warm(threads)
    began, cpu = time.monotonic(), time.process_time()
    volume = stack_reader.read(source, Selection(), sys.maxsize)
    zarr_writer.write(segmenter.segment(volume, options, run=device.run).segmentation, out)
    return time.monotonic() - began, time.process_time() - cpu


def warm_or_work(task: BlockTask) -> dict[str, Any]:
    """Do a block, or load the model and have it warm."""
    if task.number == WARM_UP:
        load_segmenter(task.folder)
        return {}
    return run_block(task)


def segment_blocks(
    source: Path, out: Path, workers: LocalWorkers, options: Options, *, warm_up: bool
) -> tuple[float, float, Any]:
    """Segment block by block; return seconds of the clock and of the processor, and the records of all blocks."""
    settings = Settings(device=Device(name="cpu"), windows=Windows())
    settings = share_threads(settings, workers.count)
    plan = make_plan(source, Selection(), read_spec(MODEL), options, settings, workers=workers.count)
    folder = RunFolder(out.with_name("scratch"))
    folder.begin(plan, settings)
    if warm_up:
        # Each worker has one of them.
        wait([workers.submit(BlockTask(str(folder.path), "scores", WARM_UP)) for _ in range(workers.count)])
    began, cpu = time.monotonic(), cpu_seconds(os.getpid())
    Driver(folder, workers, lambda *step: print(*step, file=sys.stderr)).run(out, dict)
    spent = time.monotonic() - began, cpu_seconds(os.getpid()) - cpu
    steps = get_args(Step)
    records = {step: [folder.read_record(step, number) for number in sorted(folder.done(step))] for step in steps}
    facts = {"shape": plan.layout.size, "roi": plan.layout.roi, "windows": plan.layout.windows, "records": records}
    shutil.rmtree(folder.path)
    return *spent, facts


def overhead(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = tuple(options.shape)
    source = write_image(folder / "in.zarr", shape, balls(shape))
    asked, pairs = Options(diameter="none"), list[tuple[Any, ...]]()
    with (
        ProcessPoolExecutor(1, get_context("spawn"), end_with, (os.getpid(),)) as whole,
        closing(LocalWorkers(options.workers, warm_or_work)) as workers,
    ):
        whole.submit(warm, options.workers)
        for _ in range(options.pairs):
            one = whole.submit(segment_whole, source, folder / "whole.zarr", options.workers, asked).result()
            many = segment_blocks(source, folder / "blocks.zarr", workers, asked, warm_up=True)
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


def pages(pid: int) -> tuple[int, int]:
    """Return the most resident bytes of one process so far, and its anonymous ones."""
    fields = dict(line.split(":", 1) for line in proc_text(pid, "status").splitlines() if ":" in line)
    most, anonymous = (int(fields.get(name, "0").split()[0]) * 1024 for name in ("VmHWM", "RssAnon"))
    return most, anonymous


def memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    depth = round(options.gigabytes * 1e9 / (2 * PLANE[0] * PLANE[1]))
    first = depth // 2 // CHUNK[0] * CHUNK[0]
    dense = balls((options.dense, PLANE[0] // 2, PLANE[1]))
    source = write_image(folder / "in.zarr", (depth, *PLANE), dense, first)
    asked = Options(diameter="none", skip_below=float(DARK))
    most = dict[int, tuple[int, int]]()

    def note() -> None:
        for pid in family(os.getpid()):
            resident, anonymous = most.get(pid, (0, 0))
            now = pages(pid)
            most[pid] = max(resident, now[0]), max(anonymous, now[1])

    with closing(LocalWorkers(options.workers)) as workers, Sampler(note, 0.25):
        del dense
        # Making the image has taken more than driving the run will.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        seconds, cpu, facts = segment_blocks(source, folder / "out.zarr", workers, asked, warm_up=False)
    write_records(facts, options.records)
    labels = zarr.open_group(folder / "out.zarr")["0"]
    objects = 0
    for z in range(0, depth, CHUNK[0]):
        part = labels[z : z + CHUNK[0]]
        objects = max(objects, int(part.max()))
        is_near = first - CHUNK[0] <= z <= first + options.dense
        assert is_near or not part.any(), f"labels where nothing is, from plane {z} on"
    figures = {
        "input_bytes": 2 * depth * PLANE[0] * PLANE[1],
        "shape": [depth, *PLANE],
        "objects": objects,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_anonymous_bytes": {pid: anonymous for pid, (_, anonymous) in most.items()},
        "peak_resident_bytes": {pid: resident for pid, (resident, _) in most.items()},
        "budget_bytes": BUDGET,
    }
    print(json.dumps(figures), file=sys.stderr)
    assert max(figures["peak_resident_bytes"].values()) <= BUDGET, "more memory was taken than the budget allows"
    return figures


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
    parser.add_argument("--dense", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="a disk with room enough")
    parser.add_argument("--records", type=Path, help="what every block took")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="blocks-", dir=options.folder))
    try:
        figures = overhead(options, folder) if options.what == "overhead" else memory(options, folder)
    finally:
        shutil.rmtree(folder)
    write_figures(figures, options.json)


if __name__ == "__main__":
    main()
