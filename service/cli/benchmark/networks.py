"""Comparison of ways to run one network: every engine, and every optimisation alone and removed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from service.cli.benchmark.timing import Spread, matrix_peak, synchronised, time_in_turn
from service.core import hardware
from service.core.config import Settings
from service.engine import backends, base, cuda_graph, precision, torch_compile
from service.engine.cpu import winograd
from service.engine.plans import EngineConfig
from service.engine.precision import DTYPES
from service.engine.prepare import prepare
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


@dataclass(frozen=True)
class Optimisations:
    """Optimisations that a network runs with; the defaults are none."""

    windows: int = 1
    precision: str = "fp32"
    folded: bool = False
    channels_last: bool = False
    winograd: bool = False
    compiled: bool = False
    frozen: bool = False
    cudagraph: bool = False

    def build(self, name: str, network: nn.Module, window: tuple[int, ...], device: torch.device) -> Runner:
        """Make a runner on one batch of noise, windows of shape (C, z, y, x). Raises what engines raise."""
        memory_format = torch.channels_last_3d if self.channels_last else torch.contiguous_format
        dtype = DTYPES[self.precision]
        module = prepare(network, device, dtype, memory_format, fold=self.folded)
        batch = torch.rand(self.windows, *window, device=device).to(dtype).to(memory_format=memory_format)
        run: Network = winograd.replace_convolutions(module) if self.winograd else module
        with torch.inference_mode():
            if self.compiled and isinstance(run, nn.Module):
                run = torch_compile.compile_module(run, "default", freeze=self.frozen)
            if self.cudagraph:
                run = cuda_graph.GraphedNetwork(run, batch)
            for _ in range(base.WARM_UP_CALLS):
                run(batch)
        return Runner(name, self.windows, self.precision, make_call(run, batch, device))


def compare_optimisations(spec: ModelSpec, peak: DevicePeak, windows: int, seconds: float = math.inf) -> Iterator[Row]:
    """Compare each optimisation alone with none, and all of them with all but one."""
    network, device = load_network(spec), peak.device
    changes = list_optimisations(network, device, windows)
    everything = Optimisations()
    for change in changes.values():
        everything = replace(everything, **change)
    alone = {"none": Optimisations()} | {
        f"{name} alone": replace(Optimisations(), **change) for name, change in changes.items()
    }
    removed = {"all": everything} | {f"without {name}": remove(everything, change) for name, change in changes.items()}
    window = (spec.input.channels, *spec.input.roi_size)
    for group, variants in (("alone", alone), ("removed", removed)):
        builders = [
            RunnerBuilder(name, variant.windows, partial(variant.build, name, network, window, device))
            for name, variant in variants.items()
        ]
        yield from build_and_compare(group, (), builders, peak, seconds / 2)


def list_optimisations(network: nn.Module, device: torch.device, windows: int) -> dict[str, dict[str, Any]]:
    """Return the fields of `Optimisations` that each optimisation changes, for this network on this device."""
    native = hardware.native_precisions(device)
    narrow = [name for name, dtype in DTYPES.items() if dtype in native and name != "fp32"]
    changes: dict[str, dict[str, Any]] = {"folding": {"folded": True}, "channels-last": {"channels_last": True}}
    if windows > 1:
        changes[f"{windows} windows at once"] = {"windows": windows}
    if narrow:
        changes[narrow[0]] = {"precision": narrow[0]}
    elif device.type == "cpu" and winograd.count_replaceable(network):
        changes["winograd"] = {"winograd": True}
    changes["compiling"] = {"compiled": True}
    if device.type == "cpu":
        # Only a compiled network can be frozen, so freezing alone means both.
        changes["freezing"] = {"compiled": True, "frozen": True}
    else:
        changes["CUDA graph"] = {"cudagraph": True}
    return changes


def remove(optimisations: Optimisations, change: dict[str, Any]) -> Optimisations:
    """Reset the last field that `change` sets to its default, and what needs it."""
    field = list(change)[-1]
    less = replace(optimisations, **{field: getattr(Optimisations(), field)})
    return less if less.compiled else replace(less, frozen=False)
