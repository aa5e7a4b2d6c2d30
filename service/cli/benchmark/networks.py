"""Ways to run one network, by itself and in turn: every engine, and every optimisation alone and removed."""

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

from service.cli.benchmark.timing import Spread, in_turn, matrix_peak, synchronised
from service.core import hardware
from service.core.config import Settings
from service.engine import backends, base, cuda_graph, precision, torch_compile
from service.engine.cpu import winograd
from service.engine.plans import EngineConfig
from service.engine.precision import DTYPES
from service.engine.prepare import prepare
from service.inference.engine_selector import FAILURES, EngineSelector
from service.inference.estimate import activation_bytes
from service.models.loader import Network, load_network
from service.models.spec import ModelSpec

ROUNDS, SECONDS = 12, 60.0

log = logging.getLogger(__name__)


class Runner(NamedTuple):
    """A network that has run: `call` is one batch of `windows`, `precision` that whose peak it is held against."""

    name: str
    windows: int
    precision: str
    call: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """What became of one way to run a network.

    problem     why there are no numbers
    ratio       its windows per second over those of the first row of its group, round by round
    peak_share  of a large matrix product in the same precision; fewer multiplications than the model's can pass 1
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
class Yardstick:
    """What networks are held against.

    gflop  arithmetic of one window
    peaks  what the device does at best: GFLOP per second by precision
    clock  on a busy machine CPU seconds (`time.process_time`) of one thread leave out what others took
    """

    device: torch.device
    gflop: float
    peaks: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def measure(self, name: str) -> float:
        """The device's peak, measured again: a moment in which it was busy does not lower it."""
        peak = matrix_peak(DTYPES[name], self.device, clock=self.clock) / 1e9
        self.peaks[name] = max(self.peaks.get(name, 0.0), peak)
        return self.peaks[name]


def race(group: str, runners: Sequence[Runner], yardstick: Yardstick, seconds: float = SECONDS) -> Iterator[Row]:
    """All of them in turn; the first is what the others are compared with."""
    times = in_turn([runner.call for runner in runners], ROUNDS, seconds, yardstick.clock)
    peaks = {name: yardstick.measure(name) for name in {runner.precision for runner in runners}}
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
            gflop_per_second=speed * yardstick.gflop,
            peak_share=speed * yardstick.gflop / peaks[runner.precision],
            ratio=Spread.ratio(per_window[0], taken),
        )


class Maker(NamedTuple):
    """What becomes a `Runner`. Raises what engines raise where it does not run here."""

    name: str
    windows: int
    make: Callable[[], Runner]


def build_and_race(
    group: str, first: Sequence[Runner], makers: Iterable[Maker], yardstick: Yardstick, seconds: float = math.inf
) -> Iterator[Row]:
    """Build what there is to build, and let it run in turn with what runs already; nothing is begun after `seconds`."""
    deadline = time.monotonic() + seconds
    runners = list(first)
    for maker in makers:
        if time.monotonic() > deadline:
            yield Row(group, maker.name, maker.windows, f"not built: {seconds:g} s were over")
            continue
        log.info("building %s x%d", maker.name, maker.windows)
        try:
            runners.append(maker.make())
        except FAILURES as error:
            yield Row(group, maker.name, maker.windows, backends.first_line(error))
    yield from race(group, runners, yardstick)


def engines(spec: ModelSpec, settings: Settings, device: torch.device, batch_sizes: Iterable[int]) -> Iterator[Maker]:
    """Every engine that the settings leave open and that makes anything of the network, at every batch size."""
    network = load_network(spec)
    window_bytes = activation_bytes(network, (1, spec.input.channels, *spec.input.roi_size))
    warming = EngineSelector(spec, settings, device, network, window_bytes)
    names = precision.list_precisions(settings.engine.precision, hardware.native_precisions(device))

    def build(choice: EngineConfig) -> Runner:
        window = warming.build(choice).window
        return Runner(
            label(choice), choice.sw_batch_size, choice.precision, calling(window.network, window.batch, device)
        )

    for size in batch_sizes:
        for choice in backends.list_configs(settings.engine, device, names, size):
            if backends.BACKENDS[choice.engine].suits(network):
                yield Maker(label(choice), size, partial(build, choice))


def label(choice: EngineConfig) -> str:
    """A choice without its batch size."""
    mode = f" ({choice.compile_mode})" if choice.compile_mode else ""
    return f"{choice.engine}{mode} {choice.precision} {choice.memory_format}"


def calling(network: Network, batch: Tensor, device: torch.device) -> Callable[[], None]:
    return synchronised(lambda: network(batch), device)


@dataclass(frozen=True)
class Recipe:
    """Which optimisations a network runs with; the defaults are none."""

    windows: int = 1
    precision: str = "fp32"
    folded: bool = False
    channels_last: bool = False
    winograd: bool = False
    compiled: bool = False
    frozen: bool = False
    cudagraph: bool = False

    def build(self, name: str, network: nn.Module, window: tuple[int, ...], device: torch.device) -> Runner:
        """Make it run, on one batch of noise of windows (C, z, y, x). Raises what engines raise."""
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
        return Runner(name, self.windows, self.precision, calling(run, batch, device))


def compare_optimisations(
    spec: ModelSpec, yardstick: Yardstick, windows: int, seconds: float = math.inf
) -> Iterator[Row]:
    """Each one alone beside the network as it was loaded, and each one removed beside all of them together."""
    network, device = load_network(spec), yardstick.device
    known = optimisations(network, device, windows)
    everything = Recipe()
    for change in known.values():
        everything = replace(everything, **change)
    alone = {"none": Recipe()} | {f"{name} alone": replace(Recipe(), **change) for name, change in known.items()}
    removed = {"all": everything} | {f"without {name}": without(everything, change) for name, change in known.items()}
    window = (spec.input.channels, *spec.input.roi_size)
    for group, recipes in (("alone", alone), ("removed", removed)):
        makers = [
            Maker(name, recipe.windows, partial(recipe.build, name, network, window, device))
            for name, recipe in recipes.items()
        ]
        yield from build_and_race(group, (), makers, yardstick, seconds / 2)


def optimisations(network: nn.Module, device: torch.device, windows: int) -> dict[str, dict[str, Any]]:
    """Those that there are for this network on this device: name -> the fields of a `Recipe` that it changes."""
    native = hardware.native_precisions(device)
    narrow = [name for name, dtype in DTYPES.items() if dtype in native and name != "fp32"]
    found: dict[str, dict[str, Any]] = {"folding": {"folded": True}, "channels-last": {"channels_last": True}}
    if windows > 1:
        found[f"{windows} windows at once"] = {"windows": windows}
    if narrow:
        found[narrow[0]] = {"precision": narrow[0]}
    elif device.type == "cpu" and winograd.count_replaceable(network):
        found["winograd"] = {"winograd": True}
    found["compiling"] = {"compiled": True}
    if device.type == "cpu":
        # Only what is compiled can be frozen, so alone it means both.
        found["freezing"] = {"compiled": True, "frozen": True}
    else:
        found["CUDA graph"] = {"cudagraph": True}
    return found


def without(recipe: Recipe, change: dict[str, Any]) -> Recipe:
    """`recipe` with the last field that `change` sets back at its default, and what needs it."""
    field = list(change)[-1]
    less = replace(recipe, **{field: getattr(Recipe(), field)})
    return less if less.compiled else replace(less, frozen=False)
