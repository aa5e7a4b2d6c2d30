"""One model on one device: loading, warming up and reporting on its engine."""

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
from service.core.types import Options
from service.engine import backends
from service.engine.compile import torch_compile
from service.inference.cuda.placement import DevicePlacement
from service.inference.diameter.cache import DiameterCache
from service.inference.runner.estimator import Estimator, choose_window, window_scale
from service.inference.runner.memory_errors import check_memory, translate_errors
from service.inference.runner.memory_estimate import measure_activations
from service.inference.runner.placement import HostPlacement, Placement
from service.inference.runner.scoring import ScoreComputer
from service.inference.runner.selector import EngineSelector
from service.inference.types import EngineReport, Estimate, Plan
from service.inference.windows.kernels import window_kernels
from service.models.loader import load_network
from service.models.network import Network, count_weight_bytes

if TYPE_CHECKING:
    from service.engine.tuning.plans import EngineConfig, EnginePlan
    from service.inference.preprocessing.normalize import NormalizedImage
    from service.inference.preprocessing.resample import ResampledImage
    from service.inference.runner.callbacks import ComputeSlabs, RunWindows
    from service.inference.runner.engine_builder import ReadyEngine
    from service.inference.windows.sliding_window import Image, ScoreWindows
    from service.models.spec import ModelSpec

log = logging.getLogger(__name__)


class ModelRunner:
    """Loads a model once and runs it. After `warm_up`, several threads may segment with it concurrently.

    placement  memory of its windows and scores
    estimator  plans requests
    scores     computes the scores of images
    diameters  cached diameter estimates of earlier stacks
    allocate   allocates the arrays of results

    The network is called by the thread that runs `warm_up`, and by the threads that run its `SlidingWindow`, at most
    one per stream. On CUDA, this must always be the same thread, because inductor binds recorded graphs to it.
    Raises ConfigError if the device is not available, and BrokenModel if the model cannot be loaded.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, driver: Driver = devices) -> None:
        self.spec, self.device = spec, devices.choose_device(settings.device.name)
        self._settings, self._driver = settings, driver
        on_host = driver.is_on_host(self.device)
        self.placement: Placement = HostPlacement() if on_host else DevicePlacement(self.device, driver)
        self.allocate = make_allocator(settings.server.scratch_folder)
        if self.device.type == "cpu":
            devices.set_torch_threads(settings.device.threads)
        if settings.engine.cache_folder is not None:
            torch_compile.set_cache_folder(settings.engine.cache_folder)
        with step("reading weights"):
            network = load_network(spec, self._run_first)
        # The loaded weights stay on the host, in case scores have to be recomputed in float32.
        self._loaded_bytes = count_weight_bytes(network) if on_host else 0
        self._selector = EngineSelector(spec, settings, self.device, network, self._window_bytes, driver=driver)
        self._use(None)
        self.diameters = DiameterCache()
        # Runner for the latest other window size, by its edge lengths and the windows per call.
        self._other_windows: dict[tuple[Size, int], ModelRunner] = {}
        self._other_lock = threading.Lock()

    def _run_first(self, network: nn.Module, window: Tensor) -> Tensor:
        """Run the network for the first time, which is slow, and measure its activations in the same forward pass."""
        scores, self._window_bytes = measure_activations(network, window)
        return scores

    def warm_up(self, *, tune: bool = False) -> None:
        """Choose the engine, and run it with its only batch shape until its run time is stable.

        With `tune`, and if `engine.tune` allows it, all configurations are compared first, which takes minutes.
        """
        self._use(self._selector.run(tune=tune))
        for warning in self.report().warnings:
            log.warning("%s: %s", self.spec.identifier, warning)

    def tune(self, seconds: float, announce: Callable[[EngineConfig, int], object] = lambda *_: None) -> EnginePlan:
        """Compare all configurations as `EngineSelector.tune` does, use the fastest, and return the plan."""
        ready = self._selector.tune(seconds, announce)
        self._use(ready)
        if ready.plan is None:
            raise InternalError("The comparison of engines returned no plan.")
        return ready.plan

    def _use(self, ready: ReadyEngine | None) -> None:
        """Use a network that is ready; None: run eagerly until there is one."""
        self._ready = ready
        self._config = config = self._selector.initial_config() if ready is None else ready.config
        self.estimator = Estimator(
            self.spec,
            self._settings,
            config.sw_batch_size,
            window_bytes=self._window_bytes * backends.get_batch_dtype(config).itemsize // 4,
            on_host=self.placement.on_host,
            device_memory=self.placement.total_bytes,
            streams=config.streams,
            score_bytes=None if ready is None else ready.score_bytes,
            accepts_any_batch_size=None
            if ready is None or config.engine == "eager"
            else ready.window.accepts_any_batch_size,
        )
        self.scores = ScoreComputer(self._selector, config, ready, self.estimator.fit_batch)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for weights in every form and batch buffers, including those of the other window."""
        engines = [each._ready for each in (self, *self._other_windows.values())]
        return self._loaded_bytes * (self._ready is not None) + sum(ready_bytes(ready) for ready in engines if ready)

    def instrument(self, wrap: Callable[[Network], Network]) -> None:
        """Replace the warm network by `wrap(network)` in all later calls, to measure it."""
        if self._ready is not None:
            window = self._ready.window
            wrapped = window.with_network(
                wrap(window.network),
                accepts_any_batch_size=window.accepts_any_batch_size,
                owns_scores=window.owns_scores,
            )
            self._use(replace(self._ready, window=wrapped))

    @contextmanager
    def inference_context(self, needed: Estimate) -> Iterator[None]:
        """Return a context that disables gradients, and translates errors to OutOfMemory and DeviceLost."""
        with torch.inference_mode(), translate_errors(needed, self.device, self._driver):
            yield

    def check_memory(self, needed: Estimate) -> None:
        """Raise OutOfMemory if the host or the device has less free memory than needed."""
        check_memory(needed, host.available_memory(), self.placement.free_bytes())

    def find_device_loss(self, error: BaseException) -> DeviceLost | None:
        """Return the error to raise if `error` means that the device was lost; otherwise None."""
        return devices.find_device_loss(self.device, error, self._driver)

    def place_image(self, image: NormalizedImage | ResampledImage) -> Image:
        """Return an image whose windows are read on the device. For MONAI's inferer it is a single tensor there."""
        if self._settings.windows.inferer == "monai":
            return image.tensor().to(self.device)
        return self.placement.place_image(image, self.spec.input.roi_size[0])

    def choose_inferer(self, run: RunWindows) -> RunWindows:
        """Return the function that computes the windows of a request: `run`, or MONAI's inferer on top of it."""
        if self._settings.windows.inferer == "own":
            return run
        # Import it only when needed, because importing MONAI takes seconds.
        module = import_module("service.inference.windows.monai_inferer")
        inferer: RunWindows = module.MonaiInferer(self._settings.windows, run)
        return inferer

    def score_windows(self, plan: Plan, compute: ComputeSlabs) -> ScoreWindows:
        """Return a function that computes the scores of a few windows of a request, each scored once."""
        return partial(self.scores.score_windows, plan=plan, run=compute)

    def with_window(self, options: Options, needed: Estimate) -> ModelRunner:
        """Return a runner for the window size that a request asks for. Only the latest one is cached.

        Raises OutOfMemory, DeviceLost, and BadParameter if the network does not support the window size.
        """
        spec = choose_window(self.spec, options.roi_size)
        if spec is self.spec:
            return self
        batch_size = options.sw_batch_size or self._config.sw_batch_size
        key = (spec.input.roi_size, batch_size)
        with self._other_lock, self.inference_context(needed):
            if key not in self._other_windows:
                self.check_memory(needed)
                self._other_windows.clear()
                self._other_windows[key] = self._build_with_window(spec, batch_size)
            return self._other_windows[key]

    def _build_with_window(self, spec: ModelSpec, batch_size: int) -> ModelRunner:
        other = copy.copy(self)
        other.spec, other.diameters = spec, DiameterCache()
        other._window_bytes = int(self._window_bytes * window_scale(self.spec, spec))
        other._selector = self._selector.with_window(spec, other._window_bytes)
        try:
            other._use(None if self._ready is None else other._selector.rebuild(self._config, batch_size))
        except backends.ENGINE_ERRORS as error:
            if is_out_of_memory(error) or self.find_device_loss(error) is not None:
                raise
            size, reason = "x".join(map(str, spec.input.roi_size)), backends.get_first_line(error)
            raise BadParameter(
                f"roi_size: {spec.name} does not run with windows of {size}: {reason}", parameter="roi_size"
            ) from error
        return other

    def batch_notes(self, options: Options) -> tuple[str, ...]:
        """Return a note if the network was built for another batch size than the request asks for."""
        wanted = options.sw_batch_size
        if wanted is None or (used := self.estimator.fit_batch(wanted)) == wanted:
            return ()
        return (f"The {self._config.engine} engine computes {used} windows per batch, not {wanted}.",)

    def describe_engine(self, *, recomputed: bool = False) -> str:
        """Return the name and precision of the engine that computed the windows, or of that which `recomputed` them."""
        return f"{self._config.engine} {'fp32' if recomputed else self._config.precision}"

    @property
    def _kernel_warnings(self) -> tuple[str, ...]:
        if self.device.type != "cpu" or window_kernels.ready:
            return ()
        return (f"Segmentation takes at least twice as long without the C++ kernels: {window_kernels.problem}.",)

    def report(self) -> EngineReport:
        """Report the engine in use. Before `warm_up`, report the configuration that would be used without it."""
        ready, config, windows = self._ready, self._config, self._settings.windows
        plan = None if ready is None else ready.plan
        return EngineReport(
            device=str(self.device),
            device_name=devices.device_name(self.device),
            engine=config.engine if ready else "starting",
            precision=config.precision,
            memory_format=config.memory_format,
            compile_mode=config.compile_mode,
            roi_size=self.spec.input.roi_size,
            sw_batch_size=config.sw_batch_size,
            overlap=windows.overlap,
            blending=windows.blending,
            warm_up_seconds=ready.seconds if ready else 0.0,
            warnings=(*self._kernel_warnings, *(ready.warnings if ready else ())),
            streams=config.streams,
            planned="fixed" if plan is None else plan.origin,
            cached=ready is not None and ready.cached,
            trials=plan.trials if plan else (),
        )


def ready_bytes(ready: ReadyEngine) -> int:
    """Return the bytes of the weights and batch buffers of a network."""
    batches = sum(batch.untyped_storage().nbytes() for batch in ready.window.batches)
    return count_weight_bytes(ready.module) + ready.nbytes + batches
