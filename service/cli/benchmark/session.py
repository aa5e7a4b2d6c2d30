"""Run of `stackseg bench`: starts, then requests, then the comparisons that were asked for."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from service.cli.benchmark import requests
from service.cli.benchmark.networks import (
    DevicePeak,
    Row,
    Runner,
    build_and_compare,
    format_config,
    list_engines,
)
from service.cli.benchmark.requests import RequestRunner
from service.cli.benchmark.timing import Spread, flop_of_window, peak_bytes
from service.core import hardware, host
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.volume import Size
from service.engine.plans import EngineConfig
from service.inference.batcher import open_batcher
from service.inference.result import EngineReport
from service.inference.segmenter import Segmenter
from service.models.loader import load_network
from service.models.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchPlan:
    """Measurements to make.

    cold           start twice: with an empty cache folder, then with what the first start left there
    baseline       the plain script, in turn with the requests
    batch_sizes    for the comparison of engines; the one in use if none is given
    build_seconds  for each comparison: after that nothing further is built
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


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of requests: of the first one, and of the repeats.

    stages     seconds of the repeats by stage, `total` among them
    stitched   seconds of the windows alone, from pixels to scores; `bare`: of a bare loop of their forwards
    stitching  windows per second of stitched over bare, pair by pair; `cpu_stitching`: by CPU seconds
    plain      seconds of the plain script by stage; `speedup`: its time over ours, repeat by repeat
    """

    windows: int
    first: float
    stages: dict[str, Spread]
    stitched: Spread
    bare: Spread
    stitching: Spread
    cpu_stitching: Spread
    plain: dict[str, Spread]
    speedup: Spread | None

    @property
    def windows_per_second(self) -> float:
        """Windows per second from pixels to scores."""
        return self.windows / self.stitched.median


@dataclass
class Report:
    """Results of a run.

    starts      seconds of loading the model and making its network ready, by how its engine was chosen
    gflop       of one window; `peaks`: GFLOP per second of a large matrix product, by precision
    peak_bytes  largest resident memory of the process until the last request; `device_bytes` on a GPU
    rows        of the comparisons
    """

    model: str
    shape: Size
    device: str
    threads: int
    engine: EngineReport
    starts: dict[str, float]
    answered: RequestTimes
    gflop: float
    peaks: dict[str, float]
    peak_bytes: int
    device_bytes: int
    rows: list[Row] = field(default_factory=list)
    torch_version: str = str(torch.__version__)

    @property
    def voxels_per_second(self) -> float:
        return math.prod(self.shape) / self.answered.stages["total"].median

    @property
    def gflop_per_second(self) -> float:
        return self.gflop * self.answered.windows_per_second

    @property
    def peak_share(self) -> float:
        return self.gflop_per_second / self.peaks[self.engine.precision]


def run(spec: ModelSpec, settings: Settings, plan: BenchPlan) -> Report:
    """Measure one model. Raises what `Segmenter` raises, and BadParameter."""
    if plan.baseline and not requests.PLAIN.exists():
        raise BadParameter(f"--baseline needs benchmarks/{requests.PLAIN.name} of a clone, and there is none here.")
    torch_device = hardware.choose_device(settings.device.name)
    with tempfile.TemporaryDirectory(prefix="bench-") as name, open_batcher(settings) as device:
        folder = Path(name)
        requests.write_stack(spec, plan.shape, folder / "stack.tif")
        if plan.cold:
            settings = override_settings(settings, "engine", {"cache_folder": folder / "cache"})
        starts, segmenter = device.call(lambda: _time_starts(spec, settings, plan))
        threads = settings.device.threads or host.usable_cores()
        # The thread that normalises and decodes here may use all cores, as nothing runs beside it.
        hardware.use_threads(threads)
        runner = RequestRunner(segmenter, folder / "stack.tif", folder, device, threads)
        answered = _time_requests(runner, plan)
        shape = (spec.input.channels, *spec.input.roi_size)
        peak = DevicePeak(torch_device, flop_of_window(load_network(spec), shape) / 1e9)
        peak.measure(segmenter.report().precision)
        report = Report(
            model=spec.identifier,
            shape=plan.shape,
            device=hardware.device_name(torch_device),
            threads=threads,
            engine=segmenter.report(),
            starts=starts,
            answered=answered,
            gflop=peak.gflop,
            peaks=peak.peaks,
            peak_bytes=peak_bytes(),
            device_bytes=torch.cuda.max_memory_allocated(torch_device) if torch_device.type == "cuda" else 0,
        )
        if plan.profile is not None:
            runner.profile(plan.profile)
        windows = len(runner.batch)
        if plan.compares_engines:
            builders = list_engines(spec, settings, torch_device, plan.batch_sizes or (windows,))
            in_use = [_make_runner_in_use(runner, report.engine)]
            report.rows += build_and_compare("engines", in_use, builders, peak, plan.build_seconds)
        return report


def _time_starts(spec: ModelSpec, settings: Settings, plan: BenchPlan) -> tuple[dict[str, float], Segmenter]:
    starts = {}
    for _ in range(2 if plan.cold else 1):
        torch.compiler.reset()
        began = time.perf_counter()
        segmenter = Segmenter(spec, settings)
        segmenter.warm_up(tune=True)
        report = segmenter.report()
        how = f"{report.planned}, cached" if report.cached else report.planned
        starts[how] = time.perf_counter() - began
        log.info("ready after %.1f s (%s)", starts[how], how)
    return starts, segmenter


def _time_requests(runner: RequestRunner, plan: BenchPlan) -> RequestTimes:
    first = runner.once()["total"]
    log.info("first request: %.2f s", first)
    # The first time each stream has to find memory for its layers.
    runner.bare_loop()
    ours, plain, pairs = [], [], []
    for repeat in range(plan.repeats):
        ours.append(runner.once())
        log.info("request %d of %d: %.2f s", repeat + 1, plan.repeats, ours[-1]["total"])
        pairs.append(_time_pair(runner))
        if plan.baseline:
            plain.append(runner.plain_script())
            log.info("plain script: %.2f s", plain[-1]["total"])
    seconds, cpu_seconds = zip(*pairs, strict=True)
    (bare, stitched), (cpu_bare, cpu_stitched) = (zip(*one, strict=True) for one in (seconds, cpu_seconds))
    return RequestTimes(
        windows=runner.windows,
        first=first,
        stages=_summarise(ours),
        stitched=Spread.of(stitched),
        bare=Spread.of(bare),
        stitching=Spread.ratio(bare, stitched),
        cpu_stitching=Spread.ratio(cpu_bare, cpu_stitched),
        plain=_summarise(plain),
        speedup=Spread.ratio([p["total"] for p in plain], [o["total"] for o in ours]) if plain else None,
    )


def _time_pair(runner: RequestRunner) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the seconds of a bare loop and of the windows from pixels to scores, then the CPU seconds of both.

    Each is timed twice, in mirrored order, so that a machine that becomes slower favours neither.
    """
    taken = {runner.bare_loop: [0.0, 0.0], runner.stitched: [0.0, 0.0]}
    for call in (runner.bare_loop, runner.stitched, runner.stitched, runner.bare_loop):
        began, cpu_began = time.perf_counter(), time.process_time()
        call()
        taken[call][0] += (time.perf_counter() - began) / 2
        taken[call][1] += (time.process_time() - cpu_began) / 2
    (bare, cpu_bare), (stitched, cpu_stitched) = taken.values()
    return (bare, stitched), (cpu_bare, cpu_stitched)


def _summarise(runs: list[dict[str, float]]) -> dict[str, Spread]:
    return {stage: Spread.of([taken[stage] for taken in runs]) for stage in (runs[0] if runs else ())}


def _make_runner_in_use(runner: RequestRunner, engine: EngineReport) -> Runner:
    choice = EngineConfig(engine.engine, engine.precision, engine.memory_format, len(runner.batch), engine.compile_mode)
    return Runner(f"in use: {format_config(choice)}", len(runner.batch), engine.precision, runner.forward)
