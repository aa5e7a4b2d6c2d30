"""Run `stackseg bench`: time startups and requests, and run the selected comparisons."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from service.cli.benchmark import report, requests
from service.cli.benchmark.engine_comparison import (
    DevicePeak,
    TimedNetwork,
    collect_rows,
    compare_with_first,
    format_config,
    is_tf32_allowed,
    iter_builders,
)
from service.cli.benchmark.requests import BaselineRun, RequestRunner
from service.cli.benchmark.results import Repeat, Report, RequestTimes, SecondsByName, WindowSeconds
from service.cli.benchmark.timing import count_window_flop, get_peak_memory_bytes
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.hardware import devices, host
from service.core.quantities import Size
from service.engine.tuning.plans import EngineConfig
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.batching.batcher import open_batcher
from service.models.loader import load_network
from service.models.spec import ModelSpec

# Function that prints a line of the report.
PrintLine = Callable[[str], object]


@dataclass(frozen=True)
class BenchPlan:
    """Selected measurements.

    measure_cold_start  whether to measure two startups, the first with an empty cache folder and the second with the
                        cache of the first
    run_baseline        whether to run the baseline script as well, in alternation with the requests
    compare_engines     whether to compare engines; implied by `batch_sizes`
    batch_sizes         batch sizes at which engines are compared; by default, only the batch size in use
    build_seconds       time limit for building the compared engines
    profile_path        file for a trace of one request
    """

    shape: Size = (64, 512, 512)
    repeats: int = 3
    measure_cold_start: bool = False
    run_baseline: bool = False
    compare_engines: bool = False
    batch_sizes: tuple[int, ...] = ()
    build_seconds: float = math.inf
    profile_path: Path | None = None

    @property
    def should_compare_engines(self) -> bool:
        """Whether engines are compared. Batch sizes imply a comparison."""
        return self.compare_engines or bool(self.batch_sizes)


def run(spec: ModelSpec, settings: Settings, plan: BenchPlan, print_line: PrintLine) -> Report:
    """Measure one model, and print each line of the report as soon as its values are known.

    Raises the same errors as `ModelRunner`, and BadParameter if the plan or the model is not supported.
    """
    _check_plan(plan)
    torch_device = devices.choose_device(settings.device.name)
    threads = settings.device.threads or host.count_usable_cores()
    print_line(f"{devices.get_device_name(torch_device)}, {threads} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder_name, open_batcher(settings) as batcher:
        folder = Path(folder_name)
        requests.write_stack(spec, plan.shape, folder / "stack.tif")
        if plan.measure_cold_start:
            settings = override_settings(settings, "engine", {"cache_folder": folder / "cache"})
        starts, model = batcher.call(lambda: _time_starts(spec, settings, plan, print_line))
        engine, tf32_allowed = model.report(), is_tf32_allowed(settings.engine, torch_device)
        _print_lines(print_line, report.format_engine(spec.identifier, engine, tf32_allowed=tf32_allowed))
        # Normalization and decoding in this thread may use all cores, because nothing else runs.
        devices.set_torch_threads(threads)
        runner = RequestRunner(model, folder / "stack.tif", folder, batcher, threads)
        request_times = _time_requests(runner, plan, print_line)
        peak_speed = _measure_peak_speed(spec, torch_device, engine.precision)
        result = Report(
            model=spec.identifier,
            shape=plan.shape,
            device=devices.get_device_name(torch_device),
            threads=threads,
            engine=replace(engine, warnings=(*engine.warnings, *runner.fallback_notes)),
            starts=starts,
            answered=request_times,
            gflop=peak_speed.gflop,
            peaks=peak_speed.peaks,
            peak_bytes=get_peak_memory_bytes(),
            device_bytes=_get_peak_device_bytes(torch_device),
            tf32=tf32_allowed,
        )
        _print_lines(print_line, report.format_summary(result))
        if plan.profile_path is not None:
            runner.write_profile(plan.profile_path)
        if plan.should_compare_engines:
            current_network = _make_current_network(runner, result)
            builders = iter_builders(spec, settings, torch_device, plan.batch_sizes or (current_network.batch_size,))
            rows = compare_with_first(current_network, builders, peak_speed, build_seconds=plan.build_seconds)
            _print_lines(print_line, chain([""], report.format_table("engine", collect_rows(rows, result.rows))))
        return result


def _get_peak_device_bytes(device: torch.device) -> int:
    """Return the peak memory on a GPU in bytes, or 0 for other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _check_plan(plan: BenchPlan) -> None:
    """Raise BadParameter if the plan requires files from a git clone, and they do not exist."""
    if plan.run_baseline and not requests.BASELINE_SCRIPT.exists():
        raise BadParameter(
            f"--baseline requires benchmarks/{requests.BASELINE_SCRIPT.name}, which only a git clone contains."
        )


def _measure_peak_speed(spec: ModelSpec, device: torch.device, precision: str) -> DevicePeak:
    """Measure the speed of a large matrix product, and count the floating-point operations of one window."""
    shape = (spec.input.channels, *spec.input.roi_size)
    peak_speed = DevicePeak(device, count_window_flop(load_network(spec), shape) / 1e9)
    peak_speed.measure(precision)
    return peak_speed


def _print_lines(print_line: PrintLine, lines: Iterable[str]) -> None:
    for line in lines:
        print_line(line)


def _time_starts(
    spec: ModelSpec, settings: Settings, plan: BenchPlan, print_line: PrintLine
) -> tuple[SecondsByName, ModelRunner]:
    starts = {}
    for start_index in range(2 if plan.measure_cold_start else 1):
        if start_index:
            torch.compiler.reset()
        start = time.perf_counter()
        model = ModelRunner(spec, settings)
        model.warm_up(tune=True)
        engine = model.report()
        engine_label = f"{engine.planned}, cached" if engine.cached else engine.planned
        starts[engine_label] = time.perf_counter() - start
        print_line(f"ready after {starts[engine_label]:.1f} s ({engine_label})")
    return starts, model


def _time_requests(runner: RequestRunner, plan: BenchPlan, print_line: PrintLine) -> RequestTimes:
    first_seconds = runner.run_request()["total"]
    _print_lines(print_line, report.format_first_request(plan.shape, runner.window_count, first_seconds))
    # Warm up, because each stream allocates memory for its layers in its first loop.
    runner.run_bare_loop()
    repeats: list[Repeat] = []
    for repeat_number in range(1, plan.repeats + 1):
        stages = runner.run_request()
        windows, cpu_windows = _time_windows(runner)
        baseline = runner.run_baseline_script() if plan.run_baseline else BaselineRun({})
        repeat = Repeat(stages, windows, cpu_windows, baseline.seconds, baseline.tf32_allowed)
        if not repeats:
            _print_lines(print_line, report.format_repeat_header(repeat))
        repeats.append(repeat)
        print_line(report.format_repeat(repeat_number, repeat))
    if runner.fallback_notes:
        _print_lines(print_line, ("", *report.format_warnings(runner.fallback_notes)))
    return RequestTimes.summarize(runner.window_count, first_seconds, repeats)


def _time_windows(runner: RequestRunner) -> tuple[WindowSeconds, WindowSeconds]:
    """Return the wall-clock seconds and the CPU seconds of the windows of a stack.

    The forward passes alone and the complete window stage are each timed twice, in the order A B B A. A slowdown of the
    machine then affects both measurements equally.
    """
    seconds = {runner.run_bare_loop: [0.0, 0.0], runner.run_windows: [0.0, 0.0]}
    for call in (runner.run_bare_loop, runner.run_windows, runner.run_windows, runner.run_bare_loop):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        seconds[call][0] += (time.perf_counter() - start) / 2
        seconds[call][1] += (time.process_time() - cpu_start) / 2
    (bare, cpu_bare), (stitched, cpu_stitched) = seconds.values()
    return WindowSeconds(bare, stitched), WindowSeconds(cpu_bare, cpu_stitched)


def _make_current_network(runner: RequestRunner, result: Report) -> TimedNetwork:
    engine, batch_size = result.engine, len(runner.batch)
    config = EngineConfig(engine.engine, engine.precision, engine.memory_format, batch_size, engine.compile_mode)
    name = f"in use: {format_config(config, tf32_allowed=result.tf32)}"
    return TimedNetwork(name, batch_size, engine.precision, runner.run_forward)
