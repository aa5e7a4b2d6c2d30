"""Measurements of benchmarks/gpu.sh other than `stackseg bench`. Each row is printed as soon as it is measured.

python benchmarks/gpu.py machine
python benchmarks/gpu.py check [--device cuda]
python benchmarks/gpu.py graphs [--device cuda] [--batch-sizes 8 11 16 32 64]
python benchmarks/gpu.py engines [--device cuda] [--batch-sizes 8 11 16 32 64]
python benchmarks/gpu.py profile [--device cuda] [--shape 64 512 512] [--out FOLDER]
python benchmarks/gpu.py clients [--device cuda] [--config gpu] [--shape 64 512 512] [--seconds 15]
python benchmarks/gpu.py loads [--device cuda] [--loads 50]

machine  versions, GPU and processor
check    checks that the other measurements can be trusted, see benchmarks/gpu_checks.py
graphs   speed of the bundled network as a CUDA graph without compilation, compared with the network in eager FP32
engines  the same for each engine: without compilation at all batch sizes, then compiled at the best batch size
profile  the slowest operations of a request on the device and on the host, and a trace for Perfetto in FOLDER
clients  one client, then eight, send stacks to a real server: stacks per second, the fraction of the time in which the
         device ran the network, and the GPU utilization that the driver reports
loads    requests alternate between two models that do not fit into memory together, while another client uses a third
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import multiprocessing
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ROOT, TIFF, parse_server_timing, request, run_server
from end_to_end import read_metrics
from gpu_checks import load, make_settings, plain_settings, run_checks

from service.cli.benchmark.engine_comparison import (
    DevicePeak,
    EngineRow,
    TimedNetwork,
    TimedNetworkBuilder,
    collect_rows,
    compare_with_first,
    iter_builders,
    load_selector,
    make_call,
)
from service.cli.benchmark.report import format_table
from service.cli.benchmark.requests import MAX_STACK_BYTES, ORIGINAL_RESOLUTION, write_stack
from service.cli.benchmark.timing import count_window_flop
from service.cli.models import choose_model
from service.core.config import Settings, override_settings
from service.core.hardware import devices, gpus, host
from service.core.types import Selection
from service.engine.base import WARM_UP_CALLS
from service.formats import stack_reader
from service.inference.segment import segment
from service.models.loader import load_network
from service.models.repository import read_spec
from service.models.spec import ModelSpec

LIBRARIES = ("numpy", "triton", "monai", "tifffile", "imagecodecs", "pydantic", "starlette", "uvicorn")
CLIENTS = 8
# Seconds for comparing a runner with the reference.
MAX_PAIR_SECONDS = 4.0
# Number of rows in each table of the profile.
PROFILE_ROWS = 30
# Do not wait for the last requests when the server is stopped.
FRESH_RESULTS = {"STACKSEG_LIMITS__CACHE_BYTES": "0"}
FAST_SHUTDOWN = {"STACKSEG_SERVER__DRAIN_SECONDS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--config", default="default")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8])
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 512, 512))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--loads", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    # If `timeout` ends this script, stop the server as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return STEPS[options.step](options)


def print_row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(*names: str) -> None:
    """Print the header of a Markdown table."""
    print_row(*names)
    print("|---" * len(names) + "|", flush=True)


def print_machine(_options: argparse.Namespace) -> int:
    """Print the versions of libraries, the processor and the GPUs."""
    print_header("component", "version or model")
    print_row("Python", platform.python_version())
    print_row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in LIBRARIES:
        try:
            print_row(name, version(name))
        except PackageNotFoundError:
            print_row(name, "missing")
    cpu = host.query_host()
    print_row("processor", f"{cpu.name}, {cpu.cores} cores, {' '.join(cpu.features)}")
    for gpu in gpus.query_gpus():
        memory = (gpu.memory_total or 0) / 2**30
        print_row(f"GPU {gpu.index}", f"{gpu.name}, {memory:.0f} GiB, driver {gpu.driver}, {gpu.compute_capability}")
    return 0


def run_all_checks(options: argparse.Namespace) -> int:
    """Print the result of each check. Returns 1 if a check failed."""
    print_header("check", "result", "verdict")
    failed = False
    for check in run_checks(options.device):
        print_row(check.name, check.result, check.verdict)
        failed |= check.passed is False
    return int(failed)


def compare_graphs(options: argparse.Namespace) -> int:
    """Compare the network without compilation with the eager FP32 network, at each batch size."""
    is_cuda = devices.choose_device(options.device).type == "cuda"
    fixed = {"kind": "cudagraph", "precision": "bf16", "channels_last": True} if is_cuda else {"kind": "eager"}
    settings = make_settings(options.device, **fixed)
    return compare(options, settings, include_compiled=False)


def compare_engines(options: argparse.Namespace) -> int:
    """Compare each engine with the eager FP32 network at each batch size, and compiled at the best batch size."""
    settings = make_settings(options.device)
    native = devices.list_native_precisions(devices.choose_device(options.device))
    if settings.engine.precision == "auto" and torch.bfloat16 in native:
        settings = override_settings(settings, "engine", {"precision": "bf16"})
    return compare(options, settings, include_compiled=True)


def build_reference(spec: ModelSpec, settings: Settings, device: torch.device, batch_size: int) -> TimedNetwork:
    """Build the reference: the network as loaded, in eager float32, without TF32 regardless of the settings.

    Raises one of `backends.ENGINE_ERRORS` if the network does not run on this device.
    """
    _, selector = load_selector(spec, settings, device)
    window = selector.make_reference(batch_size)
    call = make_call(window.network, window.batch, device)
    for _ in range(WARM_UP_CALLS):
        call()
    return TimedNetwork("eager fp32 contiguous", batch_size, "fp32", call, is_tf32_disabled=device.type == "cuda")


def compare(options: argparse.Namespace, settings: Settings, *, include_compiled: bool) -> int:
    """Print a row for each engine. Returns 1 if an engine failed."""
    device = devices.choose_device(options.device)
    spec = choose_model(None, settings)
    peak = DevicePeak(device, count_window_flop(load_network(spec), (spec.input.channels, *spec.input.roi_size)) / 1e9)
    reference = build_reference(spec, settings, device, options.batch_sizes[0])
    builders = list(iter_builders(spec, settings, device, options.batch_sizes))
    rows = list[EngineRow]()

    def order_builders() -> Iterator[TimedNetworkBuilder]:
        # Engines without compilation take only seconds, so they are first.
        yield from (builder for builder in builders if not builder.is_compiled)
        if include_compiled:
            best = min(rows[1:], key=lambda row: row.ms_per_window.median if row.ms_per_window else math.inf).windows
            yield from (builder for builder in builders if builder.is_compiled and builder.batch_size == best)

    measured = compare_with_first(reference, order_builders(), peak, pair_seconds=MAX_PAIR_SECONDS)
    for line in format_table("engine", collect_rows(measured, rows)):
        print(line, flush=True)
    return int(any(row.problem for row in rows))


@torch.inference_mode()
def profile_request(options: argparse.Namespace) -> int:
    """Print the operations of a request that take most time, and write a trace that includes Python calls."""
    runner = load(plain_settings(options.device))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        write_stack(runner.spec, tuple(options.shape), Path(name, "stack.tif"))
        volume = stack_reader.read(Path(name, "stack.tif"), Selection(), MAX_STACK_BYTES, Path(name))
        for _ in range(2):
            segment(runner, volume, ORIGINAL_RESOLUTION)
        with torch.profiler.profile() as recorded:
            result = segment(runner, volume, ORIGINAL_RESOLUTION)
    print_header("stage", "ms")
    for stage, seconds in result.seconds.items():
        print_row(stage, f"{1000 * seconds:.1f}")
    print_longest("on the device", recorded, is_on_device=True)
    print_longest("on the host", recorded, is_on_device=False)
    with torch.profiler.profile(with_stack=True) as recorded:
        segment(runner, volume, ORIGINAL_RESOLUTION)
    recorded.export_chrome_trace(str(options.out / "trace.json.gz"))
    return 0


def print_longest(title: str, recorded: torch.profiler.profile, *, is_on_device: bool) -> None:
    """Print the operations, kernels and driver calls with the longest self time."""
    events = [
        (
            operation.self_device_time_total if is_on_device else operation.self_cpu_time_total,
            operation.count,
            operation.key,
        )
        for operation in recorded.key_averages()
        if (operation.device_type == torch.autograd.DeviceType.CUDA) == is_on_device
    ]
    print()
    print_header(title, "calls", "ms")
    print_row("all", sum(count for _, count, _ in events), f"{sum(event[0] for event in events) / 1000:.1f}")
    for microseconds, count, key in sorted(events, reverse=True)[:PROFILE_ROWS]:
        print_row(f"`{key[:100]}`", count, f"{microseconds / 1000:.2f}")


def serve_clients(options: argparse.Namespace) -> int:
    """Send stacks to a server from one client, then from eight."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        write_stack(read_spec(ROOT / "models" / "nuclei"), tuple(options.shape), folder / "stack.tif")
        with run_server(
            folder, "--config", options.config, STACKSEG_DEVICE__NAME=options.device, **FRESH_RESULTS, **FAST_SHUTDOWN
        ) as (
            _pid,
            port,
        ):
            print_header(
                "clients",
                "stacks",
                "stacks/s",
                "median s",
                "network",
                "GPU utilization (driver)",
                "stages, median ms",
                "other responses",
            )
            for clients in (1, CLIENTS):
                print_row(clients, *measure_clients(port, folder / "stack.tif", clients, options.seconds))
    return 0


def measure_clients(port: int, stack: Path, clients: int, seconds: float) -> Sequence[object]:
    """Send requests from this number of processes for `seconds`; return the cells of their row."""
    post_stack(port, stack, time.monotonic())
    utilization = list[int]()
    before, began = busy_seconds(port), time.monotonic()
    # Threads of one process would wait for each other while they send and receive.
    with ProcessPoolExecutor(clients, multiprocessing.get_context("fork")) as pool:
        pending = [pool.submit(post_stack, port, stack, began + seconds) for _ in range(clients)]
        while wait(pending, timeout=0.2).not_done:
            utilization += [
                gpu.utilisation_percent for gpu in gpus.query_gpus()[:1] if gpu.utilisation_percent is not None
            ]
        responses = [response for client in pending for response in client.result()]
    wall = time.monotonic() - began
    share = (busy_seconds(port) - before) / wall
    answered = [response for response in responses if response.status == 200]
    stages = {
        name: statistics.median(response.stages[name] for response in answered)
        for name in (answered[0].stages if answered else ())
    }
    return (
        len(answered),
        f"{len(answered) / wall:.1f}",
        f"{statistics.median(response.seconds for response in answered):.3f}" if answered else "",
        f"{share:.2f}",
        f"{statistics.mean(utilization):.0f} %" if utilization else "unknown",
        ", ".join(f"{name} {1000 * value:.0f}" for name, value in stages.items()),
        dict(Counter(response.status for response in responses if response.status != 200)) or "none",
    )


class TimedResponse(NamedTuple):
    """Status of a response, seconds until it was received, and seconds of each stage on the server."""

    status: int
    seconds: float
    stages: dict[str, float]


def post_stack(port: int, stack: Path, deadline: float) -> list[TimedResponse]:
    """Post a stack over one connection until `deadline`, as returned by `time.monotonic`, but at least once."""
    body, responses = stack.read_bytes(), list[TimedResponse]()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while not responses or time.monotonic() < deadline:
        began = time.monotonic()
        connection.request("POST", "/segment?diameter=none", body, TIFF)
        response = connection.getresponse()
        response.read()
        timing = response.headers.get("Server-Timing")
        stages = {} if timing is None else parse_server_timing(timing)
        responses.append(TimedResponse(response.status, time.monotonic() - began, stages))
    return responses


def busy_seconds(port: int) -> float:
    """Return the total time in which the devices of a server have run the network."""
    return sum(value for name, value in read_metrics(port).items() if name.startswith("stackseg_device_seconds_total"))


@contextmanager
def run_threads(work: Callable[[], None], count: int, stop_event: threading.Event) -> Iterator[None]:
    """Run `work` in `count` threads; at the end of the block, also after an error, set `stop` and join them."""
    workers = [threading.Thread(target=work) for _ in range(count)]
    for thread in workers:
        thread.start()
    try:
        yield
    finally:
        stop_event.set()
        for thread in workers:
            thread.join()


def alternate_models(options: argparse.Namespace) -> int:
    """Alternate between two models with memory for one, while a client uses the default model.

    Returns 1 if a response has status 5xx.
    """
    sample = (ROOT / "models" / "membranes" / "sample.tif").read_bytes()
    statuses, stop_event = Counter[int](), threading.Event()

    def post_continuously() -> None:
        while not stop_event.is_set():
            statuses[request(port, "POST", "/segment?model=nuclei&diameter=none", sample)[0]] += 1

    memory = memory_of_two_models(options)
    environment = {"STACKSEG_DEVICE__NAME": options.device, "STACKSEG_MODELS__MEMORY_BYTES": str(memory)}
    environment |= FAST_SHUTDOWN
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as name,
        run_server(Path(name), **environment) as (_pid, port),
    ):
        print_header("loads", "unloads", "responses", "5xx or no response", "GiB in use on the device", "seconds")
        began = time.perf_counter()
        with run_threads(post_continuously, 1, stop_event):
            for turn in range(options.loads):
                model = ("membranes", "tissue")[turn % 2]
                statuses[request(port, "POST", f"/segment?model={model}&diameter=none", sample)[0]] += 1
                if turn % 5 == 4 or turn + 1 == options.loads:
                    print_row(*describe_loads(port, statuses), f"{time.perf_counter() - began:.0f}")
    return int(count_failures(statuses) > 0)


def memory_of_two_models(options: argparse.Namespace) -> int:
    """Return the memory of the default model and of the larger of the two others, as reported by a server."""
    environment = {"STACKSEG_DEVICE__NAME": options.device, "STACKSEG_MODELS__LOAD": "all"}
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as name,
        run_server(Path(name), **environment) as (_pid, port),
    ):
        sizes = read_sizes(port)
    return sizes["nuclei"] + max(sizes["membranes"], sizes["tissue"])


def read_sizes(port: int) -> dict[str, int]:
    """Return the memory of each loaded model in bytes."""
    models: list[dict[str, Any]] = json.loads(request(port, "GET", "/models")[1])["models"]
    return {model["name"]: sum(loaded["bytes"] for loaded in model["devices"]) for model in models}


def describe_loads(port: int, statuses: Counter[int]) -> Sequence[object]:
    """Return the first cells of a row of the step `loads`."""
    metrics = read_metrics(port)
    loads, unloads = (
        int(sum(value for name, value in metrics.items() if name.startswith(f"stackseg_model_{what}_total")))
        for what in ("loads", "unloads")
    )
    used = sum(gpu.memory_used or 0 for gpu in gpus.query_gpus())
    return loads, unloads, statuses.total(), count_failures(statuses), f"{used / 2**30:.2f}"


def count_failures(statuses: Counter[int]) -> int:
    """Count responses with status 5xx and requests without a response."""
    return sum(count for status, count in statuses.items() if status == 0 or status >= 500)


STEPS: dict[str, Callable[[argparse.Namespace], int]] = {
    "machine": print_machine,
    "check": run_all_checks,
    "graphs": compare_graphs,
    "engines": compare_engines,
    "profile": profile_request,
    "clients": serve_clients,
    "loads": alternate_models,
}


if __name__ == "__main__":
    sys.exit(main())
