"""Compare the engine that `stackseg tune` chooses with every fixed one, and with bare loops in other runtimes.

python benchmarks/engines.py [--networks nuclei UNet BasicUNet DynUNet SegResNet] [--roi 64] [--batch-sizes 2]
    [--threads 1] [--tune-seconds 120] [--json FILE]

MONAI's networks are trained here for some seconds to tell bright blocks from dark ones: with random weights both
scores of a voxel would be nearly equal, and no narrow precision could give the same labels. Each network is tuned,
then all other engines and the bare loops (OpenVINO and onnxruntime as their guides say, plain torch.compile; in BF16,
too, where the processor has it) run in turn with what was tuned, on batches of one shape; what was tuned is itself one
of the fixed choices, and not built a second time. A fixed choice that changes the labels, as tuning found, is left
out. Speeds are medians of the ratios of single rounds; those that come near the best run in turn for many rounds more,
which count. With one thread CPU seconds count, which leave out what other work on the machine took. onnxruntime and
onnxscript are not among the tools of the tests: `pip install onnxruntime onnxscript` first, or their rows are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from common import ROOT, describe_model, make_model
from torch import Tensor, nn

from service.cli.benchmark.networks import (
    DevicePeak,
    Row,
    Runner,
    RunnerBuilder,
    allows_tf32,
    compare_runners,
    format_config,
    list_engines,
    load_selector,
    make_call,
)
from service.cli.benchmark.report import format_table
from service.cli.benchmark.timing import count_window_flop
from service.core.config import Settings
from service.core.hardware import devices
from service.engine import backends, base
from service.engine.compile import torch_compile
from service.engine.precision import DTYPES
from service.engine.tuning.plans import EngineConfig, Outcome
from service.inference.runner.engine_builder import ReadyEngine
from service.models.network import Network
from service.models.repository import read_spec
from service.models.spec import ModelSpec

COMMON = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
# Edge of a bright or dark block, and steps that suffice to tell them apart.
BLOCK, TRAINING_STEPS = 8, 60
HINTS = {"fp32": "f32", "bf16": "bf16"}
# What is at least so fast, relative to the fastest, runs again, for so many seconds.
NEAR, FINAL_SECONDS = 0.85, 120.0
KERNELS, STRIDES = [[3] * 3] * 5, [[1] * 3, *([[2] * 3] * 4)]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "UNet": COMMON | {"channels": [32, 64, 128, 256], "strides": [2, 2, 2], "num_res_units": 2, "norm": "BATCH"},
    "BasicUNet": dict(COMMON),
    "DynUNet": COMMON | {"kernel_size": KERNELS, "strides": STRIDES, "upsample_kernel_size": STRIDES[1:]},
    "SegResNet": COMMON | {"init_filters": 16},
}


def make_spec(name: str, roi: int, folder: Path) -> ModelSpec:
    """Return the bundled model of that name, or make one of `ARCHITECTURES`."""
    if name not in ARCHITECTURES:
        return read_spec(ROOT / "models" / name)
    content = describe_model(
        name.lower(),
        name,
        ARCHITECTURES[name],
        (roi,) * 3,
        ["background", "cells"],
        input={"channels": 1, "normalisation": {"kind": "zscore"}, "roi_size": [roi] * 3},
        sample={"input": "sample.tif", "expected": "expected.tif"},
    )
    made = make_model(folder, content, train)
    pixels, bright = blocks((roi * 2,) * 3, torch.Generator().manual_seed(1))
    tifffile.imwrite(made / "sample.tif", (pixels * 1000).numpy().astype(np.uint16), metadata={"axes": "ZYX"})
    tifffile.imwrite(made / "expected.tif", bright.numpy().astype(np.uint8), metadata={"axes": "ZYX"})
    return read_spec(made)


def blocks(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make noise with bright blocks, float32 [z, y, x], and the mask of the blocks, bool [z, y, x]."""
    bright = torch.rand([edge // BLOCK for edge in shape], generator=generator) > 0.5
    for axis in range(3):
        bright = bright.repeat_interleave(BLOCK, axis)
    return bright + 0.1 * torch.rand(shape, generator=generator), bright


def train(network: nn.Module) -> None:
    """Train a network to tell bright voxels from dark ones."""
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    network.train()
    for _ in range(TRAINING_STEPS):
        pixels, bright = zip(*(blocks((32, 32, 32), generator) for _ in range(2)), strict=True)
        x = torch.stack(pixels)[:, None]
        loss = nn.functional.cross_entropy(network((x - x.mean()) / x.std()), torch.stack(bright).long())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    network.eval()


def openvino_loop(network: nn.Module, batch: Tensor, precision: str) -> Network:
    """Compile the network with OpenVINO, for latency."""
    import openvino  # noqa: PLC0415

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    converted = openvino.convert_model(network, example_input=batch, input=[tuple(batch.shape)])
    compiled = openvino.compile_model(converted, "CPU", options | {"INFERENCE_PRECISION_HINT": HINTS[precision]})
    return lambda x: torch.from_numpy(compiled(x.numpy())[0])


def onnxruntime_loop(network: nn.Module, batch: Tensor, precision: str) -> Network:
    """Export the network to ONNX, and run it with all optimisations of onnxruntime."""
    import onnxruntime  # noqa: PLC0415

    if precision != "fp32":
        raise RuntimeError(f"onnxruntime's CPU kernels do not compute in {precision}")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        file = str(Path(name) / "network.onnx")
        torch.onnx.export(network, (batch,), file, dynamo=True, external_data=False)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    key = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {key: x.numpy()})[0])


def compiled_loop(network: nn.Module, _batch: Tensor, precision: str) -> Network:
    """Compile the network with torch for static shapes, and nothing else."""
    dtype = DTYPES[precision]
    run = torch.compile(copy.deepcopy(network).to(dtype), dynamic=False)
    return lambda x: run(x.to(dtype)).float()


BARE: dict[str, Callable[[nn.Module, Tensor, str], Network]] = {
    "torch.compile": compiled_loop,
    "OpenVINO": openvino_loop,
    "onnxruntime": onnxruntime_loop,
}


def bare_loops(
    network: nn.Module, spec: ModelSpec, sizes: list[int], device: torch.device, precisions: list[str]
) -> Iterator[Runner]:
    """Build the loops that are installed and run this network, at every batch size."""
    with torch.inference_mode():
        for size in sizes:
            batch = torch.rand(size, spec.input.channels, *spec.input.roi_size, device=device)
            names = BARE if device.type == "cpu" else ("torch.compile",)
            for name, kind in itertools.product(names, precisions):
                try:
                    run = BARE[name](network, batch, kind)
                    for _ in range(base.WARM_UP_CALLS):
                        run(batch)
                except (ImportError, RuntimeError) as error:
                    print(f"bare {name} {kind}: {backends.get_first_line(error)}")
                else:
                    yield Runner(f"bare {name} {kind}", size, kind, make_call(run, batch, device))


def measure(name: str, options: argparse.Namespace, folder: Path) -> tuple[str, list[Row]]:
    """Tune one network, then compare; return a summary and the rows, the first of which that ran is what was tuned."""
    device = devices.choose_device(options.device)
    engine = {"cache_folder": str(folder / "cache"), "precision": options.precision}
    settings = Settings.model_validate({"device": {"name": options.device}, "engine": engine})
    spec = make_spec(name, options.roi, folder)
    network, selector = load_selector(spec, settings, device)
    shape = (spec.input.channels, *spec.input.roi_size)
    selected = selector.tune(options.tune_seconds)
    window, size = selected.window, selected.config.sw_batch_size
    describe = partial(format_config, with_tf32=allows_tf32(settings.engine, device))
    auto = Runner(
        f"auto: {describe(selected.config)}",
        size,
        selected.config.precision,
        make_call(window.network, window.batch, device),
    )
    sizes = sorted({*options.batch_sizes, size})
    cpu_seconds = device.type == "cpu" and options.threads == 1
    peak = DevicePeak(
        device, count_window_flop(network, shape) / 1e9, clock=time.process_time if cpu_seconds else time.perf_counter
    )
    native = devices.native_precisions(device)
    precisions = [kind for kind in ("fp32", "bf16") if DTYPES[kind] in native]
    loops = list(bare_loops(network.to(device), spec, sizes, device, precisions))
    left_out = {
        (describe(selected.config), size),
        *((describe(choice), choice.sw_batch_size) for choice in wrong_configs(selected)),
    }
    others = (
        builder
        for builder in list_engines(spec, settings, device, sizes)
        if (builder.name, builder.windows) not in left_out
    )
    rows = compare_twice([auto, *loops], others, peak)
    return f"{spec.identifier}, {peak.gflop:.1f} GFLOP per window, tuned in {selected.seconds:.0f} s", rows


def compare_twice(first: list[Runner], builders: Iterable[RunnerBuilder], peak: DevicePeak) -> list[Row]:
    """Compare all; then compare the first one and those near the fastest for longer, and take their rows from that."""
    runners, lost = list(first), list[Row]()
    for builder in builders:
        try:
            runners.append(builder.build())
        except backends.ENGINE_ERRORS as error:
            lost.append(Row("engines", builder.name, builder.windows, backends.get_first_line(error)))
    ran = list(compare_runners("engines", runners, peak))
    ratios = [row.ratio.median for row in ran if row.ratio is not None]
    near = [index for index, ratio in enumerate(ratios) if index == 0 or ratio > NEAR * max(ratios)]
    again = compare_runners("engines", [runners[index] for index in near], peak, FINAL_SECONDS)
    for index, row in zip(near, again, strict=True):
        ran[index] = row
    return [*lost, *ran]


def wrong_configs(selected: ReadyEngine) -> list[EngineConfig]:
    """Return the configurations that tuning found to give other labels."""
    trials = () if selected.plan is None else selected.plan.trials
    return [trial.choice for trial in trials if trial.verdict.outcome is Outcome.WRONG]


def relative_speeds(rows: list[Row]) -> dict[str, float]:
    """Return the speed of what was tuned over that of the best fixed engine, and of the best bare loop."""
    speeds = [(row.name, row.ratio.median) for row in rows if row.ratio is not None]
    fixed = [speed for name, speed in speeds if not name.startswith("bare")]
    bare = [speed for name, speed in speeds if name.startswith("bare")]
    return {"best fixed": 1 / max(fixed), "best bare loop": 1 / max(bare)} if bare else {"best fixed": 1 / max(fixed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["nuclei", *ARCHITECTURES])
    parser.add_argument("--roi", type=int, default=64, help="edge of the windows of MONAI's networks")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2], help="besides the one that was tuned")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", help="of the engines")
    parser.add_argument("--tune-seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    device = devices.device_name(devices.choose_device(options.device))
    print(f"{device}, {options.threads} threads, torch {torch.__version__}")
    found: dict[str, Any] = {}
    began = time.monotonic()
    for name in options.networks:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            how, rows = measure(name, options, Path(folder))
        # What torch keeps of one network would take the next one's memory.
        torch.compiler.reset()
        torch_compile.drop_generated_code()
        print(f"\n{how}; load average {os.getloadavg()[0]:.1f}\n")
        print("\n".join(format_table("engine", rows)), flush=True)
        found[name] = {"rows": [asdict(row) for row in rows], "standing": relative_speeds(rows)}
    print("\n| network | auto over best fixed | auto over best bare loop |\n|---|---|---|")
    for name, result in found.items():
        shares = result["standing"]
        bare = shares.get("best bare loop")
        print(f"| {name} | {shares['best fixed']:.2f} | {'' if bare is None else f'{bare:.2f}'} |")
    print(f"\n{(time.monotonic() - began) / 60:.0f} minutes in all")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
