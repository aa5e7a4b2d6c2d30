"""Runner of one model on one device, which loads the model, warms up its engine, and reports on the engine."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from service.core.buffers import make_allocator
from service.core.config import Settings
from service.core.errors import BadParameter, DeviceLost, InternalError
from service.core.hardware import devices, host
from service.core.hardware.devices import Driver, is_out_of_memory
from service.core.quantities import Size
from service.core.telemetry import step
from service.core.types import Extent, Options, OutputKind, Volume
from service.engine import backends
from service.engine.compile import torch_compile
from service.inference.cuda.placement import DevicePlacement
from service.inference.diameter.measurement import DiameterCache
from service.inference.preprocessing.crop import Crop, crop_zeros
from service.inference.preprocessing.score_resampling import DecoderFactory
from service.inference.runner.estimator import Estimator, compute_window_scale, replace_window_size
from service.inference.runner.memory_errors import check_memory, translate_errors
from service.inference.runner.memory_estimate import measure_activations
from service.inference.runner.placement import HostPlacement, Placement
from service.inference.runner.scoring import ScoreComputer
from service.inference.runner.selector import EngineSelector
from service.inference.types import EngineReport, Plan, ResourceEstimate
from service.inference.windows.kernels import window_kernels
from service.models.loader import load_network
from service.models.network import Network, count_weight_bytes
from service.models.spec_parts import Flows

if TYPE_CHECKING:
    from service.engine.tuning.plans import EngineConfig, EnginePlan
    from service.inference.preprocessing.normalize import NormalizedImage
    from service.inference.preprocessing.resample import ResampledImage
    from service.inference.runner.callbacks import ComputeSlabs, RunWindows
    from service.inference.runner.engine_builder import ReadyEngine
    from service.inference.windows.sliding_window import Image, ScoreWindows, SlidingWindow
    from service.models.spec import ModelSpec

log = logging.getLogger(__name__)


class ModelRunner:
    """Loads a model once and runs it. After `warm_up`, several threads may segment with it concurrently.

    placement       where the windows and scores of requests are stored
    estimator       plans requests
    score_computer  computes the scores of images
    diameter_cache  cache of the diameter estimates for earlier stacks
    allocate        allocates the arrays of results

    The network is called by the thread that runs `warm_up`, and by the threads that run its `SlidingWindow`, at most
    one per stream. On CUDA, this must always be the same thread, because Inductor binds captured graphs to a thread.
    Raises ConfigError if the device is not available, and BrokenModel if the model cannot be loaded.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, driver: Driver = devices) -> None:
        self.spec, self.device = spec, devices.choose_device(settings.device.name)
        self._settings, self._driver = settings, driver
        uses_host_memory = driver.uses_host_memory(self.device)
        self.placement: Placement = HostPlacement() if uses_host_memory else DevicePlacement(self.device, driver)
        self.allocate = make_allocator(settings.server.scratch_folder)
        if self.device.type == "cpu":
            devices.set_torch_threads(settings.device.threads)
        if settings.engine.cache_folder is not None:
            torch_compile.set_cache_folder(settings.engine.cache_folder)
        with step("reading weights"):
            network = load_network(spec, self._measure_first_pass)
        # The loaded weights are kept on the host, because scores may have to be recomputed in float32.
        self._loaded_bytes = count_weight_bytes(network) if uses_host_memory else 0
        self._selector = EngineSelector(spec, settings, self.device, network, self._window_bytes, driver=driver)
        self._switch_engine(None)
        self.diameter_cache = DiameterCache(spec)
        # Runner for the most recently requested window size other than the default, keyed by the window size and the
        # number of windows per call.
        self._runners_by_window: dict[tuple[Size, int], ModelRunner] = {}
        self._runners_lock = threading.Lock()

    def _measure_first_pass(self, network: nn.Module, window: Tensor) -> Tensor:
        """Run the network for the first time, which is slow, and measure its activations in the same forward pass."""
        scores, self._window_bytes = measure_activations(network, window)
        return scores

    def crop(self, volume: Volume) -> Crop | None:
        """Return the part of a volume to segment, or None to segment all of it."""
        return crop_zeros(volume) if self.spec.input.crop_zeros else None

    def make_decoder_factory(self, volume: Extent, spec: ModelSpec, size: Size, output: OutputKind) -> DecoderFactory:
        """Return the factory of decoders for scores on a grid of `size` (Z, Y, X).

        `spec` includes the post-processing options of the request.
        """
        threads = self._settings.device.threads or host.CORE_COUNT
        return DecoderFactory(volume, spec, size, output, self.allocate, threads=threads)

    def warm_up(self, *, tune: bool = False) -> None:
        """Choose the engine, and run it with its fixed batch shape until its run time is stable.

        If `tune` is set and `engine.tune` allows it, all configurations are compared first. This takes several minutes.
        """
        self._switch_engine(self._selector.select(tune=tune))
        for warning in self.report().warnings:
            log.warning("%s: %s", self.spec.identifier, warning)

    def tune(
        self, time_limit_seconds: float, announce: Callable[[EngineConfig, int], object] = lambda *_: None
    ) -> EnginePlan:
        """Compare all configurations as `EngineSelector.tune` does, use the fastest, and return the plan."""
        engine = self._selector.tune(time_limit_seconds, announce)
        self._switch_engine(engine)
        if engine.plan is None:
            raise InternalError("The comparison of engines returned no plan.")
        return engine.plan

    def _switch_engine(self, engine: ReadyEngine | None) -> None:
        """Use this engine from now on. With None, run eagerly until an engine is ready."""
        self._engine = engine
        self._config = config = self._selector.get_initial_config() if engine is None else engine.config
        self.estimator = Estimator(
            self.spec,
            self._settings,
            config.sw_batch_size,
            window_bytes=self._window_bytes * backends.get_batch_dtype(config).itemsize // 4,
            uses_host_memory=self.placement.uses_host_memory,
            device_memory_bytes=self.placement.total_bytes,
            streams=config.streams,
            score_bytes=None if engine is None else engine.score_bytes,
            accepts_partial_batches=None
            if engine is None or config.engine == "eager"
            else engine.window.accepts_partial_batches,
        )
        self.score_computer = ScoreComputer(self._selector, config, engine, self.estimator.fit_batch_size)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for weights and batch buffers, including those for another window size."""
        engines = [runner._engine for runner in (self, *self._runners_by_window.values())]
        return self._loaded_bytes * (self._engine is not None) + sum(
            count_engine_bytes(engine) for engine in engines if engine
        )

    def instrument(self, wrap: Callable[[Network], Network]) -> None:
        """Replace the warm network with `wrap(network)` in all later calls, to measure the network."""
        if self._engine is not None:
            window = self._engine.window
            wrapped_window = window.with_network(
                wrap(window.network),
                accepts_partial_batches=window.accepts_partial_batches,
                owns_scores=window.owns_scores,
            )
            self._switch_engine(replace(self._engine, window=wrapped_window))

    @contextmanager
    def inference_context(self, estimate: ResourceEstimate) -> Iterator[None]:
        """Return a context manager that disables gradients, and translates errors to OutOfMemory and DeviceLost."""
        with torch.inference_mode(), translate_errors(estimate, self.device, self._driver):
            yield

    def check_memory(self, estimate: ResourceEstimate) -> None:
        """Raise OutOfMemory if the host or the device has less free memory than estimated."""
        check_memory(estimate, host.query_available_memory(), self.placement.query_free_bytes())

    def find_device_loss(self, error: BaseException) -> DeviceLost | None:
        """Return the error to raise if `error` means that the device was lost, or None otherwise."""
        return devices.find_device_loss(self.device, error, self._driver)

    def place_image(self, image: NormalizedImage | ResampledImage) -> Image:
        """Return an image that reads its windows into device memory.

        MONAI's inferer, and networks that are applied to planes of three orientations, need a tensor on the device.
        """
        if self._settings.windows.inferer == "monai" or isinstance(self.spec.decoding, Flows):
            return image.to_tensor().to(self.device)
        return self.placement.place_image(image, self.spec.input.roi_size[0])

    def choose_inferer(self, run: RunWindows) -> RunWindows:
        """Return the function that yields the scores of a request: `run`, or another function that calls `run`."""
        if isinstance(self.spec.decoding, Flows):
            module = import_module("service.inference.windows.orthogonal_planes")
            planes: RunWindows = module.OrthogonalPlanes(run, self._resize_window, self.spec.tiling)
            return planes
        if self._settings.windows.inferer == "own":
            return run
        # Import this module only when needed, because importing MONAI takes several seconds.
        module = import_module("service.inference.windows.monai_inferer")
        inferer: RunWindows = module.MonaiInferer(self._settings.windows, run)
        return inferer

    def _resize_window(self, window: SlidingWindow, size: Size) -> SlidingWindow:
        """Return `window` for another window size. Engines are built for one size, so the network then runs eagerly."""
        if size == tuple(window.batch.shape[2:]):
            return window
        is_built = self._engine is not None and window.network is self._engine.window.network
        return window.with_size(size, self.score_computer.module if is_built else window.network)

    def make_window_scorer(self, plan: Plan, compute_slabs: ComputeSlabs) -> ScoreWindows:
        """Return a function that computes the scores of a few windows of a request. Each window is scored once."""
        return partial(self.score_computer.score_windows, plan=plan, run=compute_slabs)

    def with_window(self, options: Options, estimate: ResourceEstimate) -> ModelRunner:
        """Return a runner for the window size that a request specifies. Only the latest runner is cached.

        Raises BadParameter if the network does not support the window size, OutOfMemory if there is not enough memory,
        and DeviceLost if the device has failed.
        """
        spec = replace_window_size(self.spec, options.roi_size)
        if spec is self.spec:
            return self
        batch_size = options.sw_batch_size or self._config.sw_batch_size
        key = (spec.input.roi_size, batch_size)
        with self._runners_lock, self.inference_context(estimate):
            if key not in self._runners_by_window:
                self.check_memory(estimate)
                self._runners_by_window.clear()
                self._runners_by_window[key] = self._build_with_window(spec, batch_size)
            return self._runners_by_window[key]

    def _build_with_window(self, spec: ModelSpec, batch_size: int) -> ModelRunner:
        new_runner = copy.copy(self)
        new_runner.spec, new_runner.diameter_cache = spec, DiameterCache(spec)
        new_runner._window_bytes = int(self._window_bytes * compute_window_scale(self.spec, spec))
        new_runner._selector = self._selector.with_window(spec, new_runner._window_bytes)
        try:
            new_runner._switch_engine(
                None if self._engine is None else new_runner._selector.rebuild(self._config, batch_size)
            )
        except backends.ENGINE_ERRORS as error:
            if is_out_of_memory(error) or self.find_device_loss(error) is not None:
                raise
            size, reason = "x".join(map(str, spec.input.roi_size)), backends.get_first_line(error)
            raise BadParameter(
                f"The model {spec.name} does not run with the window size {size}: {reason}", parameter="roi_size"
            ) from error
        return new_runner

    def list_batch_notes(self, options: Options) -> tuple[str, ...]:
        """Return a note if the network was built for a batch size that differs from the requested one."""
        requested_size = options.sw_batch_size
        if requested_size is None or (batch_size := self.estimator.fit_batch_size(requested_size)) == requested_size:
            return ()
        return (f"The {self._config.engine} engine processes {batch_size} windows per batch, not {requested_size}.",)

    def describe_engine(self, *, is_recomputed: bool = False) -> str:
        """Return the name and precision of the engine that computed or, if `is_recomputed`, recomputed the scores."""
        return f"{self._config.engine} {'fp32' if is_recomputed else self._config.precision}"

    @property
    def _kernel_warnings(self) -> tuple[str, ...]:
        if self.device.type != "cpu" or window_kernels.is_available:
            return ()
        return (f"Segmentation takes at least twice as long without the C++ kernels: {window_kernels.problem}.",)

    def report(self) -> EngineReport:
        """Describe the current engine. Before `warm_up`, describe the configuration that is used until then."""
        engine, config, windows = self._engine, self._config, self._settings.windows
        plan = None if engine is None else engine.plan
        return EngineReport(
            device=str(self.device),
            device_name=devices.get_device_name(self.device),
            engine=config.engine if engine else "starting",
            precision=config.precision,
            memory_format=config.memory_format,
            compile_mode=config.compile_mode,
            roi_size=self.spec.input.roi_size,
            sw_batch_size=config.sw_batch_size,
            overlap=windows.overlap,
            blending=windows.blending,
            warm_up_seconds=engine.seconds if engine else 0.0,
            warnings=(*self._kernel_warnings, *(engine.warnings if engine else ())),
            streams=config.streams,
            planned="fixed" if plan is None else plan.selection_method,
            cached=engine is not None and engine.is_cached,
            trials=plan.trials if plan else (),
        )


def count_engine_bytes(engine: ReadyEngine) -> int:
    """Return the bytes of the weights and batch buffers of an engine."""
    batches = sum(batch.untyped_storage().nbytes() for batch in engine.window.batches)
    return count_weight_bytes(engine.module) + engine.nbytes + batches
