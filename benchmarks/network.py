"""How fast one model's network runs here, by engine and batch size, and how far that is from what the machine can do.

python benchmarks/network.py [--model models/nuclei] [--threads 1] [--batch-sizes 1 2 4] [--calls 10]

Milliseconds are the least of all calls, per window. CPU milliseconds are those of all threads together; on a machine
shared with other work they, with one thread, are the ones to trust. The share of the peak is the network's arithmetic
(multiplications and additions of the model as it is written) per second, over that of a large matrix product; Winograd
convolutions need fewer of them, so their share can pass 100 %.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from service.core import hardware
from service.engine import precision, torch_compile
from service.engine.cpu import cpu_graph, onednn, winograd
from service.engine.prepare import prepare
from service.models.loader import Network, load_network
from service.models.repository import read_spec

ROOT = Path(__file__).resolve().parent.parent
MATRIX = 2048


class Row(NamedTuple):
    """One way to run the network, on one batch."""

    name: str
    run: Network
    x: Tensor


class Timing(NamedTuple):
    """Least seconds of one call: by the clock, and of all threads together."""

    wall: float
    cpu: float


def least(call: Callable[[], object], calls: int, device: torch.device) -> Timing:
    """The fastest of `calls` calls, after three that are not counted."""
    for _ in range(3):
        call()
    walls, cpus = [], []
    for _ in range(calls):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Timing(min(walls), min(cpus))


def trusted(timing: Timing, device: torch.device) -> float:
    """With one thread CPU seconds leave out what other processes took; with more they count each thread."""
    return timing.cpu if device.type == "cpu" and torch.get_num_threads() == 1 else timing.wall


def matrix_peak(dtype: torch.dtype, calls: int, device: torch.device) -> float:
    """FLOP per second of a square matrix product."""
    a, b = (torch.rand(MATRIX, MATRIX, device=device).to(dtype) for _ in range(2))
    return 2 * MATRIX**3 / trusted(least(lambda: a @ b, calls, device), device)


def variants(
    network: nn.Module, window: tuple[int, ...], dtype: torch.dtype, batch_size: int, device: torch.device
) -> Iterator[Row]:
    """The network as a plain script runs it, as the eager engine does, and as the compiled engine does."""
    x = torch.rand(batch_size, *window, device=device)
    yield Row("eager float32, contiguous, as loaded", copy.deepcopy(network).to(device), x)
    laid_out = prepare(network, device, dtype, torch.channels_last_3d)
    on_cpu = device.type == "cpu"
    if on_cpu and dtype != torch.float32:
        yield from winograds(prepare(network, device, torch.float32, torch.channels_last_3d), x)
    x = x.to(dtype).to(memory_format=torch.channels_last_3d)
    yield Row(f"eager {dtype}, channels-last, folded", laid_out, x)
    torch.compiler.reset()
    run = torch_compile.compile_module(laid_out, "default" if on_cpu else "reduce-overhead", freeze=on_cpu)
    yield Row(f"compiled {dtype}, channels-last, folded", run, x)
    if on_cpu:
        yield from winograds(laid_out, x)


def winograds(laid_out: nn.Module, x: Tensor) -> Iterator[Row]:
    """With Winograd convolutions, without compilation and with it; nothing where there are none."""
    if winograd.count_replaceable(laid_out):
        x = x.to(memory_format=torch.channels_last_3d)
        fast = onednn.pack(winograd.replace_convolutions(laid_out).get_submodule("network"), gives_scores=True)
        yield Row(f"Winograd convolutions {x.dtype}, others packed", fast, x)
        yield Row(f"Winograd convolutions {x.dtype}, others packed, one call", cpu_graph.capture(fast, x), x)
        run = torch_compile.compile_module(winograd.replace_convolutions(laid_out), "default", freeze=True)
        yield Row(f"Winograd convolutions {x.dtype}, compiled and frozen", run, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = read_spec(options.model)
    network = load_network(spec)
    device = hardware.choose_device(options.device)
    dtype = precision.choose("auto", hardware.native_precisions(device)).dtype
    window = (spec.input.channels, *spec.input.roi_size)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, *window))
    gflop = counter.get_total_flops() / 1e9
    print(f"{hardware.device_name(device)}, {options.threads} threads, torch {torch.__version__}")
    print(f"{spec.identifier}, window {spec.input.roi_size}: {gflop:.1f} GFLOP")
    peaks: dict[torch.dtype, float] = {}
    rows: list[tuple[Row, Timing]] = []
    for row in chain.from_iterable(variants(network, window, dtype, b, device) for b in options.batch_sizes):
        with torch.inference_mode():
            rows.append((row, least(partial(row.run, row.x), options.calls, device)))
            # Measured again beside every row, so that a moment in which the machine was busy does not lower it.
            peaks[row.x.dtype] = max(peaks.get(row.x.dtype, 0), matrix_peak(row.x.dtype, options.calls, device))
    print(", ".join(f"matrix product {kind}: {value / 1e9:.0f} GFLOP/s" for kind, value in peaks.items()))
    print("\n| network | batch | ms | CPU ms | share of the peak |\n|---|---|---|---|---|")
    for row, timing in rows:
        windows = len(row.x)
        share = gflop * 1e9 * windows / trusted(timing, device) / peaks[row.x.dtype]
        wall, cpu = (value * 1000 / windows for value in timing)
        print(f"| {row.name} | {windows} | {wall:.1f} | {cpu:.1f} | {share:.0%} |")


if __name__ == "__main__":
    main()
