"""One run of `stackseg bench`: starts, then requests, then the comparisons that were asked for."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from service.cli.benchmark import requests
from service.cli.benchmark.networks import Row, Runner, Yardstick, build_and_race, compare_optimisations, engines, label
from service.cli.benchmark.requests import Requests
from service.cli.benchmark.timing import Spread, flop_of_window, peak_bytes
from service.core import hardware
from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.volume import Size
from service.engine.plans import EngineConfig
from service.inference.batcher import device_of
from service.inference.result import EngineReport
from service.inference.segmenter import Segmenter
from service.models.loader import load_network
from service.models.spec import ModelSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What to measure.

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
    compare_optimisations: bool = False
    batch_sizes: tuple[int, ...] = ()
    build_seconds: float = math.inf
    profile: Path | None = None


@dataclass(frozen=True)
class Answered:
    """What requests took: one that was the first, then the repeats.

    stages     seconds of those, `total` among them
    stitched   seconds of the windows by themselves, from pixels to scores; `bare`: of a bare loop of their forwards
    stitching  windows per second of the former over those of the latter, pair by pair; `cpu_stitching`: CPU seconds
    plain      the same of the plain script; `speedup` is its time over ours, repeat by repeat
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
        """From pixels to scores."""
        return self.windows / self.stitched.median


@dataclass
class Report:
    """Everything that was measured.

    starts      seconds of loading the model and making its network ready, by how that was planned
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
    answered: Answered
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


def run(spec: ModelSpec, settings: Settings, wanted: Wanted) -> Report:
    """Measure one model. Raises what `Segmenter` raises, and BadParameter."""
    if wanted.baseline and not requests.PLAIN.exists():
        raise BadParameter(f"--baseline needs benchmarks/{requests.PLAIN.name} of a clone, and there is none here.")
    torch_device = hardware.choose_device(settings.device.name)
    with tempfile.TemporaryDirectory(prefix="bench-") as name, device_of(settings) as device:
        folder = Path(name)
        requests.write_stack(spec, wanted.shape, folder / "stack.tif")
        if wanted.cold:
            settings = override_settings(settings, "engine", {"cache_folder": folder / "cache"})
        starts, segmenter = device.call(lambda: _start(spec, settings, wanted))
        threads = settings.device.threads or hardware.usable_cores()
        # The thread that normalises and decodes here has no others beside it.
        hardware.use_threads(threads)
        line = Requests(segmenter, folder / "stack.tif", folder, device, threads)
        answered = _repeat(line, wanted)
        shape = (spec.input.channels, *spec.input.roi_size)
        yardstick = Yardstick(torch_device, flop_of_window(load_network(spec), shape) / 1e9)
        yardstick.measure(segmenter.report().precision)
        report = Report(
            model=spec.identifier,
            shape=wanted.shape,
            device=hardware.device_name(torch_device),
            threads=threads,
            engine=segmenter.report(),
            starts=starts,
            answered=answered,
            gflop=yardstick.gflop,
            peaks=yardstick.peaks,
            peak_bytes=peak_bytes(),
            device_bytes=torch.cuda.max_memory_allocated(torch_device) if torch_device.type == "cuda" else 0,
        )
        if wanted.profile is not None:
            line.profile(wanted.profile)
        if wanted.compare_engines or wanted.batch_sizes:
            sizes = wanted.batch_sizes or (len(line.batch),)
            makers, in_use = engines(spec, settings, torch_device, sizes), [_in_use(line, report.engine)]
            report.rows += build_and_race("engines", in_use, makers, yardstick, wanted.build_seconds)
        if wanted.compare_optimisations:
            report.rows += compare_optimisations(spec, yardstick, len(line.batch), wanted.build_seconds)
        return report


def _start(spec: ModelSpec, settings: Settings, wanted: Wanted) -> tuple[dict[str, float], Segmenter]:
    starts = {}
    for _ in range(2 if wanted.cold else 1):
        torch.compiler.reset()
        began = time.perf_counter()
        segmenter = Segmenter(spec, settings)
        segmenter.warm_up()
        planned = segmenter.report().planned
        starts[planned] = time.perf_counter() - began
        log.info("ready after %.1f s (%s)", starts[planned], planned)
    return starts, segmenter


def _repeat(line: Requests, wanted: Wanted) -> Answered:
    first = line.once()["total"]
    log.info("first request: %.2f s", first)
    # The first time each stream has to find memory for its layers.
    line.bare_loop()
    ours, plain, pairs = [], [], list[Pair]()
    for repeat in range(wanted.repeats):
        ours.append(line.once())
        log.info("request %d of %d: %.2f s", repeat + 1, wanted.repeats, ours[-1]["total"])
        pairs.append(_pair(line))
        if wanted.baseline:
            plain.append(line.plain_script())
            log.info("plain script: %.2f s", plain[-1]["total"])
    seconds, cpu_seconds = zip(*pairs, strict=True)
    (bare, stitched), (cpu_bare, cpu_stitched) = (zip(*one, strict=True) for one in (seconds, cpu_seconds))
    return Answered(
        windows=line.windows,
        first=first,
        stages=_spreads(ours),
        stitched=Spread.of(stitched),
        bare=Spread.of(bare),
        stitching=Spread.ratio(bare, stitched),
        cpu_stitching=Spread.ratio(cpu_bare, cpu_stitched),
        plain=_spreads(plain),
        speedup=Spread.ratio([p["total"] for p in plain], [o["total"] for o in ours]) if plain else None,
    )


class Pair(NamedTuple):
    """Seconds of a bare loop and of the windows by themselves."""

    seconds: tuple[float, float]
    cpu_seconds: tuple[float, float]


def _pair(line: Requests) -> Pair:
    """Each twice, there and back, so that a machine that becomes slower does not favour one of them."""
    taken = {line.bare_loop: [0.0, 0.0], line.stitched: [0.0, 0.0]}
    for call in (line.bare_loop, line.stitched, line.stitched, line.bare_loop):
        began, cpu_began = time.perf_counter(), time.process_time()
        call()
        taken[call][0] += (time.perf_counter() - began) / 2
        taken[call][1] += (time.process_time() - cpu_began) / 2
    (bare, cpu_bare), (stitched, cpu_stitched) = taken.values()
    return Pair((bare, stitched), (cpu_bare, cpu_stitched))


def _spreads(runs: list[dict[str, float]]) -> dict[str, Spread]:
    return {stage: Spread.of([taken[stage] for taken in runs]) for stage in (runs[0] if runs else ())}


def _in_use(line: Requests, engine: EngineReport) -> Runner:
    choice = EngineConfig(engine.engine, engine.precision, engine.memory_format, len(line.batch), engine.compile_mode)
    return Runner(f"in use: {label(choice)}", len(line.batch), engine.precision, line.forward)
