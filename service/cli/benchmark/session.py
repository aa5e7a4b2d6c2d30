"""Run of `stackseg bench`: starts, then requests, then the requested comparisons."""

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
    compare_with,
    format_config,
    list_engines,
)
from service.cli.benchmark.requests import PlainRun, RequestRunner
from service.cli.benchmark.results import Repeat, Report, RequestTimes, Seconds, WindowSeconds
from service.cli.benchmark.timing import flop_of_window, peak_bytes
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.hardware import devices, host
from service.core.quantities import Size
from service.engine.tuning.plans import EngineConfig
from service.inference.runner.model_runner import ModelRunner
from service.inference.windows.batching.batcher import open_batcher
from service.models.loader import load_network
from service.models.spec import ModelSpec

# Called with each line of the report.
Show = Callable[[str], object]


@dataclass(frozen=True)
class BenchPlan:
    """Measurements to make.

    cold           start twice: with an empty cache folder, then with what the first start left there
    baseline       the plain script, in turn with the requests
    batch_sizes    for the comparison of engines; the one in use if none is given
    build_seconds  time limit for building the engines of the comparison
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
        """Whether engines are compared, which batch sizes ask for as well."""
        return self.compare_engines or bool(self.batch_sizes)


def run(spec: ModelSpec, settings: Settings, plan: BenchPlan, show: Show) -> Report:
    """Measure one model, and show each line of the report as soon as it is measured.

    Raises what `ModelRunner` raises, and BadParameter.
    """
    _check(plan)
    torch_device = devices.choose_device(settings.device.name)
    threads = settings.device.threads or host.usable_cores()
    show(report.format_device(devices.device_name(torch_device), threads))
    with tempfile.TemporaryDirectory(prefix="bench-") as name, open_batcher(settings) as device:
        folder = Path(name)
        requests.write_stack(spec, plan.shape, folder / "stack.tif")
        if plan.cold:
            settings = override_settings(settings, "engine", {"cache_folder": folder / "cache"})
        starts, model = device.call(lambda: _time_starts(spec, settings, plan, show))
        engine, with_tf32 = model.report(), allows_tf32(settings.engine, torch_device)
        _show_all(show, report.format_engine(spec.identifier, engine, with_tf32=with_tf32))
        # The thread that normalises and decodes here may use all cores, as nothing runs beside it.
        devices.use_threads(threads)
        runner = RequestRunner(model, folder / "stack.tif", folder, device, threads)
        answered = _time_requests(runner, plan, show)
        peak = _measure_peak(spec, torch_device, engine.precision)
        measured = Report(
            model=spec.identifier,
            shape=plan.shape,
            device=devices.device_name(torch_device),
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
        _show_all(show, report.format_summary(measured))
        if plan.profile is not None:
            runner.profile(plan.profile)
        if plan.compares_engines:
            in_use = _make_runner_in_use(runner, measured)
            builders = list_engines(spec, settings, torch_device, plan.batch_sizes or (in_use.windows,))
            rows = compare_with(in_use, builders, peak, build_seconds=plan.build_seconds)
            _show_all(show, chain([""], report.format_table("engine", collect_rows(rows, measured.rows))))
        return measured


def _device_bytes(device: torch.device) -> int:
    """Return the most bytes of its own memory that the device had in use."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _check(plan: BenchPlan) -> None:
    """Raise BadParameter for a plan that needs a clone where there is none."""
    if plan.baseline and not requests.PLAIN.exists():
        raise BadParameter(f"--baseline needs benchmarks/{requests.PLAIN.name} of a clone, and there is none here.")


def _measure_peak(spec: ModelSpec, device: torch.device, precision: str) -> DevicePeak:
    """Measure the device's rate of a large matrix product, for the operations of one window."""
    shape = (spec.input.channels, *spec.input.roi_size)
    peak = DevicePeak(device, flop_of_window(load_network(spec), shape) / 1e9)
    peak.measure(precision)
    return peak


def _show_all(show: Show, lines: Iterable[str]) -> None:
    for line in lines:
        show(line)


def _time_starts(spec: ModelSpec, settings: Settings, plan: BenchPlan, show: Show) -> tuple[Seconds, ModelRunner]:
    starts = {}
    for number in range(2 if plan.cold else 1):
        if number:
            torch.compiler.reset()
        began = time.perf_counter()
        model = ModelRunner(spec, settings)
        model.warm_up(tune=True)
        engine = model.report()
        how = f"{engine.planned}, cached" if engine.cached else engine.planned
        starts[how] = time.perf_counter() - began
        show(report.format_start(starts[how], how))
    return starts, model


def _time_requests(runner: RequestRunner, plan: BenchPlan, show: Show) -> RequestTimes:
    first = runner.once()["total"]
    _show_all(show, report.format_first_request(plan.shape, runner.windows, first))
    # The first time each stream has to find memory for its layers.
    runner.bare_loop()
    repeats: list[Repeat] = []
    for number in range(1, plan.repeats + 1):
        stages = runner.once()
        windows, cpu_windows = _time_windows(runner)
        plain = runner.plain_script() if plan.baseline else PlainRun({})
        repeat = Repeat(stages, windows, cpu_windows, plain.seconds, plain.tf32)
        if not repeats:
            _show_all(show, report.format_repeat_head(repeat))
        repeats.append(repeat)
        show(report.format_repeat(number, repeat))
    if runner.fallback_notes:
        _show_all(show, ("", *report.format_warnings(runner.fallback_notes)))
    return RequestTimes.summarise(runner.windows, first, repeats)


def _time_windows(runner: RequestRunner) -> tuple[WindowSeconds, WindowSeconds]:
    """Return the seconds of the windows of a stack, then the CPU seconds.

    The bare loop and the windows from pixels to scores are timed twice each, in mirrored order, so that a machine that
    becomes slower favours neither.
    """
    taken = {runner.bare_loop: [0.0, 0.0], runner.stitched: [0.0, 0.0]}
    for call in (runner.bare_loop, runner.stitched, runner.stitched, runner.bare_loop):
        began, cpu_began = time.perf_counter(), time.process_time()
        call()
        taken[call][0] += (time.perf_counter() - began) / 2
        taken[call][1] += (time.process_time() - cpu_began) / 2
    (bare, cpu_bare), (stitched, cpu_stitched) = taken.values()
    return WindowSeconds(bare, stitched), WindowSeconds(cpu_bare, cpu_stitched)


def _make_runner_in_use(runner: RequestRunner, measured: Report) -> Runner:
    engine, windows = measured.engine, len(runner.batch)
    choice = EngineConfig(engine.engine, engine.precision, engine.memory_format, windows, engine.compile_mode)
    name = f"in use: {format_config(choice, with_tf32=measured.tf32)}"
    return Runner(name, windows, engine.precision, runner.forward)
