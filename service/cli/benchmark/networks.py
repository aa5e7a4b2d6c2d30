"""Compare the speed of engines for one network."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from service.cli.benchmark.timing import Spread, make_synchronized, measure_matrix_peak, time_alternately
from service.core.config import Settings
from service.core.hardware import devices
from service.core.sections.computing import Engine as EngineSettings
from service.engine import backends, precision
from service.engine.cuda import tf32
from service.engine.precision import DTYPES
from service.engine.tuning.plans import EngineConfig
from service.inference.runner.memory_estimate import measure_activation_bytes
from service.inference.runner.selector import EngineSelector
from service.models.loader import load_network
from service.models.network import Network
from service.models.spec import ModelSpec

# Number of rounds of a comparison, and their time limit.
ROUNDS = 12
SECONDS = 60.0
# Time limit for the rounds of one pair of runners.
PAIR_SECONDS = 10.0

log = logging.getLogger(__name__)


class Runner(NamedTuple):
    """Network that is ready for timing. `call` runs one batch of `windows` windows.

    precision  selects the peak speed to which the network is compared
    exact      whether that peak is measured without TF32, as the network runs
    """

    name: str
    windows: int
    precision: str
    call: Callable[[], object]
    exact: bool = False


@dataclass(frozen=True)
class Row:
    """Result for one engine.

    problem     reason if there are no measurements
    ratio       windows per second relative to the first row of the group, round by round
    peak_share  speed relative to a large matrix product in this precision; above 1 if an engine reduces the arithmetic
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
    """Peak speed of a device, used as a reference for networks.

    gflop  arithmetic of one window of the network
    peaks  GFLOP/s of a large matrix product by precision; "fp32 exact" is without TF32
    clock  `time.process_time` excludes the time of other processes on a busy machine, for a single thread
    """

    device: torch.device
    gflop: float
    peaks: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def measure(self, name: str, *, exact: bool = False) -> float:
        """Measure the peak and return the highest value so far, which excludes moments when the device was busy.

        exact  measure without TF32
        """
        with tf32.disable_tf32() if exact else nullcontext():
            latest = measure_matrix_peak(DTYPES[name], self.device, clock=self.clock) / 1e9
        key = f"{name} exact" if exact else name
        self.peaks[key] = max(self.peaks.get(key, 0.0), latest)
        return self.peaks[key]


def compare_runners(group: str, runners: Sequence[Runner], peak: DevicePeak, seconds: float = SECONDS) -> Iterator[Row]:
    """Time all runners alternately and compare them with the first one. Rows are yielded after all timings."""
    times = time_alternately([runner.call for runner in runners], ROUNDS, seconds, peak.clock)
    kinds = {(runner.precision, runner.exact) for runner in runners}
    peaks = {(name, exact): peak.measure(name, exact=exact) for name, exact in kinds}
    seconds_per_window = [
        [t / runner.windows for t in durations] for runner, durations in zip(runners, times, strict=True)
    ]
    for runner, durations in zip(runners, seconds_per_window, strict=True):
        spread = Spread.of([1000 * t for t in durations])
        speed = 1000 / spread.median
        yield Row(
            group,
            runner.name,
            runner.windows,
            ms_per_window=spread,
            windows_per_second=speed,
            gflop_per_second=speed * peak.gflop,
            peak_share=speed * peak.gflop / peaks[runner.precision, runner.exact],
            ratio=Spread.ratio(seconds_per_window[0], durations),
        )


class RunnerBuilder(NamedTuple):
    """Builder of a `Runner`. `build` raises one of `backends.ENGINE_ERRORS` if the engine does not run here.

    compiled  whether building calls torch.compile, which is slow
    """

    name: str
    windows: int
    build: Callable[[], Runner]
    compiled: bool = False


def compare_with_first(
    first: Runner,
    builders: Iterable[RunnerBuilder],
    peak: DevicePeak,
    *,
    build_seconds: float = math.inf,
    pair_seconds: float = PAIR_SECONDS,
) -> Iterator[Row]:
    """Yield the row of `first`. Then build each runner, time it alternately with `first`, and yield its row.

    Each runner is released before the next one is built. The row of a runner that fails contains the reason.

    build_seconds  time limit for building all runners; no other runner is built after it
    pair_seconds   time limit for the rounds of each pair
    """
    group = "engines"
    yield from compare_runners(group, [first], peak, pair_seconds)
    elapsed = 0.0
    for builder in builders:
        if elapsed > build_seconds:
            yield Row(group, builder.name, builder.windows, f"not built: the limit of {build_seconds:g} s was reached")
            continue
        start = time.monotonic()
        try:
            row, build_duration = _compare_pair(group, first, builder, peak, pair_seconds)
        except backends.ENGINE_ERRORS as error:
            row, build_duration = (
                Row(group, builder.name, builder.windows, backends.get_first_line(error)),
                time.monotonic() - start,
            )
        elapsed += build_duration
        yield row


def _compare_pair(
    group: str, first: Runner, builder: RunnerBuilder, peak: DevicePeak, seconds: float
) -> tuple[Row, float]:
    """Return the row of a built runner, timed alternately with `first`, and the seconds that building took."""
    log.info("building %s x%d", builder.name, builder.windows)
    start = time.monotonic()
    runner = builder.build()
    build_duration = time.monotonic() - start
    _, row = compare_runners(group, [first, runner], peak, seconds)
    return row, build_duration


def collect_rows(rows: Iterable[Row], collected: list[Row]) -> Iterator[Row]:
    """Append each row to `collected`, and yield it."""
    for row in rows:
        collected.append(row)
        yield row


def list_engines(
    spec: ModelSpec, settings: Settings, device: torch.device, batch_sizes: Iterable[int]
) -> Iterator[RunnerBuilder]:
    """List builders for every engine that the settings allow and that suits the network, at every batch size."""
    network, selector = load_selector(spec, settings, device)
    names = precision.list_precisions(settings.engine.precision, devices.list_native_precisions(device))
    with_tf32 = allows_tf32(settings.engine, device)

    def build(choice: EngineConfig) -> Runner:
        window = selector.build(choice).window
        return Runner(
            format_config(choice, with_tf32=with_tf32),
            choice.sw_batch_size,
            choice.precision,
            make_call(window.network, window.batch, device),
        )

    for size in batch_sizes:
        for choice in backends.list_configs(settings.engine, device, names, size):
            if backends.BACKENDS[choice.engine].can_improve(network):
                name = format_config(choice, with_tf32=with_tf32)
                yield RunnerBuilder(name, size, partial(build, choice), compiled=choice.compile_mode is not None)


def load_selector(spec: ModelSpec, settings: Settings, device: torch.device) -> tuple[nn.Module, EngineSelector]:
    """Load the network of a model, and create the selector that builds it for a device."""
    network = load_network(spec)
    window_bytes = measure_activation_bytes(network, (1, spec.input.channels, *spec.input.roi_size))
    return network, EngineSelector(spec, settings, device, network, window_bytes)


def allows_tf32(settings: EngineSettings, device: torch.device) -> bool:
    """Return whether float32 products may use TF32: on GPUs since Ampere, unless disabled in the settings."""
    if device.type != "cuda" or settings.matmul_precision == "highest":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def format_config(choice: EngineConfig, *, with_tf32: bool = False) -> str:
    """Format an engine configuration without its batch size.

    with_tf32  whether float32 products may use TF32; if so, the text of a float32 configuration includes it
    """
    mode = f" ({choice.compile_mode})" if choice.compile_mode else ""
    return f"{choice.engine}{mode} {format_precision(choice.precision, with_tf32=with_tf32)} {choice.memory_format}"


def format_precision(name: str, *, with_tf32: bool) -> str:
    """Format a precision, with TF32 if float32 products may use it."""
    return f"{name} (TF32)" if with_tf32 and name == "fp32" else name


def make_call(network: Network, batch: Tensor, device: torch.device) -> Callable[[], None]:
    """Return a function that runs the network on the batch and waits for the device."""
    return make_synchronized(lambda: network(batch), device)
