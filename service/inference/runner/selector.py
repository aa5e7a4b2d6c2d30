"""Selection of an engine: the one that the settings fix, the first suitable one, or the fastest of all."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from service.core.hardware import devices, host
from service.core.sections.computing import MAX_STREAMS
from service.engine import backends, precision
from service.engine.tuning import plans
from service.engine.tuning.autotune import Candidate, NoWorkingConfiguration, Tuner, Winner
from service.engine.tuning.plans import EngineConfig, EnginePlan, Outcome, Trial
from service.inference.runner.engine_builder import EngineBuilder, ReadyEngine
from service.inference.runner.label_agreement import score
from service.inference.windows.kernels import window_kernels
from service.inference.windows.sliding_window import SlidingWindow

# Maximum fraction of the free memory that the activations of one batch may take while engines are compared.
MEMORY_SHARE = 0.5
# Number of windows in the stack on which engines are compared. With fewer, blending and decoding would hardly count.
COMPARISON_WINDOWS = 4
# Libraries whose versions a plan depends on.
LIBRARIES = ("stackseg", "torch", "monai", "openvino", "numpy")

log = logging.getLogger(__name__)


class EngineSelector(EngineBuilder):
    """Selects the engine configuration for one model on one device, among those that the settings allow."""

    def initial_config(self) -> EngineConfig:
        """Return the configuration before any trial: eager, and otherwise as the settings require."""
        return self.eager_config(precision.choose(self._settings.engine.precision, self._native).name)

    def run(self, *, tune: bool = False) -> ReadyEngine:
        """Build the configuration that the settings fix, that an earlier plan chose, or that is the first suitable one.

        A new plan is saved. With `tune`, and if `engine.tune` allows it, all configurations are compared instead,
        unless there is a saved plan from such a comparison.
        If a fixed engine fails, or returns other labels than the network as loaded, it is tried in the next wider
        precision, unless the precision is fixed too. As a last resort, the network runs eagerly, with a warning. Errors
        of the eager engine are raised.
        """
        settings = self._settings.engine
        if settings.kind != "auto":
            return self._build_fixed()
        plan = plans.find(self._plan_folder, self._spec.name, self.circumstances())
        should_race = tune and settings.tune == "first-start"
        # The plan file may have been edited.
        is_known = plan is not None and plan.choice.engine in backends.BACKENDS
        if plan is not None and is_known and (plan.tuned or not should_race):
            try:
                warnings = (*self._precision_warnings, *self._warnings(plan.trials))
                return replace(self.build(plan.choice, *warnings), plan=plan, cached=True)
            except backends.ENGINE_ERRORS as error:
                reason = backends.get_first_line(error)
                log.warning("%s: the engine of the saved plan fails, choosing again: %s", self._spec.identifier, reason)
        return self.tune(settings.tune_seconds) if should_race else self._build_known()

    def tune(self, seconds: float, announce: Callable[[EngineConfig, int], object] = lambda *_: None) -> ReadyEngine:
        """Compare all configurations that the settings allow, within a time limit, and save the plan.

        announce  called before each trial with the configuration and the number of all configurations
        """
        configs = list(dict.fromkeys([*self._known_order(), *self._candidates()]))
        changes = {"sw_batch_size": self._batch_sizes, "streams": self._stream_counts}
        tuner = self._make_tuner(seconds, announce)
        log.info("%s: comparing all engine configurations, for at most %g s", self._spec.identifier, seconds)
        return self._choose(tuner, lambda: tuner.find_fastest(configs, **changes), tuned=True)

    def _build_known(self) -> ReadyEngine:
        """Build the first configuration in the known order that runs and returns the labels of the reference."""
        tuner = self._make_tuner()
        names = precision.list_precisions(self._settings.engine.precision, self._native)
        configs = [*self._known_order(), *map(self.eager_config, names)]
        return self._choose(tuner, lambda: tuner.choose_first(configs), tuned=False)

    def _choose(
        self, tuner: Tuner[ReadyEngine], choose: Callable[[], Winner[ReadyEngine]], *, tuned: bool
    ) -> ReadyEngine:
        """Return the chosen engine, or else the eager one, with its plan. The plan is saved if it can be relied on."""
        try:
            ready, trials = choose()
            # A missing compiler may be available at the next start, and so may memory if no configuration could run.
            holds, warnings = tuned or not _failures(trials), self._warnings(trials)
        except NoWorkingConfiguration as error:
            ready, trials, holds = self.build(self.eager_config("fp32")), error.trials, False
            warnings = (f"{error} The model runs eagerly in fp32.",)
        plan = EnginePlan(self._spec.name, ready.config, trials, tuner.seconds, self.circumstances(), tuned)
        if holds and self._settings.engine.kind == "auto":
            self._save_plan(plan)
        return replace(ready, plan=plan, seconds=tuner.seconds, warnings=(*self._precision_warnings, *warnings))

    @property
    def _precision_warnings(self) -> tuple[str, ...]:
        """Warning about the precision, if there is one."""
        warning = precision.choose(self._settings.engine.precision, self._native, self._faulty).warning
        return () if warning is None else (warning,)

    def _warnings(self, trials: Sequence[Trial]) -> tuple[str, ...]:
        """Return warnings about failed trials, and about labels that the configured precision changes."""
        settings, warnings = self._settings.engine, list(_failures(trials))
        chosen = {trial.choice.engine for trial in trials if trial.verdict.outcome is Outcome.CHOSEN}
        for trial in trials:
            # With `engine.precision: auto`, using the engine in another precision is not worth a warning.
            if settings.kind == trial.choice.engine not in chosen and trial.verdict.outcome is Outcome.WRONG:
                warnings.append(
                    f"The {trial.choice.engine} engine in {trial.choice.precision} is not used: {trial.verdict}"
                )
            if trial.verdict.outcome is Outcome.CHOSEN and (trial.difference or 0.0) > settings.tolerance:
                share = f"{trial.difference:.2%} of the labels of the model's sample differ from those in fp32"
                warnings.append(f"{share}. Set engine.precision to auto to avoid {settings.precision}.")
        return tuple(warnings)

    def _save_plan(self, plan: EnginePlan) -> None:
        try:
            plans.save(self._plan_folder, plan)
        except OSError as error:
            advice = "every start chooses again until engine.cache_folder is writable"
            log.warning("Cannot save the engine plan of %s; %s: %s", plan.model, advice, error)

    @property
    def _plan_folder(self) -> Path:
        return plans.resolve_folder(self._settings.engine.cache_folder)

    def circumstances(self) -> dict[str, str]:
        """Return all facts that a plan depends on, by name."""
        spec, settings = self._spec, self._settings
        facts: dict[str, object] = {
            "weights": spec.weights.sha256,
            "architecture": spec.architecture.model_dump_json() if spec.architecture else spec.network,
            "input": f"{spec.input.channels} x {'x'.join(map(str, spec.input.roi_size))}",
            "decoding": spec.decoding.model_dump_json(),
            "device": devices.device_name(self._device),
            "python": platform.python_version(),
            "engine": settings.engine.model_dump_json(exclude={"cache_folder", "tune", "tune_seconds"}),
            "engines": plans.hash_sources(Path(__file__).parents[1]),
            "sw_batch_size": f"{settings.windows.sw_batch_size}, at most {settings.limits.sw_batch_size}",
        }
        facts |= {name: _version(name) for name in LIBRARIES}
        if self._device.type == "cpu":
            facts |= {"threads": torch.get_num_threads(), "features": " ".join(host.query_cpu().features)}
            facts["kernels"] = window_kernels.ready
        else:
            facts |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        return {name: str(fact) for name, fact in facts.items()}

    def _build_fixed(self) -> ReadyEngine:
        settings = self._settings.engine
        backend = backends.BACKENDS[settings.kind]
        warnings = list[str]()
        names = precision.list_precisions(settings.precision, self._native)
        unfit = {name: backend.explain_unsupported(name, self._device, self._network) for name in names}
        configs = self._list_first_choices([name for name in names if unfit[name] is None])
        if not configs:
            warnings.append(f"The {settings.kind} engine {unfit[names[0]]}; running eagerly.")
        configs = list(dict.fromkeys([*configs, *map(self.eager_config, names)]))
        if self._device.type == "cpu" and configs[0] == self.eager_config("fp32"):
            # This is the reference of the comparison, so there is nothing to compare.
            return self.build(configs[0], *warnings, *self._precision_warnings)
        tuner = self._make_tuner(explain_skip=lambda _config: None)
        ready = self._choose(tuner, lambda: tuner.choose_first(configs), tuned=False)
        return replace(ready, plan=None, warnings=(*warnings, *ready.warnings))

    def _list_first_choices(self, precisions: Sequence[str]) -> list[EngineConfig]:
        """Return the first configuration of each precision, and the first of each that needs no compiler."""
        candidates = self._candidates()
        firsts = {config.precision: config for config in reversed(candidates)}
        plain = {config.precision: config for config in reversed(candidates) if config.compile_mode is None}
        return [chosen[name] for name in precisions for chosen in (firsts, plain) if name in chosen]

    @property
    def _tolerance(self) -> float:
        """Maximum fraction of changed labels. Precisions that the operator chose are not rejected for their labels."""
        settings = self._settings.engine
        return settings.tolerance if settings.precision == "auto" else 1.0

    def _candidates(self) -> list[EngineConfig]:
        """List the configurations of engine, precision, memory format and compile mode that the settings allow."""
        settings = self._settings.engine
        names = precision.list_precisions(settings.precision, self._native)
        return [
            replace(config, streams=1 if backends.needs_single_stream(config, settings) else self._streams)
            for config in backends.list_configs(settings, self._device, names, self._batch_size)
        ]

    def _known_order(self) -> list[EngineConfig]:
        features = host.query_cpu().features if self._device.type == "cpu" else ()
        return backends.list_default_order(self._candidates(), features)

    def _make_tuner(
        self,
        seconds: float = math.inf,
        announce: Callable[[EngineConfig, int], object] = lambda *_: None,
        explain_skip: Callable[[EngineConfig], str | None] | None = None,
    ) -> Tuner[ReadyEngine]:
        """Return a tuner that builds engines and checks their labels. `explain_skip` defaults to `_explain_skip`."""
        agreement = self.make_agreement()

        def build(config: EngineConfig) -> Candidate[ReadyEngine]:
            ready = self.build(config)
            windows = max(COMPARISON_WINDOWS // config.sw_batch_size, 1) * config.sw_batch_size
            # On a GPU, where the network is fast, decoding would dominate the measured time.
            run = agreement.segment if self._driver.is_on_host(self._device) else score
            call = _run_in_all_streams(ready.window, partial(run, ready.window, agreement.repeat_image(windows)))
            return Candidate(call, windows * config.streams, lambda: agreement.difference(ready.window), ready)

        return Tuner(
            build,
            self._tolerance,
            seconds,
            explain_skip=explain_skip or self._explain_skip,
            announce=announce,
            find_device_loss=lambda error: devices.find_device_loss(self._device, error, self._driver),
        )

    def _explain_skip(self, config: EngineConfig) -> str | None:
        """Return the reason not to try a configuration, or None."""
        backend = backends.BACKENDS[config.engine]
        if (missing := backends.explain_missing(config, self._device)) is not None:
            return missing
        if (unfit := backend.explain_unsupported(config.precision, self._device, self._network)) is not None:
            return f"it {unfit}"
        if config.streams > 1 and backends.needs_single_stream(config, self._settings.engine):
            return "a graph that is not frozen supports only one number of threads"
        windows = config.sw_batch_size * config.streams
        needed = self._window_bytes * backends.get_batch_dtype(config).itemsize // 4 * windows
        free = self._driver.free_bytes(self._device)
        if free is not None and needed > MEMORY_SHARE * free:
            return f"it needs about {needed / 2**30:.1f} GiB, too much of the {free / 2**30:.1f} GiB of free memory"
        return None

    @property
    def _batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes to try: powers of two, at most 4 on a CPU; or the configured size only."""
        if self._settings.windows.sw_batch_size != "auto":
            return (self._batch_size,)
        limit = self._settings.limits.sw_batch_size
        return powers_of_two(min(limit, 4) if self._device.type == "cpu" else limit)

    @property
    def _stream_counts(self) -> tuple[int, ...]:
        """Numbers of streams to try: powers of two up to the number of cores; or the configured number only."""
        if self._device.type != "cpu" or self._settings.engine.streams != "auto":
            return (self._streams,)
        return powers_of_two(min(torch.get_num_threads(), MAX_STREAMS))


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Return the powers of two up to `limit` in ascending order."""
    return tuple(2**power for power in range(limit.bit_length()))


def _run_in_all_streams(window: SlidingWindow, run: Callable[..., object]) -> Callable[[], object]:
    """Return a function that calls `run` for all streams concurrently, like requests that share a device."""
    if window.streams == 1:
        # Run in the calling thread, because CUDA graphs belong to the thread that recorded them.
        return run
    cores = max(torch.get_num_threads() // window.streams, 1)
    # The threads end when the candidate, which holds this function, is released.
    threads = ThreadPoolExecutor(window.streams, "stream", partial(devices.set_torch_threads, cores))
    return lambda: list(threads.map(run, range(window.streams)))


def _failures(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return warnings about failed trials, which the operator may be able to fix."""
    failed = [trial for trial in trials if trial.verdict.outcome is Outcome.FAILED]
    return tuple(f"The {trial.choice.engine} engine {trial.verdict}" for trial in failed)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
