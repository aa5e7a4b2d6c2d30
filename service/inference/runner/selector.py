"""Make a network ready to run: as the operator fixed it, in the known best way, or in the fastest of all."""

from __future__ import annotations

import copy
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from service.core import hardware, host
from service.core.config import MAX_STREAMS, Settings
from service.core.hardware import Driver
from service.core.progress import step
from service.engine import backends, precision
from service.engine.cuda import tf32
from service.engine.prepare import prepare
from service.engine.tuning import plans
from service.engine.tuning.autotune import Candidate, NothingRuns, Tuner, Winner
from service.engine.tuning.plans import EngineConfig, EnginePlan, Outcome, Trial
from service.inference.runner.label_agreement import MAX_SHARE_BEYOND_ROUNDING, LabelAgreement, score
from service.inference.windows.blending import Blending
from service.inference.windows.kernels import window_kernels
from service.inference.windows.sliding_window import SlidingWindow
from service.models.loader import Network
from service.models.spec import ModelSpec

# Windows per call. On a CPU one at a time is the slowest, since ATen has a slow path for small batches. A GPU needs
# several to be busy at all; 11 windows of 64 voxels are one row of a plane of 512 x 512, so that no slot stays empty.
CPU_BATCH = 2
CUDA_BATCH = 11
# Batches at the same time: on a CPU two teams of half the cores wait less than one of all.
CPU_STREAMS = 2
# Share of the free memory that the layers of one batch may take while engines are compared.
MEMORY_SHARE = 0.5
# Windows of a stack on which engines race: with fewer, blending and decoding would hardly show.
RACE_WINDOWS = 4
LIBRARIES = ("stackseg", "torch", "monai", "openvino", "numpy")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadyEngine:
    """Network that runs, and how it was made.

    window       calls it
    module       what it was made from, to be run eagerly with other batch sizes
    config       how it runs
    seconds      until it ran, whatever was tried before included
    plan         how it was chosen, None where the engine is fixed
    cached       whether the plan was made earlier
    nbytes       of weights that the engine keeps beside those of the module, and of what its streams keep
    score_bytes  of one window, as in `backends.BuiltNetwork`
    """

    window: SlidingWindow
    module: nn.Module
    config: EngineConfig
    seconds: float
    warnings: tuple[str, ...] = ()
    plan: EnginePlan | None = None
    cached: bool = False
    nbytes: int = 0
    score_bytes: int | None = None


class EngineSelector:
    """Builds any configuration of an engine for one model on one device, and selects the one to use.

    network       as loaded, float32 on the CPU
    window_bytes  float32 that its layers take for one window
    native        dtypes that are worth trying; None: those that the device has units for
    faulty        dtypes that it has units for, but that are left out, and why; None: as from `faulty_precisions`
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        spec: ModelSpec,
        settings: Settings,
        device: torch.device,
        network: nn.Module,
        window_bytes: int,
        native: frozenset[torch.dtype] | None = None,
        driver: Driver = hardware,
        faulty: Mapping[torch.dtype, str] | None = None,
    ) -> None:
        self._spec, self._settings, self._device = spec, settings, device
        self._network, self._window_bytes, self._driver = network, window_bytes, driver
        self._native = hardware.native_precisions(device) if native is None else native
        self._faulty = hardware.faulty_precisions(device) if faulty is None else faulty
        self._batch_size, self._streams = batch_size(settings, device), streams(settings, device)
        tf32.use(settings.engine, device)

    def with_window(self, spec: ModelSpec, window_bytes: int) -> EngineSelector:
        """Return a selector for the same network with the window of `spec`."""
        other = copy.copy(self)
        other._spec, other._window_bytes = spec, window_bytes
        return other

    def rebuild(self, config: EngineConfig, batch_size: int) -> ReadyEngine:
        """Build what runs with another window or batch within seconds: as `config` says, but nothing is compiled.

        On devices other than the CPU a full batch is compared with FP32, as libraries may choose other algorithms for
        a larger window. If it differs, the network runs eagerly in FP32.

        Raises one of `backends.ENGINE_FAILURES` where the network does not run eagerly either.
        """
        ready = self._rebuild(config, batch_size)
        if ready.config.precision == "fp32" or self._driver.is_on_host(self._device):
            return ready
        difference = self._make_agreement().batch_difference(ready.window)
        if difference <= MAX_SHARE_BEYOND_ROUNDING:
            return ready
        wrong = "not finite" if math.isnan(difference) else f"wrong at {difference:.2%} of the voxels of a window"
        size = "x".join(map(str, self._spec.input.roi_size))
        found = f"{self._spec.identifier} with windows of {size} in {ready.config}: its scores are {wrong}"
        log.warning("%s. It runs eagerly in fp32 instead.", found)
        del ready
        return _require_same_size(self.build(replace(self._eager("fp32"), sw_batch_size=batch_size)))

    def _rebuild(self, config: EngineConfig, batch_size: int) -> ReadyEngine:
        config = replace(config, sw_batch_size=batch_size)
        if config.compile_mode is not None:
            engine = "cudagraph" if self._device.type == "cuda" else "eager"
            config = replace(config, engine=engine, compile_mode=None)
        try:
            return _require_same_size(self.build(config))
        except backends.ENGINE_FAILURES as error:
            if config.engine == "eager":
                raise
            reason = backends.first_line(error)
            log.warning("%s does not run in %s, so it runs eagerly: %s", self._spec.identifier, config, reason)
            return _require_same_size(self.build(replace(config, engine="eager")))

    def preliminary(self) -> EngineConfig:
        """Return the configuration before anything was tried: eager, with whatever else is fixed."""
        return self._eager(precision.choose(self._settings.engine.precision, self._native).name)

    def run(self, *, tune: bool = False) -> ReadyEngine:
        """Build what is fixed, or else what an earlier plan says, or else the known best; keep a new plan.

        With `tune`, and where the operator wants it (`engine.tune`), all that is possible races instead, unless a plan
        of a race is kept.
        An engine that was asked for and fails, or gives other labels than the network as loaded, is tried in the next
        wider precision, where none was asked for, and at last replaced by the eager one, with a warning; an error of
        that one passes through.
        """
        settings = self._settings.engine
        if settings.kind != "auto":
            return self._build_fixed()
        plan = plans.find(self._plan_folder, self._spec.name, self.circumstances())
        race = tune and settings.tune == "first-start"
        # Somebody may have edited the file of the plan.
        known = plan is not None and plan.choice.engine in backends.BACKENDS
        if plan is not None and known and (plan.tuned or not race):
            try:
                warnings = (*self._precision_warnings, *self._warnings(plan.trials))
                return replace(self.build(plan.choice, *warnings), plan=plan, cached=True)
            except backends.ENGINE_FAILURES as error:
                reason = backends.first_line(error)
                log.warning("%s: what an earlier plan says fails, choosing again: %s", self._spec.identifier, reason)
        return self.tune(settings.tune_seconds) if race else self._build_known()

    def tune(self, seconds: float, announce: Callable[[EngineConfig, int], object] = lambda *_: None) -> ReadyEngine:
        """Race all configurations that the settings leave open, within a time limit, and keep the plan.

        announce  called with each configuration before it is tried, and with the number of all
        """
        configs = list(dict.fromkeys([*self._known_order(), *self._candidates()]))
        changes = {"sw_batch_size": self._batch_sizes, "streams": self._stream_counts}
        tuner = self._make_tuner(seconds, announce)
        log.info("%s: trying all ways to run it, for at most %g s", self._spec.identifier, seconds)
        return self._choose(tuner, lambda: tuner.race(configs, **changes), tuned=True)

    def _build_known(self) -> ReadyEngine:
        """Build the first configuration of the known order that runs and gives the labels of the network as loaded."""
        tuner = self._make_tuner()
        names = precision.list_precisions(self._settings.engine.precision, self._native)
        configs = [*self._known_order(), *map(self._eager, names)]
        return self._choose(tuner, lambda: tuner.take_first(configs), tuned=False)

    def _choose(
        self, tuner: Tuner[ReadyEngine], choose: Callable[[], Winner[ReadyEngine]], *, tuned: bool
    ) -> ReadyEngine:
        """Return what is chosen, or else the eager network, with the plan, which is kept if it may hold."""
        try:
            ready, trials = choose()
            # What failed for want of a compiler may run at the next start, and what lacked memory where nothing ran.
            holds, warnings = tuned or not _failures(trials), self._warnings(trials)
        except NothingRuns as nothing:
            ready, trials, holds = self.build(self._eager("fp32")), nothing.trials, False
            warnings = (f"{nothing} It runs eagerly in fp32.",)
        plan = EnginePlan(self._spec.name, ready.config, trials, tuner.seconds, self.circumstances(), tuned)
        if holds and self._settings.engine.kind == "auto":
            self._keep(plan)
        return replace(ready, plan=plan, seconds=tuner.seconds, warnings=(*self._precision_warnings, *warnings))

    @property
    def _precision_warnings(self) -> tuple[str, ...]:
        """The warning about the precision, if there is one."""
        warning = precision.choose(self._settings.engine.precision, self._native, self._faulty).warning
        return () if warning is None else (warning,)

    def _warnings(self, trials: Sequence[Trial]) -> tuple[str, ...]:
        """Return warnings about trials that failed, and about labels that what the operator has set would change."""
        settings, warnings = self._settings.engine, list(_failures(trials))
        chosen = {trial.choice.engine for trial in trials if trial.verdict.outcome is Outcome.CHOSEN}
        for trial in trials:
            # The same engine in another precision is what `engine.precision: auto` asks for.
            if settings.kind == trial.choice.engine not in chosen and trial.verdict.outcome is Outcome.WRONG:
                warnings.append(
                    f"The {trial.choice.engine} engine in {trial.choice.precision} is not used: {trial.verdict}"
                )
            if trial.verdict.outcome is Outcome.CHOSEN and (trial.difference or 0.0) > settings.tolerance:
                share = f"{trial.difference:.2%} of the labels of the model's sample differ from those in fp32"
                warnings.append(f"{share}; engine.precision {settings.precision} is set, auto would not take it.")
        return tuple(warnings)

    def _keep(self, plan: EnginePlan) -> None:
        try:
            plans.save(self._plan_folder, plan)
        except OSError as error:
            advice = "name a folder that may be written to in engine.cache_folder"
            log.warning("The plan for %s cannot be kept, every start makes one; %s: %s", plan.model, advice, error)

    @property
    def _plan_folder(self) -> Path:
        return plans.choose_folder(self._settings.engine.cache_folder)

    def build(self, config: EngineConfig, *warnings: str) -> ReadyEngine:
        """Build a configuration, with these warnings after its own.

        Raises one of `backends.ENGINE_FAILURES` where it does not run.
        """
        with step(f"building {config}"):
            module = self.module(config)
            window = self.sliding_window(module, config, config.sw_batch_size)
            built = backends.build(module, window.batch, config, self._settings.engine)
        window = window.with_network(built.network, any_batch_size=built.any_batch_size, owns_scores=built.owns_scores)
        ready = ReadyEngine(window, module, config, built.seconds, warnings)
        return replace(ready, nbytes=built.nbytes, score_bytes=built.score_bytes)

    def module(self, config: EngineConfig) -> nn.Module:
        """Prepare the module that a configuration is built from."""
        memory_format = backends.MEMORY_FORMATS[config.memory_format]
        return prepare(self._network, self._device, backends.batch_dtype(config), memory_format)

    def reference(self, batch_size: int) -> SlidingWindow:
        """Return windows through the network exactly as it was loaded: eager, float32 without TF32, nothing folded."""
        network: Network = copy.deepcopy(self._network).to(self._device)
        if self._device.type == "cuda":
            network = tf32.without_tf32(network)
        return self.sliding_window(network, EngineConfig("eager", "fp32", "contiguous", batch_size), batch_size)

    def sliding_window(self, network: Network, config: EngineConfig, batch_size: int) -> SlidingWindow:
        """Return windows through `network` as `config` says; a batch that is smaller than its own has one stream."""
        windows = self._settings.windows
        # MONAI blends windows by itself, and gets the scores of each as they are.
        mode = "constant" if windows.inferer == "monai" else windows.blending
        return SlidingWindow(
            network,
            self._spec.input.channels,
            self._spec.input.roi_size,
            batch_size,
            blending=Blending(mode, windows.sigma),
            device=self._device,
            dtype=backends.batch_dtype(config),
            memory_format=backends.MEMORY_FORMATS[config.memory_format],
            streams=config.streams if batch_size >= config.sw_batch_size else 1,
        )

    def circumstances(self) -> dict[str, str]:
        """Return everything that a plan depends on, by name."""
        spec, settings = self._spec, self._settings
        facts: dict[str, object] = {
            "weights": spec.weights.sha256,
            "architecture": spec.architecture.model_dump_json() if spec.architecture else spec.network,
            "input": f"{spec.input.channels} x {'x'.join(map(str, spec.input.roi_size))}",
            "decoding": spec.decoding.model_dump_json(),
            "device": hardware.device_name(self._device),
            "python": platform.python_version(),
            "engine": settings.engine.model_dump_json(exclude={"cache_folder", "tune", "tune_seconds"}),
            "engines": plans.digest_sources(Path(__file__).parents[1]),
            "sw_batch_size": f"{settings.windows.sw_batch_size}, at most {settings.limits.sw_batch_size}",
        }
        facts |= {name: _version(name) for name in LIBRARIES}
        if self._device.type == "cpu":
            facts |= {"threads": torch.get_num_threads(), "features": " ".join(hardware.cpu().features)}
            facts["kernels"] = window_kernels.ready
        else:
            facts |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        return {name: str(fact) for name, fact in facts.items()}

    def _build_fixed(self) -> ReadyEngine:
        settings = self._settings.engine
        backend = backends.BACKENDS[settings.kind]
        warnings = list[str]()
        names = precision.list_precisions(settings.precision, self._native)
        unfit = {name: backend.explain_unfit(name, self._device, self._network) for name in names}
        # The first configuration of a precision is the most promising one; what is not compiled needs no compiler.
        candidates = self._candidates()
        firsts = {config.precision: config for config in reversed(candidates)}
        plain = {config.precision: config for config in reversed(candidates) if config.compile_mode is None}
        fit = [name for name in names if unfit[name] is None]
        configs = [chosen[name] for name in fit for chosen in (firsts, plain) if name in chosen]
        if not configs:
            warnings.append(f"The {settings.kind} engine {unfit[names[0]]}; running eagerly.")
        configs = list(dict.fromkeys([*configs, *map(self._eager, names)]))
        if self._device.type == "cpu" and configs[0] == self._eager("fp32"):
            # It is what others are compared with.
            return self.build(configs[0], *warnings, *self._precision_warnings)
        tuner = self._make_tuner(explain_skip=lambda _config: None)
        ready = self._choose(tuner, lambda: tuner.take_first(configs), tuned=False)
        return replace(ready, plan=None, warnings=(*warnings, *ready.warnings))

    @property
    def _tolerance(self) -> float:
        """Largest share of changed labels that passes: a precision that the operator chose is not judged by it."""
        settings = self._settings.engine
        return settings.tolerance if settings.precision == "auto" else 1.0

    def _candidates(self) -> list[EngineConfig]:
        """List the engines, precisions, memory formats and modes that the settings leave open."""
        settings = self._settings.engine
        names = precision.list_precisions(settings.precision, self._native)
        return [
            replace(config, streams=1 if backends.needs_single_stream(config, settings) else self._streams)
            for config in backends.list_configs(settings, self._device, names, self._batch_size)
        ]

    def _known_order(self) -> list[EngineConfig]:
        features = hardware.cpu().features if self._device.type == "cpu" else ()
        return backends.list_known_order(self._candidates(), features)

    def _make_tuner(
        self,
        seconds: float = math.inf,
        announce: Callable[[EngineConfig, int], object] = lambda *_: None,
        explain_skip: Callable[[EngineConfig], str | None] | None = None,
    ) -> Tuner[ReadyEngine]:
        """Return a tuner that builds engines and checks their labels; `explain_skip` as in `Tuner`, None: as here."""
        agreement = self._make_agreement()

        def build(config: EngineConfig) -> Candidate[ReadyEngine]:
            ready = self.build(config)
            windows = max(RACE_WINDOWS // config.sw_batch_size, 1) * config.sw_batch_size
            # On a GPU, where the network takes little, decoding would be most of what is timed.
            run = agreement.segment if self._driver.is_on_host(self._device) else score
            call = _run_in_all_streams(ready.window, partial(run, ready.window, agreement.row(windows)))
            return Candidate(call, windows * config.streams, lambda: agreement.difference(ready.window), ready)

        return Tuner(
            build,
            self._tolerance,
            seconds,
            explain_skip=explain_skip or self._explain_skip,
            announce=announce,
            find_loss=lambda error: hardware.find_loss(self._device, error, self._driver),
        )

    def _make_agreement(self) -> LabelAgreement:
        """Return the comparison with FP32: on devices other than the CPU, of a full batch as well.

        The reference computes one window at a time there, so that no fault with large batches affects it.
        """
        on_host = self._driver.is_on_host(self._device)
        windows = self._batch_size if on_host else 1
        return LabelAgreement(self._spec, self._device, lambda: self.reference(windows), full_batch=not on_host)

    def _explain_skip(self, config: EngineConfig) -> str | None:
        """Return why a configuration must not be tried; None if it may."""
        backend = backends.BACKENDS[config.engine]
        if (missing := backends.explain_missing(config, self._device)) is not None:
            return missing
        if (unfit := backend.explain_unfit(config.precision, self._device, self._network)) is not None:
            return f"it {unfit}"
        if config.streams > 1 and backends.needs_single_stream(config, self._settings.engine):
            return "a graph that is not frozen is made for one number of threads"
        windows = config.sw_batch_size * config.streams
        needed = self._window_bytes * backends.batch_dtype(config).itemsize // 4 * windows
        free = self._driver.free_bytes(self._device)
        if free is not None and needed > MEMORY_SHARE * free:
            return f"it takes about {needed / 2**30:.1f} GiB, too much of the {free / 2**30:.1f} GiB that are free"
        return None

    @property
    def _batch_sizes(self) -> tuple[int, ...]:
        """Windows per call to try: powers of two, no more than 4 on a CPU; one number where it is fixed."""
        if self._settings.windows.sw_batch_size != "auto":
            return (self._batch_size,)
        most = self._settings.limits.sw_batch_size
        return powers_of_two(min(most, 4) if self._device.type == "cpu" else most)

    @property
    def _stream_counts(self) -> tuple[int, ...]:
        """Numbers of streams to try: powers of two up to that of the cores; one number where it is fixed."""
        if self._device.type != "cpu" or self._settings.engine.streams != "auto":
            return (self._streams,)
        return powers_of_two(min(torch.get_num_threads(), MAX_STREAMS))

    def _eager(self, name: str) -> EngineConfig:
        memory_format = backends.BACKENDS["eager"].allowed_formats(self._settings.engine, self._device)[0]
        return EngineConfig("eager", name, memory_format, self._batch_size, streams=self._streams)


def batch_size(settings: Settings, device: torch.device) -> int:
    """Return the windows per call where nothing else is known: the configured ones, else what suits the device."""
    if settings.windows.sw_batch_size != "auto":
        return settings.windows.sw_batch_size
    return min(CPU_BATCH if device.type == "cpu" else CUDA_BATCH, settings.limits.sw_batch_size)


def streams(settings: Settings, device: torch.device) -> int:
    """Return the batches at the same time where nothing else is known: as configured, else what suits the device."""
    if device.type != "cpu":
        return 1
    wanted = settings.engine.streams
    return min(CPU_STREAMS, settings.device.threads or host.usable_cores()) if wanted == "auto" else wanted


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return the powers of two up to `most`, ascending."""
    return tuple(2**power for power in range(most.bit_length()))


def _run_in_all_streams(window: SlidingWindow, run: Callable[..., object]) -> Callable[[], object]:
    """Return a function that calls `run` for every stream at the same time, as requests do that share a device."""
    if window.streams == 1:
        # Here: graphs that were recorded on CUDA belong to the thread that recorded them.
        return run
    cores = max(torch.get_num_threads() // window.streams, 1)
    # Its threads end with the candidate that holds this function.
    threads = ThreadPoolExecutor(window.streams, "stream", partial(hardware.use_threads, cores))
    return lambda: list(threads.map(run, range(window.streams)))


def _require_same_size(ready: ReadyEngine) -> ReadyEngine:
    """Return a network whose scores are as large as its windows. Raises RuntimeError."""
    batch = ready.window.batch
    scores = ready.window.network(batch)
    if scores.shape[2:] != batch.shape[2:]:
        raise RuntimeError(f"its scores are {'x'.join(map(str, scores.shape[2:]))}")
    return ready


def _failures(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return warnings about trials that failed, which an operator may want to repair."""
    failed = [trial for trial in trials if trial.verdict.outcome is Outcome.FAILED]
    return tuple(f"The {trial.choice.engine} engine {trial.verdict}" for trial in failed)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
