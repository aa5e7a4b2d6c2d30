"""Make a network ready to run: as the operator fixed it, as an earlier start found out, or as trials tell now."""

from __future__ import annotations

import copy
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import nn

from service.core import hardware
from service.core.config import MAX_STREAMS, Settings
from service.engine import autotune, backends, plans, precision, tf32
from service.engine.plans import EngineConfig, EnginePlan
from service.engine.prepare import prepare
from service.inference.label_agreement import OVERLAP, LabelAgreement
from service.inference.throughput import StreamThreads, Throughput
from service.inference.windows.blending import Blending
from service.inference.windows.sliding_window import SlidingWindow
from service.models.loader import Network
from service.models.spec import ModelSpec

# Windows per call where nothing was tuned yet, and where tuning begins. One at a time is the slowest on a CPU,
# where ATen has a slow path for small batches; a GPU needs several to be busy at all.
CPU_BATCH, CUDA_BATCH = 2, 8
# Batches at the same time where nothing was tuned yet: on a CPU two teams of half the cores wait less than one of all.
CPU_STREAMS = 2
# Share of the free memory that the layers of one batch may take while engines are compared.
MEMORY_SHARE = 0.5
UNTUNED = (
    "It was loaded on demand, and ways to run it were never compared: name it in models.load for one start, or run "
    "stackseg bench with it, and the fastest is known from then on."
)
# Seconds that making an engine may take, on a slow machine, where somebody waits for a model that is loaded on demand.
QUICK_BUILD = 5.0
# What is measured besides engines, and so decides which of them is best.
_HERE = Path(__file__).parent
MEASURED_WITH = (
    _HERE / "throughput.py",
    _HERE / "label_agreement.py",
    *sorted(file for file in (_HERE / "windows").iterdir() if file.suffix in {".py", ".cpp", ".hpp"}),
)
LIBRARIES = ("stackseg", "torch", "monai", "openvino", "torch-tensorrt", "numpy")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadyEngine:
    """Network that runs, and how it was made.

    window       calls it
    module       what it was made from, to be run eagerly with other batch sizes
    config       how it runs
    seconds      until it ran, whatever was tried before included
    plan         every trial, None where the engine is fixed
    cached       whether an earlier start made the plan
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
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        spec: ModelSpec,
        settings: Settings,
        device: torch.device,
        network: nn.Module,
        window_bytes: int,
        native: frozenset[torch.dtype] | None = None,
    ) -> None:
        self._spec, self._settings, self._device = spec, settings, device
        self._network, self._window_bytes = network, window_bytes
        self._native = hardware.native_precisions(device) if native is None else native
        self._batch_size, self._streams = batch_size(settings, device), streams(settings, device)
        tf32.use(settings.engine, device)

    def preliminary(self) -> EngineConfig:
        """Return the configuration before anything was tried: eager, with whatever else is fixed."""
        return self._eager(precision.choose(self._settings.engine.precision, self._native).name)

    def run(self, *, tune: bool = True) -> ReadyEngine:
        """Build what is fixed, or what an earlier start found; else try everything, and keep the plan.

        Without `tune` nothing is tried that takes minutes: what nobody has found out then runs in the first way that is
        made quickly and right, with a warning.
        An engine that was asked for and fails is tried in the next wider precision, where none was asked for, and at
        last replaced by the eager one, with a warning; an error of that one passes through.
        """
        if self._settings.engine.kind != "auto":
            return self._build_fixed()
        folder = plans.choose_folder(self._settings.engine.cache_folder)
        circumstances = self.circumstances()
        plan = plans.find(folder, self._spec.name, circumstances)
        if plan is not None:
            try:
                return replace(self.build(plan.choice, *_failures(plan)), plan=plan, cached=True)
            except autotune.ENGINE_FAILURES as error:
                reason = backends.first_line(error)
                log.warning("%s: what an earlier start chose fails, trying again: %s", self._spec.identifier, reason)
        if not tune:
            return self._build_quick()
        ready = self._tune(circumstances)
        if ready.plan is not None:
            try:
                plans.save(folder, ready.plan)
            except OSError as error:
                name = self._spec.name
                log.warning("The plan for %s cannot be kept, every start tries anew: %s", name, error)
        return ready

    def build(self, config: EngineConfig, *warnings: str) -> ReadyEngine:
        """Build a configuration, with these warnings after its own.

        Raises RuntimeError, OSError or ImportError where it does not run.
        """
        module = self.module(config)
        window = self.sliding_window(module, config, config.sw_batch_size)
        built = backends.build(module, window.batch, config, self._settings.engine)
        if caution := backends.BACKENDS[config.engine].caution:
            warnings = (caution, *warnings)
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
        return SlidingWindow(
            network,
            self._spec.input.channels,
            self._spec.input.roi_size,
            batch_size,
            blending=Blending(windows.blending, windows.sigma),
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
            "engine": settings.engine.model_dump_json(exclude={"cache_folder"}),
            "engines": plans.digest_sources(MEASURED_WITH),
            "sw_batch_size": f"{settings.windows.sw_batch_size}, at most {settings.limits.sw_batch_size}",
        }
        facts |= {name: _version(name) for name in LIBRARIES}
        if self._device.type == "cpu":
            facts |= {"threads": torch.get_num_threads(), "features": " ".join(hardware.cpu().features)}
        else:
            facts |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        return {name: str(fact) for name, fact in facts.items()}

    def _build_fixed(self) -> ReadyEngine:
        settings = self._settings.engine
        backend = backends.BACKENDS[settings.kind]
        warning = precision.choose(settings.precision, self._native).warning
        warnings = [warning] if warning else []
        names = precision.list_precisions(settings.precision, self._native)
        unfit = {name: backend.explain_unfit(name, self._device, self._network) for name in names}
        # The first configuration of a precision is the most promising one.
        by_precision = {config.precision: config for config in reversed(self._candidates(self._streams))}
        configs = [by_precision[name] for name in names if unfit[name] is None]
        if not configs:
            warnings.append(f"The {settings.kind} engine {unfit[names[0]]}; running eagerly.")
            configs = [self._eager(name) for name in names]
        return self._build_first(configs, warnings)

    def _build_first(self, configs: Sequence[EngineConfig], warnings: list[str]) -> ReadyEngine:
        """Build the first configuration that runs, else eager, with a warning for each that does not."""
        for config in configs:
            try:
                return self.build(config, *warnings)
            except autotune.ENGINE_FAILURES as error:
                if config == self._eager(self._safe_precision):
                    raise
                log.warning("%s does not run in %s: %s", self._spec.identifier, config, error)
                instead = "in another precision" if config is not configs[-1] else "eagerly"
                reason = backends.first_line(error)
                warnings.append(f"The {config.engine} engine failed, so the model runs {instead}: {reason}")
        return self.build(self._eager(self._safe_precision), *warnings)

    @property
    def _safe_precision(self) -> str:
        """Precision that needs no comparison: the requested one, else that of the network as it was loaded."""
        wanted = self._settings.engine.precision
        return "fp32" if wanted == "auto" else wanted

    def _build_quick(self) -> ReadyEngine:
        """Build the first engine that is made quickly and gives the labels of the network as loaded, else eager."""
        agreement = self._agreement()
        for config in self._candidates(self._streams):
            is_quick = config.engine != "eager" and backends.slow_build_seconds(config) <= QUICK_BUILD
            if not is_quick or self._explain_skip(config) is not None:
                continue
            try:
                ready = self.build(config, UNTUNED)
                agrees = agreement.difference(ready.window) <= self._tolerance
            except autotune.ENGINE_FAILURES as error:
                log.warning("%s does not run in %s: %s", self._spec.identifier, config, backends.first_line(error))
                continue
            if agrees:
                return ready
        return self.build(self._eager(self._safe_precision), UNTUNED)

    def _agreement(self) -> LabelAgreement:
        return LabelAgreement(self._spec, self._device, lambda: self.reference(self._batch_size))

    @property
    def _tolerance(self) -> float:
        """Largest share of changed labels that passes: a precision that the operator chose is not judged by it."""
        settings = self._settings.engine
        return settings.tolerance if settings.precision == "auto" else 1.0

    def _candidates(self, streams: int) -> list[EngineConfig]:
        """List the configurations that the settings leave open, in this number of streams where that is possible."""
        settings = self._settings.engine
        names = precision.list_precisions(settings.precision, self._native)
        return [
            replace(config, streams=1 if backends.needs_single_stream(config, settings) else streams)
            for config in backends.list_configs(settings, self._device, names, self._batch_size)
        ]

    def _tune(self, circumstances: dict[str, str]) -> ReadyEngine:
        settings = self._settings.engine
        agreement = self._agreement()
        rules = autotune.Rules(settings.tune_seconds, self._tolerance)

        # The tuner holds candidates that are still compared; the others give their memory back.
        built: WeakValueDictionary[EngineConfig, ReadyEngine] = WeakValueDictionary()
        threads = StreamThreads()

        def make_candidate(config: EngineConfig) -> autotune.Candidate[ReadyEngine]:
            first = built.get(replace(config, streams=1))
            if first is None or backends.BACKENDS[config.engine].divides_cores:
                ready = built[config] = self.build(config)
            else:
                window = first.window.with_streams(config.streams)
                # With fewer cores for each call other algorithms may be chosen.
                any_batch_size = window.any_batch_size and backends.takes_any_batch_size(
                    window.network, window.batch, config.streams
                )
                window = window.with_network(
                    window.network, any_batch_size=any_batch_size, owns_scores=window.owns_scores
                )
                ready = replace(first, config=config, window=window)
            throughput = Throughput(ready.window, agreement.row, OVERLAP, agreement.decoder, threads)
            return autotune.Candidate(throughput, throughput.windows, lambda: agreement.difference(ready.window), ready)

        tuner = autotune.Tuner(make_candidate, rules, explain_skip=self._explain_skip)
        log.info("%s: trying ways to run it, for at most %g s", self._spec.identifier, settings.tune_seconds)
        try:
            candidates = self._candidates(1 if self._more_streams else self._streams)
            winner = tuner.run(candidates, self._batch_sizes, self._more_streams)
        except autotune.NothingRuns as nothing:
            log.warning("%s: %s", self._spec.identifier, nothing)
            return self.build(self._eager("fp32"), f"{nothing} It runs eagerly in fp32.")
        finally:
            threads.close()
        ready = winner.result
        plan = EnginePlan(self._spec.name, ready.config, winner.trials, tuner.seconds, circumstances)
        return replace(ready, plan=plan, seconds=tuner.seconds, warnings=(*ready.warnings, *_failures(plan)))

    def _explain_skip(self, config: EngineConfig) -> str | None:
        """Return why a configuration must not be tried; None if it may."""
        backend = backends.BACKENDS[config.engine]
        if (missing := backend.explain_missing()) is not None:
            return missing
        if (unfit := backend.explain_unfit(config.precision, self._device, self._network)) is not None:
            return f"it {unfit}"
        if config.streams > 1 and backends.needs_single_stream(config, self._settings.engine):
            return "a graph that is not frozen is made for one number of threads"
        windows = config.sw_batch_size * config.streams
        needed = self._window_bytes * backends.batch_dtype(config).itemsize // 4 * windows
        free = hardware.free_bytes(self._device)
        if free is not None and needed > MEMORY_SHARE * free:
            return f"it takes about {needed / 2**30:.1f} GiB, too much of the {free / 2**30:.1f} GiB that are free"
        return None

    @property
    def _batch_sizes(self) -> tuple[int, ...]:
        if self._settings.windows.sw_batch_size != "auto":
            return (self._batch_size,)
        most = self._settings.limits.sw_batch_size
        return autotune.list_batch_sizes(self._batch_size, most, on_cpu=self._device.type == "cpu")

    @property
    def _more_streams(self) -> tuple[int, ...]:
        """Numbers of streams to try besides one; none where the number is fixed."""
        if self._device.type != "cpu" or self._settings.engine.streams != "auto":
            return ()
        return autotune.list_stream_counts(torch.get_num_threads(), MAX_STREAMS)

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
    return min(CPU_STREAMS, settings.device.threads or hardware.usable_cores()) if wanted == "auto" else wanted


def _failures(plan: EnginePlan) -> tuple[str, ...]:
    """Return warnings about trials that failed, which an operator may want to repair."""
    failed = [trial for trial in plan.trials if trial.verdict.startswith("failed")]
    warnings = [f"The {trial.choice.engine} engine {trial.verdict}" for trial in failed]
    if any(trial.verdict.startswith(autotune.OUT_OF_TIME) for trial in plan.trials):
        warnings.append(
            "Time ran out before every way to run the model was tried; a larger engine.tune_seconds tries them again."
        )
    return tuple(warnings)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
