"""Selection of an engine: the one that the settings fix, the first suitable one, or the fastest one."""

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
from service.inference.runner.label_agreement import compute_and_discard_scores
from service.inference.windows.kernels import window_kernels
from service.inference.windows.sliding_window import SlidingWindow

# Maximum fraction of the free memory that the activations of concurrent batches may need while engines are compared.
MAX_ACTIVATION_FRACTION = 0.5
# Number of windows in the stack on which engines are compared. With fewer windows, the time for blending and decoding
# would be negligible.
COMPARISON_WINDOWS = 4
# Libraries whose versions a plan depends on.
LIBRARIES = ("stackseg", "torch", "monai", "openvino", "numpy")

log = logging.getLogger(__name__)


class EngineSelector(EngineBuilder):
    """Selects the engine configuration for one model on one device from those that the settings allow."""

    def get_initial_config(self) -> EngineConfig:
        """Return the configuration before any trial: the eager engine in the precision that the settings require."""
        return self.make_eager_config(
            precision.choose_precision(self._settings.engine.precision, self._native_dtypes).name
        )

    def select(self, *, tune: bool = False) -> ReadyEngine:
        """Build the fixed configuration, the one chosen by the saved plan, or the first suitable one.

        If a new plan is made, it is saved. If `tune` is set and `engine.tune` allows it, all configurations are
        compared instead, unless there is a saved plan from such a comparison.

        If a fixed engine fails, or if its labels differ from those of the network as loaded, the next higher precision
        is tried, unless the precision is fixed too. As a last resort, the network runs eagerly, which causes a warning.
        Errors from the eager engine are raised.
        """
        settings = self._settings.engine
        if settings.kind != "auto":
            return self._build_fixed()
        plan = plans.find(self._plan_folder, self._spec.name, self.collect_plan_dependencies())
        should_compare_all = tune and settings.tune == "first-start"
        # The plan file may have been edited.
        is_known = plan is not None and plan.choice.engine in backends.BACKENDS
        if plan is not None and is_known and (plan.tuned or not should_compare_all):
            try:
                warnings = (*self._precision_warnings, *self._list_warnings(plan.trials))
                return replace(self.build(plan.choice, *warnings), plan=plan, is_cached=True)
            except backends.ENGINE_ERRORS as error:
                reason = backends.get_first_line(error)
                log.warning(
                    "%s: choosing another engine, because the saved one fails: %s", self._spec.identifier, reason
                )
        return self.tune(settings.tune_seconds) if should_compare_all else self._build_first_known()

    def tune(
        self, time_limit_seconds: float, announce: Callable[[EngineConfig, int], object] = lambda *_: None
    ) -> ReadyEngine:
        """Compare all configurations that the settings allow within a time limit, and save the plan.

        announce  called before each trial with the configuration and the total number of configurations
        """
        configs = list(dict.fromkeys([*self._list_known_order(), *self._list_candidates()]))
        values_to_try = {"sw_batch_size": self._batch_sizes, "streams": self._stream_counts}
        tuner = self._make_tuner(time_limit_seconds, announce)
        log.info("%s: comparing all engine configurations, for at most %g s", self._spec.identifier, time_limit_seconds)
        return self._choose(tuner, lambda: tuner.find_fastest(configs, **values_to_try), is_tuned=True)

    def _build_first_known(self) -> ReadyEngine:
        """Build the first configuration in the known order that runs and returns the labels of the reference."""
        tuner = self._make_tuner()
        precision_names = precision.list_precisions(self._settings.engine.precision, self._native_dtypes)
        configs = [*self._list_known_order(), *map(self.make_eager_config, precision_names)]
        return self._choose(tuner, lambda: tuner.choose_first(configs), is_tuned=False)

    def _choose(
        self, tuner: Tuner[ReadyEngine], choose: Callable[[], Winner[ReadyEngine]], *, is_tuned: bool
    ) -> ReadyEngine:
        """Return the chosen engine with its plan, or the eager engine. Plans without temporary failures are saved."""
        try:
            engine, trials = choose()
            # Do not save a plan with failures, because the missing compiler or memory may be available next time.
            should_save, warnings = is_tuned or not _list_failures(trials), self._list_warnings(trials)
        except NoWorkingConfiguration as error:
            engine, trials, should_save = self.build(self.make_eager_config("fp32")), error.trials, False
            warnings = (f"{error} The model runs eagerly in fp32.",)
        plan = EnginePlan(
            self._spec.name, engine.config, trials, tuner.elapsed_seconds, self.collect_plan_dependencies(), is_tuned
        )
        if should_save and self._settings.engine.kind == "auto":
            self._save_plan(plan)
        return replace(
            engine, plan=plan, seconds=tuner.elapsed_seconds, warnings=(*self._precision_warnings, *warnings)
        )

    @property
    def _precision_warnings(self) -> tuple[str, ...]:
        """Warning about the precision, if there is one."""
        warning = precision.choose_precision(
            self._settings.engine.precision, self._native_dtypes, self._faulty_dtypes
        ).warning
        return () if warning is None else (warning,)

    def _list_warnings(self, trials: Sequence[Trial]) -> tuple[str, ...]:
        """Return warnings about failed trials, and about labels that differ because of the configured precision."""
        settings, warnings = self._settings.engine, list(_list_failures(trials))
        chosen_engines = {trial.choice.engine for trial in trials if trial.verdict.outcome is Outcome.CHOSEN}
        for trial in trials:
            # With `engine.precision: auto`, using the engine in a different precision does not need a warning.
            if settings.kind == trial.choice.engine not in chosen_engines and trial.verdict.outcome is Outcome.WRONG:
                warnings.append(
                    f"The {trial.choice.engine} engine in {trial.choice.precision} is not used: {trial.verdict}"
                )
            if trial.verdict.outcome is Outcome.CHOSEN and (trial.difference or 0.0) > settings.tolerance:
                changed_labels = f"{trial.difference:.2%} of the labels of the model's sample differ from those in fp32"
                warnings.append(f"{changed_labels}. Set engine.precision to auto to avoid {settings.precision}.")
        return tuple(warnings)

    def _save_plan(self, plan: EnginePlan) -> None:
        try:
            plans.save(self._plan_folder, plan)
        except OSError as error:
            advice = "each start chooses an engine again until engine.cache_folder is writable"
            log.warning("Cannot save the engine plan of %s; %s: %s", plan.model, advice, error)

    @property
    def _plan_folder(self) -> Path:
        return plans.resolve_folder(self._settings.engine.cache_folder)

    def collect_plan_dependencies(self) -> dict[str, str]:
        """Return everything that a plan depends on, such as the device and library versions, keyed by name."""
        spec, settings = self._spec, self._settings
        dependencies: dict[str, object] = {
            "weights": spec.weights.sha256,
            "architecture": spec.architecture.model_dump_json() if spec.architecture else spec.network_name,
            "input": f"{spec.input.channels} x {'x'.join(map(str, spec.input.roi_size))}",
            "decoding": spec.decoding.model_dump_json(),
            "device": devices.get_device_name(self._device),
            "python": platform.python_version(),
            "engine": settings.engine.model_dump_json(exclude={"cache_folder", "tune", "tune_seconds"}),
            "engines": plans.hash_sources(Path(__file__).parents[1]),
            "sw_batch_size": f"{settings.windows.sw_batch_size}, at most {settings.limits.sw_batch_size}",
        }
        dependencies |= {name: _get_version(name) for name in LIBRARIES}
        if self._device.type == "cpu":
            dependencies |= {"threads": torch.get_num_threads(), "features": " ".join(host.query_host().features)}
            dependencies["kernels"] = window_kernels.is_available
        else:
            dependencies |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        return {name: str(value) for name, value in dependencies.items()}

    def _build_fixed(self) -> ReadyEngine:
        settings = self._settings.engine
        backend = backends.BACKENDS[settings.kind]
        warnings = list[str]()
        precision_names = precision.list_precisions(settings.precision, self._native_dtypes)
        reasons = {name: backend.explain_unsupported(name, self._device, self._network) for name in precision_names}
        configs = self._list_first_choices([name for name in precision_names if reasons[name] is None])
        if not configs:
            warnings.append(f"The {settings.kind} engine {reasons[precision_names[0]]}; running eagerly.")
        configs = list(dict.fromkeys([*configs, *map(self.make_eager_config, precision_names)]))
        if self._device.type == "cpu" and configs[0] == self.make_eager_config("fp32"):
            # This configuration is the reference itself, so there is nothing to compare.
            return self.build(configs[0], *warnings, *self._precision_warnings)
        tuner = self._make_tuner(explain_skip=lambda _config: None)
        engine = self._choose(tuner, lambda: tuner.choose_first(configs), is_tuned=False)
        return replace(engine, plan=None, warnings=(*warnings, *engine.warnings))

    def _list_first_choices(self, precisions: Sequence[str]) -> list[EngineConfig]:
        """Return, for each precision, the first configuration and the first one that needs no compiler."""
        candidates = self._list_candidates()
        first_configs = {config.precision: config for config in reversed(candidates)}
        uncompiled_configs = {
            config.precision: config for config in reversed(candidates) if config.compile_mode is None
        }
        return [
            config_by_precision[precision_name]
            for precision_name in precisions
            for config_by_precision in (first_configs, uncompiled_configs)
            if precision_name in config_by_precision
        ]

    @property
    def _tolerance(self) -> float:
        """Maximum fraction of changed labels. A precision that the operator set is never rejected for its labels."""
        settings = self._settings.engine
        return settings.tolerance if settings.precision == "auto" else 1.0

    def _list_candidates(self) -> list[EngineConfig]:
        """List the combinations of engine, precision, memory format and compile mode that the settings allow."""
        settings = self._settings.engine
        precision_names = precision.list_precisions(settings.precision, self._native_dtypes)
        return [
            replace(config, streams=1 if backends.needs_single_stream(config, settings) else self._streams)
            for config in backends.list_configs(settings, self._device, precision_names, self._batch_size)
        ]

    def _list_known_order(self) -> list[EngineConfig]:
        features = host.query_host().features if self._device.type == "cpu" else ()
        return backends.list_quick_configs(self._list_candidates(), features)

    def _make_tuner(
        self,
        time_limit_seconds: float = math.inf,
        announce: Callable[[EngineConfig, int], object] = lambda *_: None,
        explain_skip: Callable[[EngineConfig], str | None] | None = None,
    ) -> Tuner[ReadyEngine]:
        """Return a tuner that builds engines and checks their labels. `explain_skip` defaults to `_explain_skip`."""
        agreement = self.make_label_agreement()

        def build(config: EngineConfig) -> Candidate[ReadyEngine]:
            engine = self.build(config)
            num_windows = max(COMPARISON_WINDOWS // config.sw_batch_size, 1) * config.sw_batch_size
            # On a GPU, the network is so fast that decoding would dominate the measured time.
            run = agreement.segment if self._driver.uses_host_memory(self._device) else compute_and_discard_scores
            call = _run_in_all_streams(engine.window, partial(run, engine.window, agreement.repeat_image(num_windows)))
            return Candidate(
                call, num_windows * config.streams, lambda: agreement.compute_difference(engine.window), engine
            )

        return Tuner(
            build,
            self._tolerance,
            time_limit_seconds,
            explain_skip=explain_skip or self._explain_skip,
            announce=announce,
            find_device_loss=lambda error: devices.find_device_loss(self._device, error, self._driver),
        )

    def _explain_skip(self, config: EngineConfig) -> str | None:
        """Return the reason not to try a configuration, or None."""
        backend = backends.BACKENDS[config.engine]
        if (missing_requirement := backends.explain_unavailability(config, self._device)) is not None:
            return missing_requirement
        if (reason := backend.explain_unsupported(config.precision, self._device, self._network)) is not None:
            return f"the engine {reason}"
        if config.streams > 1 and backends.needs_single_stream(config, self._settings.engine):
            return "a graph that is not frozen supports only a single stream"
        num_windows = config.sw_batch_size * config.streams
        needed_bytes = self._window_bytes * backends.get_batch_dtype(config).itemsize // 4 * num_windows
        free_bytes = self._driver.query_free_bytes(self._device)
        if free_bytes is not None and needed_bytes > MAX_ACTIVATION_FRACTION * free_bytes:
            return (
                f"the activations need about {needed_bytes / 2**30:.1f} GiB, which is too much for the"
                f" {free_bytes / 2**30:.1f} GiB of free memory"
            )
        return None

    @property
    def _batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes to try: only the configured size, or powers of two, which are at most 4 on a CPU."""
        if self._settings.windows.sw_batch_size != "auto":
            return (self._batch_size,)
        limit = self._settings.limits.sw_batch_size
        return list_powers_of_two(min(limit, 4) if self._device.type == "cpu" else limit)

    @property
    def _stream_counts(self) -> tuple[int, ...]:
        """Numbers of streams to try: only the configured number, or powers of two up to the number of cores."""
        if self._device.type != "cpu" or self._settings.engine.streams != "auto":
            return (self._streams,)
        return list_powers_of_two(min(torch.get_num_threads(), MAX_STREAMS))


def list_powers_of_two(limit: int) -> tuple[int, ...]:
    """Return the powers of two up to `limit` in ascending order."""
    return tuple(2**power for power in range(limit.bit_length()))


def _run_in_all_streams(window: SlidingWindow, run: Callable[..., object]) -> Callable[[], object]:
    """Return a function that calls `run` for all streams concurrently, like requests that share the device."""
    if window.streams == 1:
        # Run in the calling thread, because CUDA graphs belong to the thread that captured them.
        return run
    cores_per_stream = max(torch.get_num_threads() // window.streams, 1)
    # The threads end when the candidate, which holds this function, is released.
    pool = ThreadPoolExecutor(window.streams, "stream", partial(devices.set_torch_threads, cores_per_stream))
    return lambda: list(pool.map(run, range(window.streams)))


def _list_failures(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return warnings about failed trials, which the operator may be able to fix."""
    failed_trials = [trial for trial in trials if trial.verdict.outcome is Outcome.FAILED]
    return tuple(f"The {trial.choice.engine} engine {trial.verdict}" for trial in failed_trials)


def _get_version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
