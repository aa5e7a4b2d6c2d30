"""Compare the engine that `stackseg tune` selects with each fixed engine, and with bare loops in other runtimes.

python benchmarks/engines.py [--networks nuclei UNet BasicUNet DynUNet SegResNet] [--roi 64] [--batch-sizes 2]
    [--threads 1] [--tune-seconds 120] [--json FILE]

MONAI's networks are first trained for a few seconds to distinguish bright blocks from dark ones. With random weights,
the two scores of a voxel would be nearly equal, and reduced precision would change the labels.

Each network is tuned. Then the tuned engine alternates with all other engines and with the bare loops, on batches of
the same shape. The bare loops are OpenVINO and onnxruntime as their guides recommend, and plain torch.compile, in FP32
and, if the processor supports it, in BF16. The tuned engine is also one of the fixed engines, so it is not built twice.
Fixed engines that changed the labels during tuning are left out. Speeds are medians of the ratios of individual rounds.
The tuned engine and those close to the fastest are then measured again for longer, and these results replace the first.
With one thread, CPU seconds are compared, which exclude other work on the machine.

onnxruntime and onnxscript are not development dependencies. Install them with `pip install onnxruntime onnxscript`;
otherwise their rows are missing.
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

from service.cli.benchmark.engine_comparison import (
    DevicePeak,
    EngineRow,
    TimedNetwork,
    TimedNetworkBuilder,
    compare_networks,
    format_config,
    is_tf32_allowed,
    iter_builders,
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

ARGUMENTS = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
# Edge of a bright or dark block, in voxels.
BLOCK_EDGE = 8
# Enough to distinguish bright from dark blocks.
TRAINING_STEPS = 60
OV_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
# Engines whose speed is above this fraction of the fastest are measured again.
MIN_SPEED_FOR_FINAL = 0.85
FINAL_SECONDS = 120.0
KERNELS = [[3] * 3] * 5
STRIDES = [[1] * 3, *([[2] * 3] * 4)]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "UNet": ARGUMENTS | {"channels": [32, 64, 128, 256], "strides": [2, 2, 2], "num_res_units": 2, "norm": "BATCH"},
    "BasicUNet": dict(ARGUMENTS),
    "DynUNet": ARGUMENTS | {"kernel_size": KERNELS, "strides": STRIDES, "upsample_kernel_size": STRIDES[1:]},
    "SegResNet": ARGUMENTS | {"init_filters": 16},
}


def make_spec(name: str, roi: int, folder: Path) -> ModelSpec:
    """Return the bundled model of this name, or create and train a model with this architecture of MONAI."""
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
    model_folder = make_model(folder, content, train)
    pixels, bright = make_blocks((roi * 2,) * 3, torch.Generator().manual_seed(1))
    tifffile.imwrite(model_folder / "sample.tif", (pixels * 1000).numpy().astype(np.uint16), metadata={"axes": "ZYX"})
    tifffile.imwrite(model_folder / "expected.tif", bright.numpy().astype(np.uint8), metadata={"axes": "ZYX"})
    return read_spec(model_folder)


def make_blocks(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a noisy image with bright blocks, float32 [z, y, x], and the mask of the blocks, bool [z, y, x]."""
    bright = torch.rand([edge // BLOCK_EDGE for edge in shape], generator=generator) > 0.5
    for axis in range(3):
        bright = bright.repeat_interleave(BLOCK_EDGE, axis)
    return bright + 0.1 * torch.rand(shape, generator=generator), bright


def train(network: nn.Module) -> None:
    """Train a network to distinguish bright voxels from dark ones."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    network.train()
    for _ in range(TRAINING_STEPS):
        pixels, bright = zip(*(make_blocks((32, 32, 32), generator) for _ in range(2)), strict=True)
        x = torch.stack(pixels)[:, None]
        loss = nn.functional.cross_entropy(network((x - x.mean()) / x.std()), torch.stack(bright).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()


def openvino_loop(network: nn.Module, batch: Tensor, precision: str) -> Network:
    """Compile the network with OpenVINO, optimized for latency."""
    import openvino  # noqa: PLC0415

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    converted = openvino.convert_model(network, example_input=batch, input=[tuple(batch.shape)])
    compiled = openvino.compile_model(
        converted, "CPU", options | {"INFERENCE_PRECISION_HINT": OV_PRECISIONS[precision]}
    )
    return lambda x: torch.from_numpy(compiled(x.numpy())[0])


def onnxruntime_loop(network: nn.Module, batch: Tensor, precision: str) -> Network:
    """Export the network to ONNX, and run it with onnxruntime's default graph optimizations."""
    import onnxruntime  # noqa: PLC0415

    if precision != "fp32":
        raise RuntimeError(f"onnxruntime's CPU kernels do not support {precision}")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        file = str(Path(name) / "network.onnx")
        torch.onnx.export(network, (batch,), file, dynamo=True, external_data=False)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    key = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {key: x.numpy()})[0])


def compiled_loop(network: nn.Module, _batch: Tensor, precision: str) -> Network:
    """Compile the network with `torch.compile` for static shapes, without other optimizations."""
    dtype = DTYPES[precision]
    run = torch.compile(copy.deepcopy(network).to(dtype), dynamic=False)
    return lambda x: run(x.to(dtype)).float()


BARE_LOOPS: dict[str, Callable[[nn.Module, Tensor, str], Network]] = {
    "torch.compile": compiled_loop,
    "OpenVINO": openvino_loop,
    "onnxruntime": onnxruntime_loop,
}


def build_bare_loops(
    network: nn.Module, spec: ModelSpec, sizes: list[int], device: torch.device, precisions: list[str]
) -> Iterator[TimedNetwork]:
    """Build a bare loop for each runtime, precision and batch size; print an error for each that fails."""
    with torch.inference_mode():
        for size in sizes:
            batch = torch.rand(size, spec.input.channels, *spec.input.roi_size, device=device)
            names = BARE_LOOPS if device.type == "cpu" else ("torch.compile",)
            for name, precision in itertools.product(names, precisions):
                try:
                    run = BARE_LOOPS[name](network, batch, precision)
                    for _ in range(base.WARM_UP_CALLS):
                        run(batch)
                except (ImportError, RuntimeError) as error:
                    print(f"bare {name} {precision}: {backends.get_first_line(error)}")
                else:
                    yield TimedNetwork(f"bare {name} {precision}", size, precision, make_call(run, batch, device))


def measure(name: str, options: argparse.Namespace, folder: Path) -> tuple[str, list[EngineRow]]:
    """Tune a network and compare its engines; return a summary and the rows.

    The first row without a problem is the tuned engine.
    """
    device = devices.choose_device(options.device)
    engine = {"cache_folder": str(folder / "cache"), "precision": options.precision}
    settings = Settings.model_validate({"device": {"name": options.device}, "engine": engine})
    spec = make_spec(name, options.roi, folder)
    network, selector = load_selector(spec, settings, device)
    shape = (spec.input.channels, *spec.input.roi_size)
    selected = selector.tune(options.tune_seconds)
    window, size = selected.window, selected.config.sw_batch_size
    format_name = partial(format_config, tf32_allowed=is_tf32_allowed(settings.engine, device))
    auto = TimedNetwork(
        f"auto: {format_name(selected.config)}",
        size,
        selected.config.precision,
        make_call(window.network, window.batch, device),
    )
    sizes = sorted({*options.batch_sizes, size})
    uses_cpu_time = device.type == "cpu" and options.threads == 1
    peak = DevicePeak(
        device, count_window_flop(network, shape) / 1e9, clock=time.process_time if uses_cpu_time else time.perf_counter
    )
    native = devices.list_native_precisions(device)
    precisions = [precision for precision in ("fp32", "bf16") if DTYPES[precision] in native]
    bare_loops = list(build_bare_loops(network.to(device), spec, sizes, device, precisions))
    excluded = {
        (format_name(selected.config), size),
        *((format_name(choice), choice.sw_batch_size) for choice in list_wrong_configs(selected)),
    }
    others = (
        builder
        for builder in iter_builders(spec, settings, device, sizes)
        if (builder.name, builder.batch_size) not in excluded
    )
    rows = compare_twice([auto, *bare_loops], others, peak)
    return f"{spec.identifier}, {peak.gflop:.1f} GFLOP per window, tuned in {selected.seconds:.0f} s", rows


def compare_twice(
    first: list[TimedNetwork], builders: Iterable[TimedNetworkBuilder], peak: DevicePeak
) -> list[EngineRow]:
    """Compare all engines, then compare the first and those close to the fastest again for longer.

    Returns rows of the engines that could not be built, then a row for each other engine.
    """
    runners, failed = list(first), list[EngineRow]()
    for builder in builders:
        try:
            runners.append(builder.build())
        except backends.ENGINE_ERRORS as error:
            failed.append(EngineRow("engines", builder.name, builder.batch_size, backends.get_first_line(error)))
    rows = list(compare_networks("engines", runners, peak))
    ratios = [row.ratio.median for row in rows if row.ratio is not None]
    finalists = [index for index, ratio in enumerate(ratios) if index == 0 or ratio > MIN_SPEED_FOR_FINAL * max(ratios)]
    final_rows = compare_networks("engines", [runners[index] for index in finalists], peak, FINAL_SECONDS)
    for index, row in zip(finalists, final_rows, strict=True):
        rows[index] = row
    return [*failed, *rows]


def list_wrong_configs(selected: ReadyEngine) -> list[EngineConfig]:
    """Return the configurations that were found to change the labels during tuning."""
    trials = () if selected.plan is None else selected.plan.trials
    return [trial.choice for trial in trials if trial.verdict.outcome is Outcome.WRONG]


def relative_speeds(rows: list[EngineRow]) -> dict[str, float]:
    """Return the speed of the tuned engine relative to the fastest fixed engine and to the fastest bare loop."""
    speeds = [(row.name, row.ratio.median) for row in rows if row.ratio is not None]
    fixed = [speed for name, speed in speeds if not name.startswith("bare")]
    bare = [speed for name, speed in speeds if name.startswith("bare")]
    return {"best fixed": 1 / max(fixed), "best bare loop": 1 / max(bare)} if bare else {"best fixed": 1 / max(fixed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["nuclei", *ARCHITECTURES])
    parser.add_argument("--roi", type=int, default=64, help="window edge of MONAI's networks, in voxels")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2], help="in addition to the tuned batch size")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", help="precision of the engines")
    parser.add_argument("--tune-seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    device = devices.get_device_name(devices.choose_device(options.device))
    print(f"{device}, {options.threads} threads, torch {torch.__version__}")
    results: dict[str, Any] = {}
    began = time.monotonic()
    for name in options.networks:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            summary, rows = measure(name, options, Path(folder))
        # Free the compiled code of this network before the next one is measured.
        torch.compiler.reset()
        torch_compile.drop_generated_code()
        print(f"\n{summary}; load average {os.getloadavg()[0]:.1f}\n")
        print("\n".join(format_table("engine", rows)), flush=True)
        results[name] = {"rows": [asdict(row) for row in rows], "standing": relative_speeds(rows)}
    print("\n| network | auto over best fixed | auto over best bare loop |\n|---|---|---|")
    for name, result in results.items():
        speeds = result["standing"]
        bare = speeds.get("best bare loop")
        print(f"| {name} | {speeds['best fixed']:.2f} | {'' if bare is None else f'{bare:.2f}'} |")
    print(f"\n{(time.monotonic() - began) / 60:.0f} minutes in total")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
