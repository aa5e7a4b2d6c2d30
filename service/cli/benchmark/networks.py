"""Comparison of the engines that run one network."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from service.cli.benchmark.timing import Spread, matrix_peak, synchronised, time_in_turn
from service.core import hardware
from service.core.config import Settings
from service.engine import backends, precision
from service.engine.plans import EngineConfig
from service.engine.precision import DTYPES
from service.inference.engine_selector import EngineSelector
from service.inference.estimate import activation_bytes
from service.models.loader import Network, load_network
from service.models.spec import ModelSpec

ROUNDS, SECONDS = 12, 60.0

log = logging.getLogger(__name__)


class Runner(NamedTuple):
    """Network that is ready to be timed: `call` runs one batch of `windows`; `precision` selects the peak."""

    name: str
    windows: int
    precision: str
    call: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Result of one way to run a network.

    problem     why there are no numbers
    ratio       its windows per second over those of the first row of its group, round by round
    peak_share  speed over that of a large matrix product in this precision; above 1 where an engine saves arithmetic
    """

    group: str
    name: str
    windows: int
    problem: str | None = None
    ms_per_window: Spread | None = None
    windows_per_second: float | None = None
    gflop_per_second: float | None = None
    peak_share: float | None = None
    ratio: Spread | None = None


@dataclass
class DevicePeak:
    """Peak speed of a device, to which networks are compared.

    gflop  arithmetic of one window of the network
    peaks  GFLOP per second of a large matrix product, by precision
    clock  on a busy machine CPU seconds (`time.process_time`) of one thread leave out what others took
    """

    device: torch.device
    gflop: float
    peaks: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def measure(self, name: str) -> float:
        """Measure the peak again and keep the highest, so that a moment in which the device was busy does not count."""
        latest = matrix_peak(DTYPES[name], self.device, clock=self.clock) / 1e9
        self.peaks[name] = max(self.peaks.get(name, 0.0), latest)
        return self.peaks[name]


def compare_runners(group: str, runners: Sequence[Runner], peak: DevicePeak, seconds: float = SECONDS) -> Iterator[Row]:
    """Time all runners in turn, and compare them with the first."""
    times = time_in_turn([runner.call for runner in runners], ROUNDS, seconds, peak.clock)
    peaks = {name: peak.measure(name) for name in {runner.precision for runner in runners}}
    per_window = [[t / runner.windows for t in taken] for runner, taken in zip(runners, times, strict=True)]
    for runner, taken in zip(runners, per_window, strict=True):
        spread = Spread.of([1000 * t for t in taken])
        speed = 1000 / spread.median
        yield Row(
            group,
            runner.name,
            runner.windows,
            ms_per_window=spread,
            windows_per_second=speed,
            gflop_per_second=speed * peak.gflop,
            peak_share=speed * peak.gflop / peaks[runner.precision],
            ratio=Spread.ratio(per_window[0], taken),
        )


class RunnerBuilder(NamedTuple):
    """Builder of a `Runner`; `build` raises what engines raise where it does not run here."""

    name: str
    windows: int
    build: Callable[[], Runner]


def build_and_compare(
    group: str, first: Sequence[Runner], builders: Iterable[RunnerBuilder], peak: DevicePeak, seconds: float = math.inf
) -> Iterator[Row]:
    """Build runners, and time them in turn with those that run already; after `seconds` nothing more is built."""
    deadline = time.monotonic() + seconds
    runners = list(first)
    for builder in builders:
        if time.monotonic() > deadline:
            yield Row(group, builder.name, builder.windows, f"not built: {seconds:g} s were over")
            continue
        log.info("building %s x%d", builder.name, builder.windows)
        try:
            runners.append(builder.build())
        except backends.ENGINE_FAILURES as error:
            yield Row(group, builder.name, builder.windows, backends.first_line(error))
    yield from compare_runners(group, runners, peak)


def list_engines(
    spec: ModelSpec, settings: Settings, device: torch.device, batch_sizes: Iterable[int]
) -> Iterator[RunnerBuilder]:
    """List every engine that the settings allow and that suits the network, at every batch size."""
    network = load_network(spec)
    window_bytes = activation_bytes(network, (1, spec.input.channels, *spec.input.roi_size))
    selector = EngineSelector(spec, settings, device, network, window_bytes)
    names = precision.list_precisions(settings.engine.precision, hardware.native_precisions(device))

    def build(choice: EngineConfig) -> Runner:
        window = selector.build(choice).window
        return Runner(
            format_config(choice),
            choice.sw_batch_size,
            choice.precision,
            make_call(window.network, window.batch, device),
        )

    for size in batch_sizes:
        for choice in backends.list_configs(settings.engine, device, names, size):
            if backends.BACKENDS[choice.engine].suits(network):
                yield RunnerBuilder(format_config(choice), size, partial(build, choice))


def format_config(choice: EngineConfig) -> str:
    """Name an engine configuration, without its batch size."""
    mode = f" ({choice.compile_mode})" if choice.compile_mode else ""
    return f"{choice.engine}{mode} {choice.precision} {choice.memory_format}"


def make_call(network: Network, batch: Tensor, device: torch.device) -> Callable[[], None]:
    """Return a function that runs the network on the batch and waits for the device."""
    return synchronised(lambda: network(batch), device)
