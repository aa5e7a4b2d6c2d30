"""One model on one device: Volume -> Segmentation, in a straight line."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn

from service.core import errors, hardware, host
from service.core.buffers import make_allocator
from service.core.config import Settings
from service.core.errors import BadParameter, DoubtfulResult, OutOfMemory, StackSegError, TooLarge
from service.core.hardware import Driver, is_out_of_memory
from service.core.progress import step
from service.core.quantities import Diameter, Size
from service.core.timing import Stages
from service.core.types import Extent, Options, Segmentation, Steering, Volume
from service.engine import backends
from service.engine.compile import torch_compile
from service.engine.tuning.plans import EngineConfig, EnginePlan
from service.inference.cuda.device_image import DeviceImage, SentVolume
from service.inference.decoding.decoders import Decoder, HostDecoder, make_decoder
from service.inference.decoding.steering import minimum_voxels, steer
from service.inference.diameter.confidence import Evidence, count_sure, explain, explain_nothing, judge, known_models
from service.inference.diameter.estimation import DiameterCache, DiameterEstimator, strongest_windows
from service.inference.engines.scores import C, Cancelled, ComputeSlabs, Progress, RunWindows, ScoreComputer, Scored
from service.inference.engines.selector import EngineSelector, ReadyEngine
from service.inference.estimate import Estimator, choose_window, measure_activations, window_scale
from service.inference.memory_errors import check_memory, translate_errors
from service.inference.preprocessing.empty_windows import EmptyWindowFilter, IntensitySurvey, Skipping
from service.inference.preprocessing.normalize import NormalisedImage, normalise_volume
from service.inference.preprocessing.resample import (
    ResampledImage,
    base_factors,
    resample_image,
    resample_segmentation,
    used_width,
)
from service.inference.types import Doubt, EngineReport, Estimate, Plan, PlannedRequest, Result, Sizing
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.kernels import window_kernels
from service.inference.windows.sliding_window import Image, SlidingWindow
from service.models.loader import Network, load_network, weight_bytes
from service.models.spec import ModelSpec

MONAI_INFERER = "service.inference.windows.monai_inferer"

log = logging.getLogger(__name__)


class _Sized(NamedTuple):
    """Request after the diameter of its objects was stated or estimated; None: neither is the case."""

    request: PlannedRequest
    diameter: Diameter | None
    notes: tuple[str, ...] = ()


class Segmenter:
    """Loads a model once and segments volumes with it. Several threads may call `segment` once `warm_up` has returned.

    The network is run by the thread of `warm_up`, and by those that run `SlidingWindow`s, of which there may be as many
    at a time as these have streams. On CUDA that must always be the same thread, to which inductor ties the graphs that
    it records.
    Raises ConfigError for a device that is not there, BrokenModel for a model that does not load.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, driver: Driver = hardware) -> None:
        self.spec = spec
        self._settings = settings
        self._device = hardware.choose_device(settings.device.name)
        self._driver, self._on_host = driver, driver.is_on_host(self._device)
        self._allocate = make_allocator(settings.server.scratch_folder)
        if self._device.type == "cpu":
            hardware.use_threads(settings.device.threads)
        if settings.engine.cache_folder is not None:
            torch_compile.set_cache_folder(settings.engine.cache_folder)
        with step("reading weights"):
            network = load_network(spec, self._run_first)
        # Weights as they were loaded stay on the host, for whenever scores have to be computed in float32.
        self._loaded_bytes = weight_bytes(network) if self._on_host else 0
        self._selector = EngineSelector(spec, settings, self._device, network, self._window_bytes, driver=driver)
        self._use(None)
        self._diameters = DiameterCache()
        # The latest of other windows that requests have asked for, by its edges and the windows per call.
        self._other_windows: dict[tuple[Size, int], Segmenter] = {}
        self._other_lock = threading.Lock()

    def _run_first(self, network: nn.Module, window: Tensor) -> Tensor:
        """Run the network for the first time, which takes long, and measure its activations with that one forward."""
        scores, self._window_bytes = measure_activations(network, window)
        return scores

    def warm_up(self, *, tune: bool = False) -> None:
        """Settle how the network runs, and run it with its one batch shape, until it runs as it always will.

        With `tune`, and where the operator wants it (`engine.tune`), ways to run it race first, which takes minutes.
        """
        ready = self._selector.run(tune=tune)
        self._use(ready)
        for warning in self.report().warnings:
            log.warning("%s: %s", self.spec.identifier, warning)

    def tune(self, seconds: float, announce: Callable[[EngineConfig, int], object] = lambda *_: None) -> EnginePlan:
        """Race all ways to run the network, as `EngineSelector.tune` does, and keep and return the plan."""
        ready = self._selector.tune(seconds, announce)
        self._use(ready)
        assert ready.plan is not None  # noqa: S101 - a race makes one
        return ready.plan

    def _use(self, ready: ReadyEngine | None) -> None:
        """Compute scores with a network that is ready; None: eagerly until there is one."""
        self._ready = ready
        self._config = config = self._selector.preliminary() if ready is None else ready.config
        self.estimator = Estimator(
            self.spec,
            self._settings,
            config.sw_batch_size,
            window_bytes=self._window_bytes * backends.batch_dtype(config).itemsize // 4,
            on_host=self._on_host,
            device_memory=None if self._on_host else self._driver.total_bytes(self._device),
            streams=config.streams,
            score_bytes=None if ready is None else ready.score_bytes,
            any_batch_size=None if ready is None or config.engine == "eager" else ready.window.any_batch_size,
        )
        self._scores = ScoreComputer(self._selector, config, ready, self.estimator.fit_batch)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory for weights in every form, and for what is kept for batches of windows.

        Those of the window of the latest request that asked for another one count, which come and go.
        """
        built = [each._ready for each in (self, *self._other_windows.values())]
        return self._loaded_bytes * (self._ready is not None) + sum(ready_bytes(ready) for ready in built if ready)

    def instrument(self, wrap: Callable[[Network], Network]) -> None:
        """Let every later forward of the warm network pass through what `wrap` makes of it; for measurements."""
        if self._ready is not None:
            window = self._ready.window
            wrapped = window.with_network(
                wrap(window.network), any_batch_size=window.any_batch_size, owns_scores=window.owns_scores
            )
            self._use(replace(self._ready, window=wrapped))

    def segment(  # noqa: PLR0913
        self,
        volume: Volume,
        options: Options,
        *,
        request: PlannedRequest | None = None,
        cancelled: Cancelled = lambda: False,
        progress: Progress = lambda _done, _total: None,
        run: RunWindows = SlidingWindow.run,
        revised: Callable[[Estimate], None] = lambda _estimate: None,
    ) -> Result:
        """Segment one volume [C, Z, Y, X] on its own grid.

        request   what `estimator` has planned for the volume and the options; None: it is planned now
        progress  called with the windows that are done, from 0 on, and their total, each once for every view of it
        run       computes the windows
        revised   called with a new estimate, where the diameter of the objects is estimated

        Raises BadParameter for options or channels that do not fit, TooLarge for more windows than the operator allows,
        Cancelled once `cancelled()` is true between two batches, OutOfMemory, NonFiniteScores where even float32 gives
        NaN or infinity, DeviceLost, and DoubtfulResult where the options are strict.
        """
        request = request or self.estimator.plan_request(volume, options)
        if options.roi_size is not None:
            other, options = self._with_window(options, request.estimate), replace(options, roi_size=None)
            result = other.segment(
                volume, options, request=request, cancelled=cancelled, progress=progress, run=run, revised=revised
            )
            return result._replace(spec=self.spec)
        stages = Stages()
        infer = self._choose_inferer(run)
        # Windows that are scored to measure objects or background do not count as progress.
        probe = partial(run, cancelled=cancelled, progress=lambda _done, _total: None)
        with torch.inference_mode(), translate_errors(request.estimate, self._device, self._driver):
            self._check_memory(request.estimate)
            with stages.measure("prepare"):
                source, notes = normalise_volume(volume, self.spec, self._send(volume))
            sized = _Sized(request, request.plan.diameter)
            if request.plan.estimated:
                with stages.measure("size"):
                    sized = self._plan_by_diameter(source, volume, options, request, probe)
                revised(sized.request.estimate)
            plan, estimate = sized.request
            with stages.measure("prepare"):
                resampled, resampling_notes = self._resample(source, volume, plan.diameter)
            size = as_size(resampled.shape[2:])
            spec = steer(self.spec, plan.steering, volume, size)
            image, skipped, skipping_notes = self._skip_empty_windows(resampled, volume, spec, plan, stages, probe)
            progress(0, estimate.windows)
            make = partial(make_decoder, spec, size, plan.output, volume.voxel_size, self._allocate)
            decoder = self._choose_decoder(make, plan)
            scorings = plan.scorings
            compute = partial(
                infer, cancelled=cancelled, progress=lambda done, total: progress(done * scorings, total * scorings)
            )
            scored = self._scores.compute(image, plan, decoder, stages, compute)
            # Decoding needs their memory.
            del source, resampled, image
            with stages.measure("decode"):
                least = minimum_voxels(plan.steering, volume)
                segmentation = resample_segmentation(scored.consumer.finish(), volume.shape[1:], least)
                confidence, doubt = self._judge(segmentation, volume, plan, sized.diameter, probe)
        if doubt is not None and options.strict:
            raise DoubtfulResult(doubt.detail)
        sizing_notes = (*sized.notes, *resampling_notes, *skipping_notes)
        notes = (*notes, *sizing_notes, *self._batch_notes(options), *scored.notes, *volume.notes)
        return Result(
            segmentation,
            stages.seconds,
            notes,
            scored.fallbacks,
            scored.recomputed,
            sized.diameter,
            plan.estimated and sized.diameter is not None,
            skipped,
            self.spec,
            f"{self._config.engine} {'fp32' if scored.recomputed else self._config.precision}",
            confidence=confidence,
            doubt=doubt,
        )

    def score(
        self, image: Image, plan: Plan, make_consumer: Callable[[], C], run: ComputeSlabs
    ) -> tuple[Scored[C], Stages]:
        """Hand what `run` makes of the scores of a normalised image, on the grid of the network, to a new consumer.

        Returns that with the seconds of the stages windows and decode. Raises what `ScoreComputer.compute` raises.
        """
        stages = Stages()
        with torch.inference_mode():
            if not self._on_host and isinstance(image, NormalisedImage | ResampledImage):
                image = self._bring(image)
            return self._scores.compute(image, plan, make_consumer, stages, run), stages

    def skip_empty_windows(
        self, image: NormalisedImage, volume: Volume, plan: Plan, survey: IntensitySurvey | None
    ) -> Skipping:
        """Find the windows that `segment` would leave out of a volume, by a survey of it.

        The plan's diameter counts, and `survey` has the windows that there are with it; None: the volume is read.
        """
        probe = partial(SlidingWindow.run, cancelled=lambda: False, progress=lambda _done, _total: None)
        resampled, _notes = resample_image(image, volume, self.spec, plan.diameter)
        spec = steer(self.spec, plan.steering, volume, as_size(resampled.shape[2:]))
        with torch.inference_mode():
            return self._skip_empty_windows(resampled, volume, spec, plan, Stages(), probe, survey)

    @property
    def engine(self) -> str:
        """Engine that computes the windows, with its precision."""
        return f"{self._config.engine} {self._config.precision}"

    @property
    def device(self) -> torch.device:
        """Device that scores are computed on."""
        return self._device

    def _bring(self, image: NormalisedImage | ResampledImage) -> DeviceImage:
        """Return an image whose windows are read on the device."""
        source = image.tensor() if isinstance(image, ResampledImage) else image
        return DeviceImage(source, self.spec.input.roi_size[0], self._device)

    def _choose_decoder(self, make: Callable[..., Decoder], plan: Plan) -> Callable[[], Decoder]:
        """Return what makes the decoder: `make`, with all scores at once on a device, or on the host."""
        if plan.decode_on_host:
            return partial(HostDecoder, make)
        return make if self._on_host else partial(make, whole=True)

    def _send(self, volume: Volume) -> SentVolume | None:
        """Send a volume to a device with its own memory, which finds the percentiles there; None if it cannot."""
        return None if self._on_host or not SentVolume.takes(volume) else SentVolume(volume, self._device)

    def _judge(
        self, segmentation: Segmentation, volume: Volume, plan: Plan, used: Diameter | None, compute: ComputeSlabs
    ) -> tuple[float | None, Doubt | None]:
        """Return the confidence in labels, and what is wrong with those of which there is little; None: not known."""
        objects, calibration, wanted = segmentation.objects, self.spec.confidence, self.spec.input.diameter
        if objects is None or (len(objects) and (calibration is None or wanted is None)):
            return None, None
        confidence = None
        if calibration is not None and wanted is not None:
            confidence = judge(objects, wanted, calibration)
            if confidence is not None and confidence >= calibration.threshold:
                return confidence, None
            calibration = known_models(calibration, self.spec.folder.parent)
        # Only now, as it takes longer than all else that is known of a result.
        image, _notes = normalise_volume(volume, self.spec)
        guess, windows = self._look_again(image, volume, plan, compute)
        evidence = Evidence(
            windows,
            guess,
            used=used_width(volume, self.spec, used),
            stated=plan.diameter is not None and not plan.estimated,
            steered=plan.steering != Steering(),
        )
        if confidence is None or calibration is None or wanted is None:
            return None, explain_nothing(evidence, calibration)
        evidence = evidence._replace(sure=count_sure(objects, wanted, calibration))
        return confidence, explain(confidence, evidence, calibration)

    def _look_again(
        self, image: NormalisedImage, volume: Volume, plan: Plan, compute: ComputeSlabs
    ) -> tuple[Diameter | None, Sequence[Tensor]]:
        """Return how wide objects seem to be, and windows where most is to be seen; neither where that fails.

        Labels that are there already are worth more than advice. Raises Cancelled and DeviceLost.
        """
        try:
            is_wanted = self.spec.input.diameter is not None
            guess = self._measure_diameter(image, volume, plan, compute).guess if is_wanted else None
            return guess, strongest_windows(image, self.spec.input.roi_size)
        except (RuntimeError, MemoryError, OSError, StackSegError) as error:
            if isinstance(error, errors.Cancelled) or hardware.find_loss(self._device, error, self._driver) is not None:
                raise
            log.warning("%s: why a result is doubtful cannot be told: %s", self.spec.identifier, error)
            return None, ()

    def _with_window(self, options: Options, needed: Estimate) -> Segmenter:
        """Return a segmenter with the window that a request asks for, which is built unless the latest had the same.

        Raises OutOfMemory, DeviceLost, and BadParameter where the network does not take such windows.
        """
        spec = choose_window(self.spec, options.roi_size)
        if spec is self.spec:
            return self
        batch_size = options.sw_batch_size or self._config.sw_batch_size
        key = (spec.input.roi_size, batch_size)
        with self._other_lock, torch.inference_mode(), translate_errors(needed, self._device, self._driver):
            if key not in self._other_windows:
                self._check_memory(needed)
                self._other_windows.clear()
                self._other_windows[key] = self._build_with_window(spec, batch_size)
            return self._other_windows[key]

    def _build_with_window(self, spec: ModelSpec, batch_size: int) -> Segmenter:
        other = copy.copy(self)
        other.spec, other._diameters = spec, DiameterCache()
        other._window_bytes = int(self._window_bytes * window_scale(self.spec, spec))
        other._selector = self._selector.with_window(spec, other._window_bytes)
        try:
            other._use(None if self._ready is None else other._selector.rebuild(self._config, batch_size))
        except backends.ENGINE_FAILURES as error:
            if is_out_of_memory(error) or hardware.find_loss(self._device, error, self._driver) is not None:
                raise
            size, reason = "x".join(map(str, spec.input.roi_size)), backends.first_line(error)
            raise BadParameter(f"roi_size: {spec.name} does not run with windows of {size}: {reason}") from error
        return other

    def _check_memory(self, needed: Estimate) -> None:
        """Raise OutOfMemory where the host or the device has less memory free than needed."""
        on_device = None if self._on_host else self._driver.free_bytes(self._device)
        check_memory(needed, host.available_memory(), on_device)

    def estimate_diameter(
        self,
        volume: Volume,
        options: Options,
        *,
        image: NormalisedImage | None = None,
        cancelled: Cancelled = lambda: False,
        run: RunWindows = SlidingWindow.run,
    ) -> Sizing | None:
        """Estimate how wide the objects of a volume are; None where `segment` with these options would not.

        `image` is the volume as `normalise_volume` normalises it; None: it is normalised now. Raises what `segment`
        raises.
        """
        request = self.estimator.plan_request(volume, options)
        if not request.plan.estimated:
            return None
        if options.roi_size is not None:
            other = self._with_window(options, request.estimate)
            options = replace(options, roi_size=None)
            return other.estimate_diameter(volume, options, image=image, run=run, cancelled=cancelled)
        compute = partial(run, cancelled=cancelled, progress=lambda _done, _total: None)
        with torch.inference_mode(), translate_errors(request.estimate, self._device, self._driver):
            if image is not None:
                return self._look_for_diameter(image, volume, request.plan, compute)
            return self._measure_diameter(normalise_volume(volume, self.spec)[0], volume, request.plan, compute)

    def _plan_by_diameter(
        self, image: NormalisedImage, volume: Volume, options: Options, request: PlannedRequest, compute: ComputeSlabs
    ) -> _Sized:
        """Estimate the diameter of the objects, and plan anew with it where resampling by it brings something."""
        sizing = self._measure_diameter(image, volume, request.plan, compute)
        if sizing.resampled_by is None:
            return _Sized(request, sizing.diameter, (sizing.note,))
        try:
            planned, estimate = self.estimator.plan_request(volume, replace(options, diameter=sizing.resampled_by))
            self._check_memory(estimate)
        except (TooLarge, OutOfMemory) as error:
            note = f"Objects seem to be {sizing.diameter} wide, yet the stack is used as it is sampled: {error}"
            return _Sized(request, sizing.diameter, (note,))
        plan = request.plan._replace(diameter=sizing.resampled_by, decode_on_host=planned.decode_on_host)
        return _Sized(PlannedRequest(plan, estimate), sizing.diameter, (sizing.note,))

    def _measure_diameter(self, image: NormalisedImage, volume: Volume, plan: Plan, compute: ComputeSlabs) -> Sizing:
        return self._diameters.get(volume, lambda: self._look_for_diameter(image, volume, plan, compute))

    def _look_for_diameter(self, image: NormalisedImage, volume: Extent, plan: Plan, compute: ComputeSlabs) -> Sizing:
        base = base_factors(volume, self.spec)
        score_windows = partial(self._scores.score_windows, plan=plan, run=compute)
        return DiameterEstimator(image, base, self.spec, score_windows, volume.voxel_size).estimate()

    def _batch_notes(self, options: Options) -> tuple[str, ...]:
        """Return a note where the request asks for another batch than the network was built for."""
        wanted = options.sw_batch_size
        if wanted is None or (used := self.estimator.fit_batch(wanted)) == wanted:
            return ()
        return (f"The {self._config.engine} engine takes {used} windows at once, not {wanted}.",)

    def _choose_inferer(self, run: RunWindows) -> RunWindows:
        """Return what computes the windows of a request: `run`, or MONAI's inferer, which calls the network by it."""
        if self._settings.windows.inferer == "own":
            return run
        # Imported by name: MONAI takes seconds, and the service starts without it.
        inferer: RunWindows = import_module(MONAI_INFERER).MonaiInferer(self._settings.windows, run)
        return inferer

    def _resample(
        self, image: NormalisedImage, volume: Volume, diameter: Diameter | None
    ) -> tuple[Image, tuple[str, ...]]:
        """Resample an image to the grid of the network, and bring it to the device; return it with notes."""
        prepared = resample_image(image, volume, self.spec, diameter)
        if self._settings.windows.inferer == "own":
            if self._on_host:
                return prepared.image, prepared.notes
            return self._bring(prepared.image), prepared.notes
        return prepared.image.tensor().to(self._device), prepared.notes

    def _skip_empty_windows(  # noqa: PLR0913, PLR0917
        self,
        image: Image,
        volume: Volume,
        spec: ModelSpec,
        plan: Plan,
        stages: Stages,
        compute: ComputeSlabs,
        survey: IntensitySurvey | None = None,
    ) -> Skipping:
        """Leave out windows without anything in them, where the plan says so; `spec` as it decodes the request."""
        if plan.skip_below is None:
            return Skipping(image, None)
        with stages.measure("skip"):
            grid = Grid.cover(as_size(image.shape[2:]), self.spec.input.roi_size, plan.overlap)
            score_windows = partial(self._scores.score_windows, plan=plan, run=compute)
            windows = EmptyWindowFilter(image, grid, plan.sw_batch_size, spec, score_windows)
            return windows.skip(volume, plan.skip_below, survey)

    def report(self) -> EngineReport:
        """Report the engine in use; before `warm_up` the one that would run without it."""
        ready, config, windows = self._ready, self._config, self._settings.windows
        return EngineReport(
            device=str(self._device),
            device_name=hardware.device_name(self._device),
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
            planned=self._planned,
            cached=ready is not None and ready.cached,
            trials=ready.plan.trials if ready and ready.plan else (),
        )

    @property
    def _kernel_warnings(self) -> tuple[str, ...]:
        if self._device.type != "cpu" or window_kernels.ready:
            return ()
        return (f"Segmenting takes at least twice as long as with the C++ kernels: {window_kernels.problem}.",)

    @property
    def _planned(self) -> str:
        """How the engine was chosen, as in the `EngineReport`."""
        plan = None if self._ready is None else self._ready.plan
        if plan is None:
            return "fixed"
        return "tuned" if plan.tuned else "known-order"


def ready_bytes(ready: ReadyEngine) -> int:
    """Return the bytes that a network takes with its weights and batches, whatever was loaded before it."""
    batches = sum(batch.untyped_storage().nbytes() for batch in ready.window.batches)
    return weight_bytes(ready.module) + ready.nbytes + batches
