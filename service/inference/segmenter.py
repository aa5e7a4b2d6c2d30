"""One model on one device: Volume -> Segmentation, in a straight line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from service.core import hardware
from service.core.buffers import make_allocator
from service.core.config import Settings
from service.core.cpp_extension import extension_cache
from service.core.errors import OutOfMemory, TooLarge
from service.core.timing import Stages
from service.core.volume import Diameter, Options, Size, Volume
from service.engine import backends, plans, torch_compile
from service.inference.decoding.decoders import make_decoder
from service.inference.decoding.watershed_kernel import watershed_kernel
from service.inference.diameter import (
    DiameterCache,
    DiameterEstimator,
    ScoreCollector,
    ScoreWindows,
    estimate_anisotropy,
    score_as_stack,
)
from service.inference.empty_windows import EmptyWindowFilter, Skipping
from service.inference.engine_selector import EngineSelector, ReadyEngine
from service.inference.estimate import Estimate, Estimator, Plan, PlannedRequest, measure_activations
from service.inference.memory import check_memory, translate_errors
from service.inference.normalize import NormalisedImage, normalise_volume
from service.inference.resample import resample_image, resample_segmentation, working_size
from service.inference.result import EngineReport, Result
from service.inference.scores import Cancelled, ComputeSlabs, Progress, RunWindows, ScoreComputer
from service.inference.windows.grid import Grid
from service.inference.windows.kernels import window_kernels
from service.inference.windows.sliding_window import Image, SlidingWindow
from service.models.loader import Network, load_network, weight_bytes
from service.models.spec import Instances, ModelSpec

log = logging.getLogger(__name__)


class _Sized(NamedTuple):
    """A request planned anew with the estimated diameter of its objects; None: it could not be estimated."""

    request: PlannedRequest
    diameter: Diameter | None
    note: str


class Segmenter:
    """Loads a model once and segments volumes with it. Several threads may call `segment` once `warm_up` has returned.

    The network is run by the thread of `warm_up`, and by those that run `SlidingWindow`s, of which there may be as many
    at a time as these have streams. On CUDA that must always be the same thread, to which inductor ties the graphs that
    it records.
    Raises ConfigError for a device that is not there, BrokenModel for a model that does not load.
    """

    def __init__(self, spec: ModelSpec, settings: Settings) -> None:
        self.spec = spec
        self._settings = settings
        self._device = hardware.choose_device(settings.device.name)
        self._allocate = make_allocator(settings.server.scratch_folder)
        if self._device.type == "cpu":
            hardware.use_threads(settings.device.threads)
        if settings.engine.cache_folder is not None:
            torch_compile.set_cache_folder(settings.engine.cache_folder)
        extension_cache.set_folder(plans.choose_folder(settings.engine.cache_folder).with_name("kernels"))
        network = load_network(spec, self._run_first)
        # Weights as they were loaded stay on the host, for whenever scores have to be computed in float32.
        self._loaded_bytes = weight_bytes(network) if self._device.type == "cpu" else 0
        self._selector = EngineSelector(spec, settings, self._device, network, self._window_bytes)
        self._ready: ReadyEngine | None = None
        self._config = self._selector.preliminary()
        self._scores = ScoreComputer(self._selector, self._config)
        self.estimator = self._make_estimator()
        self._diameters = DiameterCache()

    def _run_first(self, network: nn.Module, window: Tensor) -> Tensor:
        """Run the network for the first time, which takes long, and measure its activations with that one forward."""
        scores, self._window_bytes = measure_activations(network, window)
        return scores

    def warm_up(self, *, tune: bool = True) -> None:
        """Settle how the network runs, and run it with its one batch shape, until it runs as it always will.

        Without `tune` that takes seconds rather than minutes: what is not known yet is not found out.
        """
        if self._device.type == "cpu":
            window_kernels.prepare()
            if isinstance(self.spec.decoding, Instances):
                watershed_kernel.prepare()
        self._use(self._selector.run(tune=tune))
        self.estimator = self._make_estimator()
        for warning in self.report().warnings:
            log.warning("%s: %s", self.spec.identifier, warning)

    def _use(self, ready: ReadyEngine) -> None:
        self._ready, self._config = ready, ready.config
        self._scores = ScoreComputer(self._selector, ready.config, ready)

    def _make_estimator(self) -> Estimator:
        """Make an estimator of what is known of the model by now."""
        config, on_host = self._config, self._device.type == "cpu"
        window_bytes = self._window_bytes * backends.batch_dtype(config).itemsize // 4
        score_bytes = None if self._ready is None else self._ready.score_bytes
        return Estimator(
            self.spec, self._settings, config.sw_batch_size, window_bytes, on_host, config.streams, score_bytes
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory for weights in every form, and for what is kept for batches of windows."""
        ready = self._ready
        if ready is None:
            return 0
        batches = sum(batch.untyped_storage().nbytes() for batch in ready.window.batches)
        return self._loaded_bytes + weight_bytes(ready.module) + ready.nbytes + batches

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
        progress  called with the windows that are done, from 0 on, and their total
        run       computes the windows
        revised   called with a new estimate, where the diameter of the objects is estimated

        Raises BadParameter for options or channels that do not fit, TooLarge for more windows than the operator allows,
        Cancelled once `cancelled()` is true between two batches, OutOfMemory, NonFiniteScores where even float32 gives
        NaN or infinity, and DeviceLost.
        """
        plan, estimate = request or self.estimator.plan_request(volume, options)
        check_memory(estimate, hardware.available_memory())
        stages, diameter, compute = Stages(), plan.diameter, partial(run, cancelled=cancelled, progress=_ignore)
        with torch.inference_mode(), translate_errors(estimate, self._device):
            with stages.measure("prepare"):
                source, notes = normalise_volume(volume, self.spec)
            if plan.estimated:
                with stages.measure("size"):
                    (plan, estimate), diameter, note = self._plan_by_diameter(
                        source, volume, options, PlannedRequest(plan, estimate), compute
                    )
                revised(estimate)
                notes += (note,)
            with stages.measure("prepare"):
                image, resampling_notes = resample_image(source, volume, self.spec, plan.diameter)
                if self._device.type != "cpu":
                    image = (image if isinstance(image, Tensor) else image.tensor()).to(self._device)
            skipping = self._filter_empty_windows(image, volume, plan, stages, compute)
            progress(0, estimate.windows)
            decoder = partial(make_decoder, self.spec, _size(image), plan.output, volume.voxel_size, self._allocate)
            compute = partial(run, cancelled=cancelled, progress=progress)
            scored = self._scores.compute(skipping.image, plan, decoder, stages, compute)
            skipped, skipping_notes = skipping.skipped, skipping.notes
            # Decoding needs their memory.
            del image, skipping, source
            with stages.measure("decode"):
                segmentation = resample_segmentation(scored.consumer.finish(), volume.shape[1:])
        return Result(
            segmentation,
            stages.seconds,
            (*notes, *resampling_notes, *skipping_notes, *scored.notes),
            scored.fallbacks,
            scored.recomputed,
            diameter,
            estimated=plan.estimated and diameter is not None,
            skipped=skipped,
        )

    def _plan_by_diameter(
        self, image: NormalisedImage, volume: Volume, options: Options, request: PlannedRequest, compute: ComputeSlabs
    ) -> _Sized:
        """Estimate the diameter of the objects, and plan anew with it where resampling by it brings something."""
        base = _ratios(working_size(volume, self.spec), volume)
        estimator = DiameterEstimator(image, base, self.spec, self._score_windows(request.plan, compute))
        sizing = self._diameters.get(volume, lambda: estimator.estimate(estimate_anisotropy(volume, base)))
        if sizing.diameter is None or sizing.fits:
            return _Sized(request, sizing.diameter, sizing.note)
        try:
            estimate = self.estimator.estimate(volume, replace(options, diameter=sizing.diameter))
            check_memory(estimate, hardware.available_memory())
        except (TooLarge, OutOfMemory) as error:
            note = f"Objects seem to be {sizing.diameter} wide, yet the stack is used as it is sampled: {error}"
            return _Sized(request, sizing.diameter, note)
        plan = request.plan._replace(diameter=sizing.diameter)
        return _Sized(PlannedRequest(plan, estimate), sizing.diameter, sizing.note)

    def _filter_empty_windows(
        self, image: Image, volume: Volume, plan: Plan, stages: Stages, compute: ComputeSlabs
    ) -> Skipping:
        """Leave out windows without anything in them, where the plan says so."""
        if plan.skip_below is None:
            return Skipping(image, None)
        with stages.measure("skip"):
            grid = Grid.cover(_size(image), self.spec.input.roi_size, plan.overlap)
            score_windows = self._score_windows(plan, compute)
            return EmptyWindowFilter(image, grid, plan.sw_batch_size, self.spec, score_windows).skip(
                volume, plan.skip_below
            )

    def _score_windows(self, plan: Plan, compute: ComputeSlabs) -> ScoreWindows:
        """Return what computes scores [N, K, *roi] of a few windows [N, C, *roi], with all fallbacks."""
        plan = plan._replace(overlap=0.0)
        return score_as_stack(
            lambda stack: self._scores.compute(stack, plan, ScoreCollector, Stages(), compute).consumer.scores()
        )

    def report(self) -> EngineReport:
        """Report the engine in use; before `warm_up` the one that would run without it."""
        ready, config, windows = self._ready, self._config, self._settings.windows
        # Untuned: nobody tried yet what is fastest, and the warnings say how to change that.
        planned = "fixed" if ready is None or self._settings.engine.kind != "auto" else "untuned"
        if ready is not None and ready.plan is not None:
            planned = "cached" if ready.cached else "tuned"
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
            warnings=ready.warnings if ready else (),
            streams=config.streams,
            planned=planned,
            trials=ready.plan.trials if ready and ready.plan else (),
        )


def _size(image: Image) -> Size:
    """Return (Z, Y, X)."""
    z, y, x = image.shape[2:]
    return z, y, x


def _ratios(size: Size, volume: Volume) -> tuple[float, float, float]:
    """Return the voxels of a grid of `size` per voxel of the volume, along (z, y, x)."""
    z, y, x = (after / before for after, before in zip(size, volume.shape[1:], strict=True))
    return z, y, x


def _ignore(_done: int, _total: int) -> None:
    """Ignore windows by which objects are measured: progress counts those of the volume."""
