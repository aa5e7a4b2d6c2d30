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

# Maximum number of rounds of a comparison, and the time limit for all of its rounds.
MAX_ROUNDS = 12
MAX_COMPARISON_SECONDS = 60.0
# Time limit for the rounds of one pair of networks.
MAX_PAIR_SECONDS = 10.0

log = logging.getLogger(__name__)


class TimedNetwork(NamedTuple):
    """Network to be timed. `call` runs the network on one batch.

    precision         selects the peak speed with which the network is compared
    is_tf32_disabled  whether this peak speed is measured without TF32, because the network does not use TF32
    """

    name: str
    batch_size: int
    precision: str
    call: Callable[[], object]
    is_tf32_disabled: bool = False


@dataclass(frozen=True)
class EngineRow:
    """Result for one engine.

    problem     reason why there are no measurements, or None
    ratio       windows per second relative to the first row of the group, round by round
    peak_share  speed relative to a large matrix product in this precision; above 1 if an engine needs fewer operations
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

    gflop  floating-point operations of the network per window, in units of 1e9
    peaks  GFLOP/s of a large matrix product by precision; "fp32 exact" is measured without TF32
    clock  timer; on a busy machine, use `time.process_time` for a single thread, since it excludes other processes
    """

    device: torch.device
    gflop: float
    peaks: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def measure(self, precision_name: str, *, is_tf32_disabled: bool = False) -> float:
        """Measure the peak and return the highest value so far, which excludes moments when the device was busy.

        is_tf32_disabled  whether to measure without TF32
        """
        with tf32.disable_tf32() if is_tf32_disabled else nullcontext():
            latest_peak = measure_matrix_peak(DTYPES[precision_name], self.device, clock=self.clock) / 1e9
        key = f"{precision_name} exact" if is_tf32_disabled else precision_name
        self.peaks[key] = max(self.peaks.get(key, 0.0), latest_peak)
        return self.peaks[key]


def compare_networks(
    group: str, networks: Sequence[TimedNetwork], peak: DevicePeak, max_seconds: float = MAX_COMPARISON_SECONDS
) -> Iterator[EngineRow]:
    """Time all networks alternately and compare them with the first one. Rows are yielded after all timings."""
    times = time_alternately([network.call for network in networks], MAX_ROUNDS, max_seconds, peak.clock)
    precisions = {(network.precision, network.is_tf32_disabled) for network in networks}
    peaks = {
        (precision_name, is_tf32_disabled): peak.measure(precision_name, is_tf32_disabled=is_tf32_disabled)
        for precision_name, is_tf32_disabled in precisions
    }
    seconds_per_window = [
        [t / network.batch_size for t in durations] for network, durations in zip(networks, times, strict=True)
    ]
    for network, durations in zip(networks, seconds_per_window, strict=True):
        spread = Spread.from_values([1000 * t for t in durations])
        windows_per_second = 1000 / spread.median
        yield EngineRow(
            group,
            network.name,
            network.batch_size,
            ms_per_window=spread,
            windows_per_second=windows_per_second,
            gflop_per_second=windows_per_second * peak.gflop,
            peak_share=windows_per_second * peak.gflop / peaks[network.precision, network.is_tf32_disabled],
            ratio=Spread.from_ratios(seconds_per_window[0], durations),
        )


class TimedNetworkBuilder(NamedTuple):
    """Builder of a `TimedNetwork`. `build` raises one of `backends.ENGINE_ERRORS` on failure.

    is_compiled  whether building calls torch.compile, which is slow
    """

    name: str
    batch_size: int
    build: Callable[[], TimedNetwork]
    is_compiled: bool = False


def compare_with_first(
    first_network: TimedNetwork,
    builders: Iterable[TimedNetworkBuilder],
    peak: DevicePeak,
    *,
    build_seconds: float = math.inf,
    pair_seconds: float = MAX_PAIR_SECONDS,
) -> Iterator[EngineRow]:
    """Yield the row of `first_network`, and then a row for each network from `builders`, timed alternately with it.

    Each network is released before the next one is built. The row of a network that fails contains the reason.

    build_seconds  time limit for building all networks; once it has passed, no more networks are built
    pair_seconds   time limit for the rounds of each pair
    """
    group = "engines"
    yield from compare_networks(group, [first_network], peak, pair_seconds)
    total_build_seconds = 0.0
    for builder in builders:
        if total_build_seconds > build_seconds:
            yield EngineRow(
                group, builder.name, builder.batch_size, f"not built: the limit of {build_seconds:g} s was reached"
            )
            continue
        build_start = time.monotonic()
        try:
            row, build_duration = _compare_pair(group, first_network, builder, peak, pair_seconds)
        except backends.ENGINE_ERRORS as error:
            row, build_duration = (
                EngineRow(group, builder.name, builder.batch_size, backends.get_first_line(error)),
                time.monotonic() - build_start,
            )
        total_build_seconds += build_duration
        yield row


def _compare_pair(
    group: str, first_network: TimedNetwork, builder: TimedNetworkBuilder, peak: DevicePeak, max_seconds: float
) -> tuple[EngineRow, float]:
    """Build a network and time it alternately with `first_network`. Return its row and build time."""
    log.info("building %s x%d", builder.name, builder.batch_size)
    start = time.monotonic()
    network = builder.build()
    build_duration = time.monotonic() - start
    _, row = compare_networks(group, [first_network, network], peak, max_seconds)
    return row, build_duration


def collect_rows(rows: Iterable[EngineRow], collected_rows: list[EngineRow]) -> Iterator[EngineRow]:
    """Append each row to `collected_rows`, and yield the row."""
    for row in rows:
        collected_rows.append(row)
        yield row


def iter_builders(
    spec: ModelSpec, settings: Settings, device: torch.device, batch_sizes: Iterable[int]
) -> Iterator[TimedNetworkBuilder]:
    """Yield builders for every engine that the settings allow and that suits the network, at every batch size."""
    network, selector = load_selector(spec, settings, device)
    precisions = precision.list_precisions(settings.engine.precision, devices.list_native_precisions(device))
    tf32_allowed = is_tf32_allowed(settings.engine, device)

    def build(config: EngineConfig) -> TimedNetwork:
        window = selector.build(config).window
        return TimedNetwork(
            format_config(config, tf32_allowed=tf32_allowed),
            config.sw_batch_size,
            config.precision,
            make_call(window.network, window.batch, device),
        )

    for batch_size in batch_sizes:
        for config in backends.list_configs(settings.engine, device, precisions, batch_size):
            if backends.BACKENDS[config.engine].can_improve(network):
                name = format_config(config, tf32_allowed=tf32_allowed)
                yield TimedNetworkBuilder(
                    name, batch_size, partial(build, config), is_compiled=config.compile_mode is not None
                )


def load_selector(spec: ModelSpec, settings: Settings, device: torch.device) -> tuple[nn.Module, EngineSelector]:
    """Load the network of a model, and create the selector that builds it for a device."""
    network = load_network(spec)
    window_bytes = measure_activation_bytes(network, (1, spec.input.channels, *spec.input.roi_size))
    return network, EngineSelector(spec, settings, device, network, window_bytes)


def is_tf32_allowed(settings: EngineSettings, device: torch.device) -> bool:
    """Return whether float32 matrix products may use TF32: on GPUs since Ampere, unless the settings disable it."""
    if device.type != "cuda" or settings.matmul_precision == "highest":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def format_config(config: EngineConfig, *, tf32_allowed: bool = False) -> str:
    """Format an engine configuration without its batch size.

    tf32_allowed  whether float32 matrix products may use TF32, which is then shown for float32 configurations
    """
    mode = f" ({config.compile_mode})" if config.compile_mode else ""
    return (
        f"{config.engine}{mode} {format_precision(config.precision, tf32_allowed=tf32_allowed)} {config.memory_format}"
    )


def format_precision(name: str, *, tf32_allowed: bool) -> str:
    """Format a precision, with TF32 if float32 matrix products may use it."""
    return f"{name} (TF32)" if tf32_allowed and name == "fp32" else name


def make_call(network: Network, batch: Tensor, device: torch.device) -> Callable[[], None]:
    """Return a function that runs the network on the batch and waits for the device."""
    return make_synchronized(lambda: network(batch), device)
