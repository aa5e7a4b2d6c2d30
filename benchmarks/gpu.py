"""What benchmarks/gpu.sh measures besides `stackseg bench`; each row is printed as soon as it is measured.

python benchmarks/gpu.py machine
python benchmarks/gpu.py check [--device cuda]
python benchmarks/gpu.py graphs [--device cuda] [--batch-sizes 8 11 16 32 64]
python benchmarks/gpu.py engines [--device cuda] [--batch-sizes 8 11 16 32 64]
python benchmarks/gpu.py profile [--device cuda] [--shape 64 512 512] [--out FOLDER]
python benchmarks/gpu.py clients [--device cuda] [--config gpu] [--shape 64 512 512] [--seconds 15]
python benchmarks/gpu.py loads [--device cuda] [--loads 50]

machine  versions, GPU and processor
check    whether the figures that follow can be trusted: see benchmarks/gpu_checks.py
graphs   the bundled network alone, recorded as a CUDA graph without compilation, in turn with the eager FP32 network
engines  the same by every engine: at all batch sizes without compilation, then compiled at the best of them
profile  a request in one thread: what takes most time on the device and on the host, and a trace in FOLDER for Perfetto
clients  one client, then eight, who post stacks to a real server: answers per second, the share of the time in which
         the device ran the network by its own clock, and the driver's utilisation
loads    a server with room for one model of two that are asked for in turn, alongside a client of a third
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from common import ROOT, request, run_server
from end_to_end import read_metrics
from gpu_checks import load, plain_settings, run_checks, settings_of

from service.cli.benchmark.networks import (
    DevicePeak,
    Row,
    Runner,
    RunnerBuilder,
    collect_rows,
    compare_with_first,
    list_engines,
    load_selector,
    make_call,
)
from service.cli.benchmark.report import format_table
from service.cli.benchmark.requests import LIMIT_BYTES, ORIGINAL_RESOLUTION, write_stack
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
CLIENTS, PAIR_SECONDS = 8, 4.0
# Rows of each table of a profile.
PROFILED = 30
# A server that is stopped in the middle of requests gives them up.
STOP_AT_ONCE = {"STACKSEG_SERVER__DRAIN_SECONDS": "1"}


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
    # A time limit must not leave a server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return STEPS[options.step](options)


def show(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def show_head(*names: str) -> None:
    show(*names)
    print("|---" * len(names) + "|", flush=True)


def show_machine(_options: argparse.Namespace) -> int:
    """Print what this machine is and has."""
    show_head("what", "which")
    show("Python", platform.python_version())
    show("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in LIBRARIES:
        try:
            show(name, version(name))
        except PackageNotFoundError:
            show(name, "missing")
    cpu = host.query_cpu()
    show("processor", f"{cpu.name}, {cpu.cores} cores, {' '.join(cpu.features)}")
    for gpu in gpus.query_gpus():
        memory = (gpu.memory_total or 0) / 2**30
        show(f"GPU {gpu.index}", f"{gpu.name}, {memory:.0f} GiB, driver {gpu.driver}, {gpu.compute_capability}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Print what each check has found. Returns 1 if one of them has failed."""
    show_head("check", "found", "verdict")
    failed = False
    for each in run_checks(options.device):
        show(each.name, each.found, each.verdict)
        failed |= each.passed is False
    return int(failed)


def compare_graphs(options: argparse.Namespace) -> int:
    """Time the network without compilation at each batch size, in turn with the eager FP32 network."""
    is_cuda = devices.choose_device(options.device).type == "cuda"
    fixed = {"kind": "cudagraph", "precision": "bf16", "channels_last": True} if is_cuda else {"kind": "eager"}
    settings = settings_of(options.device, **fixed)
    return compare(options, settings, compiled_too=False)


def compare_engines(options: argparse.Namespace) -> int:
    """Time the network by each engine at each batch size, and compiled at the best of them."""
    settings = settings_of(options.device)
    native = devices.native_precisions(devices.choose_device(options.device))
    if settings.engine.precision == "auto" and torch.bfloat16 in native:
        settings = override_settings(settings, "engine", {"precision": "bf16"})
    return compare(options, settings, compiled_too=True)


def build_reference(spec: ModelSpec, settings: Settings, device: torch.device, batch_size: int) -> Runner:
    """Build the network as it was loaded, eager and in float32, without TF32 whatever the settings say.

    Raises one of `backends.ENGINE_ERRORS` if it does not run here.
    """
    _, selector = load_selector(spec, settings, device)
    window = selector.reference(batch_size)
    call = make_call(window.network, window.batch, device)
    for _ in range(WARM_UP_CALLS):
        call()
    return Runner("eager fp32 contiguous", batch_size, "fp32", call, exact=device.type == "cuda")


def compare(options: argparse.Namespace, settings: Settings, *, compiled_too: bool) -> int:
    """Print a row for each way to run the network. Returns 1 if one of them does not run."""
    device = devices.choose_device(options.device)
    spec = choose_model(None, settings)
    peak = DevicePeak(device, count_window_flop(load_network(spec), (spec.input.channels, *spec.input.roi_size)) / 1e9)
    first = build_reference(spec, settings, device, options.batch_sizes[0])
    builders = list(list_engines(spec, settings, device, options.batch_sizes))
    rows = list[Row]()

    def order_builders() -> Iterator[RunnerBuilder]:
        # Those that compile nothing take seconds.
        yield from (builder for builder in builders if not builder.compiled)
        if compiled_too:
            best = min(rows[1:], key=lambda row: row.ms_per_window.median if row.ms_per_window else math.inf).windows
            yield from (builder for builder in builders if builder.compiled and builder.windows == best)

    measured = compare_with_first(first, order_builders(), peak, pair_seconds=PAIR_SECONDS)
    for line in format_table("engine", collect_rows(measured, rows)):
        print(line, flush=True)
    return int(any(row.problem for row in rows))


@torch.inference_mode()
def profile_request(options: argparse.Namespace) -> int:
    """Print what takes most time in a request, on the device and on the host, and write a trace with Python's calls."""
    runner = load(plain_settings(options.device))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        write_stack(runner.spec, tuple(options.shape), Path(name, "stack.tif"))
        volume = stack_reader.read(Path(name, "stack.tif"), Selection(), LIMIT_BYTES, Path(name))
        for _ in range(2):
            segment(runner, volume, ORIGINAL_RESOLUTION)
        with torch.profiler.profile() as recorded:
            result = segment(runner, volume, ORIGINAL_RESOLUTION)
    show_head("stage", "ms")
    for stage, seconds in result.seconds.items():
        show(stage, f"{1000 * seconds:.1f}")
    show_longest("on the device", recorded, is_on_device=True)
    show_longest("on the host", recorded, is_on_device=False)
    with torch.profiler.profile(with_stack=True) as recorded:
        segment(runner, volume, ORIGINAL_RESOLUTION)
    recorded.export_chrome_trace(str(options.out / "trace.json.gz"))
    return 0


def show_longest(title: str, recorded: torch.profiler.profile, *, is_on_device: bool) -> None:
    """Print the operations, kernels and calls of the driver with the most time of their own."""
    events = [
        (each.self_device_time_total if is_on_device else each.self_cpu_time_total, each.count, each.key)
        for each in recorded.key_averages()
        if (each.device_type == torch.autograd.DeviceType.CUDA) == is_on_device
    ]
    print()
    show_head(title, "calls", "ms")
    show("all", sum(count for _, count, _ in events), f"{sum(event[0] for event in events) / 1000:.1f}")
    for microseconds, count, key in sorted(events, reverse=True)[:PROFILED]:
        show(f"`{key[:100]}`", count, f"{microseconds / 1000:.2f}")


def serve_clients(options: argparse.Namespace) -> int:
    """Post stacks to a server from one client, then from eight."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        write_stack(read_spec(ROOT / "models" / "nuclei"), tuple(options.shape), folder / "stack.tif")
        body = (folder / "stack.tif").read_bytes()
        with run_server(folder, "--config", options.config, STACKSEG_DEVICE__NAME=options.device, **STOP_AT_ONCE) as (
            _pid,
            port,
        ):
            show_head(
                "clients", "stacks", "stacks/s", "median s", "network", "utilisation by the driver", "other answers"
            )
            for clients in (1, CLIENTS):
                show(clients, *measure_clients(port, body, clients, options.seconds))
    return 0


def measure_clients(port: int, body: bytes, clients: int, seconds: float) -> Sequence[object]:
    """Return the cells of a row about so many clients, who post for so many seconds."""
    taken, refused, used = list[float](), Counter[int](), list[int]()
    over = threading.Event()

    def post() -> None:
        while not over.is_set():
            began = time.perf_counter()
            status, _ = request(port, "POST", "/segment?diameter=none", body)
            if status == 200:
                taken.append(time.perf_counter() - began)
            else:
                refused[status] += 1

    request(port, "POST", "/segment?diameter=none", body)
    before, began = busy_seconds(port), time.perf_counter()
    with threads(post, clients, over):
        while time.perf_counter() - began < seconds:
            time.sleep(0.2)
            used += [gpu.utilisation_percent for gpu in gpus.query_gpus()[:1] if gpu.utilisation_percent is not None]
    wall = time.perf_counter() - began
    share = (busy_seconds(port) - before) / wall
    driver = f"{statistics.mean(used):.0f} %" if used else "unknown"
    median = f"{statistics.median(taken):.3f}" if taken else ""
    return len(taken), f"{len(taken) / wall:.1f}", median, f"{share:.2f}", driver, dict(refused) or "none"


def busy_seconds(port: int) -> float:
    """Return the seconds that the device of a server has run the network so far."""
    return sum(value for name, value in read_metrics(port).items() if name.startswith("stackseg_device_seconds_total"))


@contextmanager
def threads(work: Callable[[], None], count: int, over: threading.Event) -> Iterator[None]:
    """Run `work` in so many threads, and at the end, also after an error, tell them that it is over and wait."""
    started = [threading.Thread(target=work) for _ in range(count)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in started:
            thread.join()


def change_models(options: argparse.Namespace) -> int:
    """Let two models take turns in the room for one, beside a client of the default model. Returns 1 after a 5xx."""
    sample = (ROOT / "models" / "membranes" / "sample.tif").read_bytes()
    statuses, over = Counter[int](), threading.Event()

    def post_beside() -> None:
        while not over.is_set():
            statuses[request(port, "POST", "/segment?model=nuclei&diameter=none", sample)[0]] += 1

    environment = {"STACKSEG_DEVICE__NAME": options.device, "STACKSEG_MODELS__MEMORY_BYTES": str(room(options))}
    environment |= STOP_AT_ONCE
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as name,
        run_server(Path(name), **environment) as (_pid, port),
    ):
        show_head("loads", "unloads", "answers", "5xx or none", "GiB in use on the device", "seconds")
        began = time.perf_counter()
        with threads(post_beside, 1, over):
            for turn in range(options.loads):
                model = ("membranes", "tissue")[turn % 2]
                statuses[request(port, "POST", f"/segment?model={model}&diameter=none", sample)[0]] += 1
                if turn % 5 == 4 or turn + 1 == options.loads:
                    show(*describe_loads(port, statuses), f"{time.perf_counter() - began:.0f}")
    return int(failures(statuses) > 0)


def room(options: argparse.Namespace) -> int:
    """Return the bytes of the default model and the larger of the two others, each loaded once by a server."""
    environment = {"STACKSEG_DEVICE__NAME": options.device, "STACKSEG_MODELS__LOAD": "all"}
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as name,
        run_server(Path(name), **environment) as (_pid, port),
    ):
        sizes = read_sizes(port)
    return sizes["nuclei"] + max(sizes["membranes"], sizes["tissue"])


def read_sizes(port: int) -> dict[str, int]:
    """Return the bytes that each loaded model takes."""
    models: list[dict[str, Any]] = json.loads(request(port, "GET", "/models")[1])["models"]
    return {model["name"]: sum(loaded["bytes"] for loaded in model["devices"]) for model in models}


def describe_loads(port: int, statuses: Counter[int]) -> Sequence[object]:
    metrics = read_metrics(port)
    loads, unloads = (
        int(sum(value for name, value in metrics.items() if name.startswith(f"stackseg_model_{what}_total")))
        for what in ("loads", "unloads")
    )
    used = sum(gpu.memory_used or 0 for gpu in gpus.query_gpus())
    return loads, unloads, statuses.total(), failures(statuses), f"{used / 2**30:.2f}"


def failures(statuses: Counter[int]) -> int:
    """Count answers of a server's fault, and those that did not come."""
    return sum(count for status, count in statuses.items() if status == 0 or status >= 500)


STEPS: dict[str, Callable[[argparse.Namespace], int]] = {
    "machine": show_machine,
    "check": check,
    "graphs": compare_graphs,
    "engines": compare_engines,
    "profile": profile_request,
    "clients": serve_clients,
    "loads": change_models,
}


if __name__ == "__main__":
    sys.exit(main())
