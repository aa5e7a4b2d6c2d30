"""Run `stackseg bench`: starts, requests, and the requested comparisons."""

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
from service.cli.benchmark.networks import (
    DevicePeak,
    Runner,
    allows_tf32,
    collect_rows,
    compare_with_first,
    format_config,
    list_engines,
)
from service.cli.benchmark.requests import PlainRun, RequestRunner
from service.cli.benchmark.results import Repeat, Report, RequestTimes, Seconds, WindowSeconds
from service.cli.benchmark.timing import count_window_flop, peak_bytes
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

    cold           measure two starts, with an empty cache folder and with the cache of the first start
    baseline       also run the plain script, alternately with the requests
    batch_sizes    for the comparison of engines; by default the one in use
    build_seconds  time limit for building the compared engines
    profile        file for a trace of one request
    """

    shape: Size = (64, 512, 512)
    repeats: int = 3
    cold: bool = False
    baseline: bool = False
    compare_engines: bool = False
    batch_sizes: tuple[int, ...] = ()
    build_seconds: float = math.inf
    profile: Path | None = None

    @property
    def compares_engines(self) -> bool:
        """Whether engines are compared. Batch sizes imply a comparison."""
        return self.compare_engines or bool(self.batch_sizes)


def run(spec: ModelSpec, settings: Settings, plan: BenchPlan, print_line: PrintLine) -> Report:
    """Measure one model, and print each line of the report as soon as it is measured.

    Raises the errors of `ModelRunner`, and BadParameter.
    """
    _check_plan(plan)
    torch_device = devices.choose_device(settings.device.name)
    threads = settings.device.threads or host.count_usable_cores()
    print_line(report.format_device(devices.get_device_name(torch_device), threads))
    with tempfile.TemporaryDirectory(prefix="bench-") as name, open_batcher(settings) as device:
        folder = Path(name)
        requests.write_stack(spec, plan.shape, folder / "stack.tif")
        if plan.cold:
            settings = override_settings(settings, "engine", {"cache_folder": folder / "cache"})
        starts, model = device.call(lambda: _time_starts(spec, settings, plan, print_line))
        engine, with_tf32 = model.report(), allows_tf32(settings.engine, torch_device)
        _print_lines(print_line, report.format_engine(spec.identifier, engine, with_tf32=with_tf32))
        # Normalization and decoding in this thread may use all cores, because nothing else runs.
        devices.set_torch_threads(threads)
        runner = RequestRunner(model, folder / "stack.tif", folder, device, threads)
        answered = _time_requests(runner, plan, print_line)
        peak = _measure_peak(spec, torch_device, engine.precision)
        result = Report(
            model=spec.identifier,
            shape=plan.shape,
            device=devices.get_device_name(torch_device),
            threads=threads,
            engine=replace(engine, warnings=(*engine.warnings, *runner.fallback_notes)),
            starts=starts,
            answered=answered,
            gflop=peak.gflop,
            peaks=peak.peaks,
            peak_bytes=peak_bytes(),
            device_bytes=_device_bytes(torch_device),
            tf32=with_tf32,
        )
        _print_lines(print_line, report.format_summary(result))
        if plan.profile is not None:
            runner.write_profile(plan.profile)
        if plan.compares_engines:
            in_use = _make_runner_in_use(runner, result)
            builders = list_engines(spec, settings, torch_device, plan.batch_sizes or (in_use.windows,))
            rows = compare_with_first(in_use, builders, peak, build_seconds=plan.build_seconds)
            _print_lines(print_line, chain([""], report.format_table("engine", collect_rows(rows, result.rows))))
        return result


def _device_bytes(device: torch.device) -> int:
    """Return the peak memory on a GPU in bytes, or 0 for other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _check_plan(plan: BenchPlan) -> None:
    """Raise BadParameter if the plan requires files of a git clone that do not exist."""
    if plan.baseline and not requests.PLAIN_SCRIPT.exists():
        raise BadParameter(
            f"--baseline requires benchmarks/{requests.PLAIN_SCRIPT.name}, which is only part of a git clone."
        )


def _measure_peak(spec: ModelSpec, device: torch.device, precision: str) -> DevicePeak:
    """Measure the speed of a large matrix product, and count the arithmetic of one window."""
    shape = (spec.input.channels, *spec.input.roi_size)
    peak = DevicePeak(device, count_window_flop(load_network(spec), shape) / 1e9)
    peak.measure(precision)
    return peak


def _print_lines(print_line: PrintLine, lines: Iterable[str]) -> None:
    for line in lines:
        print_line(line)


def _time_starts(
    spec: ModelSpec, settings: Settings, plan: BenchPlan, print_line: PrintLine
) -> tuple[Seconds, ModelRunner]:
    starts = {}
    for number in range(2 if plan.cold else 1):
        if number:
            torch.compiler.reset()
        start = time.perf_counter()
        model = ModelRunner(spec, settings)
        model.warm_up(tune=True)
        engine = model.report()
        selection = f"{engine.planned}, cached" if engine.cached else engine.planned
        starts[selection] = time.perf_counter() - start
        print_line(report.format_start(starts[selection], selection))
    return starts, model


def _time_requests(runner: RequestRunner, plan: BenchPlan, print_line: PrintLine) -> RequestTimes:
    first = runner.run_request()["total"]
    _print_lines(print_line, report.format_first_request(plan.shape, runner.windows, first))
    # Warm up: in its first loop, each stream allocates memory for its layers.
    runner.run_bare_loop()
    repeats: list[Repeat] = []
    for number in range(1, plan.repeats + 1):
        stages = runner.run_request()
        windows, cpu_windows = _time_windows(runner)
        plain = runner.run_plain_script() if plan.baseline else PlainRun({})
        repeat = Repeat(stages, windows, cpu_windows, plain.seconds, plain.tf32)
        if not repeats:
            _print_lines(print_line, report.format_repeat_head(repeat))
        repeats.append(repeat)
        print_line(report.format_repeat(number, repeat))
    if runner.fallback_notes:
        _print_lines(print_line, ("", *report.format_warnings(runner.fallback_notes)))
    return RequestTimes.summarize(runner.windows, first, repeats)


def _time_windows(runner: RequestRunner) -> tuple[WindowSeconds, WindowSeconds]:
    """Return the wall-clock seconds and the CPU seconds of the windows of a stack.

    The bare loop and the windows from pixels to scores are each timed twice, in mirrored order. A machine that becomes
    slower then affects both equally.
    """
    seconds = {runner.run_bare_loop: [0.0, 0.0], runner.run_windows: [0.0, 0.0]}
    for call in (runner.run_bare_loop, runner.run_windows, runner.run_windows, runner.run_bare_loop):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        seconds[call][0] += (time.perf_counter() - start) / 2
        seconds[call][1] += (time.process_time() - cpu_start) / 2
    (bare, cpu_bare), (run_windows, cpu_stitched) = seconds.values()
    return WindowSeconds(bare, run_windows), WindowSeconds(cpu_bare, cpu_stitched)


def _make_runner_in_use(runner: RequestRunner, result: Report) -> Runner:
    engine, windows = result.engine, len(runner.batch)
    choice = EngineConfig(engine.engine, engine.precision, engine.memory_format, windows, engine.compile_mode)
    name = f"in use: {format_config(choice, with_tf32=result.tf32)}"
    return Runner(name, windows, engine.precision, runner.run_forward)
