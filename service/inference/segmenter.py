"""One model on one device: Volume -> Segmentation, in a straight line."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from service.core import hardware
from service.core.buffers import make_allocator
from service.core.config import Settings
from service.core.cpp_extension import extension_cache
from service.core.errors import DeviceLost, NonFiniteScores, OutOfMemory, TooLarge
from service.core.timing import Stages
from service.core.volume import Diameter, Extent, Options, OutputKind, Size, Volume
from service.engine import backends, plans, torch_compile
from service.inference.decoding.decoders import make_decoder
from service.inference.decoding.watershed_kernel import ascent
from service.inference.diameter import Collector, DiameterEstimator, Memory, in_a_stack, stretch_of
from service.inference.empty_windows import EmptyWindowFilter, Skipping
from service.inference.engine_selector import EngineSelector, ReadyEngine
from service.inference.estimate import Estimate, Estimator, Plan, watched
from service.inference.normalize import Image as Normalised
from service.inference.normalize import normalised
from service.inference.resample import on_grid, resample, working_size
from service.inference.result import EngineReport, Result
from service.inference.windows.blending import Slab
from service.inference.windows.grid import Grid
from service.inference.windows.kernels import stitching
from service.inference.windows.sliding_window import Image, SlidingWindow
from service.models.loader import Network, load_network, weight_bytes
from service.models.spec import Instances, ModelSpec

log = logging.getLogger(__name__)


class Taker(Protocol):
    """What takes slabs of scores in: every decoder does."""

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        """As `Decoder.add`."""


D = TypeVar("D", bound=Taker)

Slabs = Callable[[SlidingWindow, Image, float], Iterator[Slab]]
Cancelled = Callable[[], bool]
Progress = Callable[[int, int], None]


class Run(Protocol):
    """How windows are computed: `SlidingWindow.run`, or what computes them together with those of others."""

    def __call__(
        self, window: SlidingWindow, image: Image, overlap: float, /, *, cancelled: Cancelled, progress: Progress
    ) -> Iterator[Slab]:
        """Scores of `image`, and what is raised, as `SlidingWindow.run` gives them."""


class _Sized(NamedTuple):
    """What is done about the width of objects once it was estimated, None: it was not found out; see `Result`."""

    plan: Plan
    needed: Estimate
    diameter: Diameter | None
    notes: tuple[str, ...]


class _Made(NamedTuple, Generic[D]):
    """A decoder that has taken in every score, and what happened on the way."""

    decoder: D
    fallbacks: list[str]
    remarks: list[str]
    recomputed: bool


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
        network = load_network(spec, self._watched)
        self._warm_up = EngineSelector(spec, settings, self._device, network, self._window_bytes)
        self._choice = self._warm_up.preliminary()
        self._warm: ReadyEngine | None = None
        self.estimator = self._looked_ahead()
        self._lock = threading.Lock()
        self._sizes = Memory()
        self._others: WeakValueDictionary[int, SlidingWindow] = WeakValueDictionary()

    def warm_up(self, *, tune: bool = True) -> None:
        """Settle how the network runs, and run it with its one batch shape, until it runs as it always will.

        Without `tune` that takes seconds rather than minutes: what is not known yet is not found out.
        """
        if self._device.type == "cpu":
            stitching.prepare()
            if isinstance(self.spec.decoding, Instances):
                ascent.prepare()
        warm = self._warm_up.run(tune=tune)
        self._warm, self._choice, self._module = warm, warm.choice, warm.module
        self.estimator = self._looked_ahead()
        for warning in self.report().warnings:
            log.warning("%s: %s", self.spec.identifier, warning)

    def _watched(self, network: nn.Module, window: Tensor) -> Tensor:
        """The network's first forward, which takes long: it tells at once what a window takes."""
        scores, self._window_bytes = watched(network, window)
        return scores

    @cached_property
    def _module(self) -> nn.Module:
        """What runs eagerly where the warm network does not fit; that of `preliminary` until `warm_up` sets another."""
        return self._warm_up.module(self._choice)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory for weights in every form, and for what is kept for batches of windows."""
        if self._warm is None:
            return 0
        batches = sum(batch.untyped_storage().nbytes() for batch in self._warm.window.batches)
        # As they were loaded they stay on the host, for whenever scores have to be computed in float32.
        loaded = self._warm_up.weight_bytes if self._device.type == "cpu" else 0
        return loaded + weight_bytes(self._module) + self._warm.nbytes + batches

    def instrument(self, wrap: Callable[[Network], Network]) -> None:
        """Let every later forward of the warm network pass through what `wrap` makes of it; for measurements."""
        if self._warm is not None:
            window = self._warm.window
            wrapped = window.with_network(
                wrap(window.network), any_batch_size=window.any_batch_size, owns_scores=window.owns_scores
            )
            self._warm = replace(self._warm, window=wrapped)

    def segment(  # noqa: PLR0913
        self,
        volume: Volume,
        options: Options,
        *,
        cancelled: Cancelled = lambda: False,
        progress: Progress = lambda _done, _total: None,
        run: Run = SlidingWindow.run,
        revised: Callable[[Estimate], None] = lambda _needed: None,
    ) -> Result:
        """Segment one volume on its own grid. `progress(done, total)` counts windows, from 0 on; `run` computes them.

        `revised` is told what the volume takes after all, where the width of its objects is estimated.

        Raises BadParameter for options or channels that do not fit, TooLarge for more windows than the operator
        allows, Cancelled once `cancelled()` is true between two
        batches, OutOfMemory, NonFiniteScores where even float32 gives NaN or infinity, and DeviceLost.
        """
        plan, needed = self.estimator.plan(options), self.estimate(volume, options)
        check_memory(needed, hardware.available_memory())
        stages = Stages()
        with torch.inference_mode(), translated(needed, self._device):
            with stages.measure("prepare"):
                source, notes = normalised(volume, self.spec)
            diameter, quiet = plan.diameter, partial(run, cancelled=cancelled, progress=_nothing)
            if plan.estimated:
                with stages.measure("size"):
                    plan, needed, diameter, more = self._sized(source, volume, options, needed, quiet)
                revised(needed)
                notes += more
            with stages.measure("prepare"):
                image, more = resample(source, volume, self.spec, plan.diameter)
                if self._device.type != "cpu":
                    image = (image if isinstance(image, Tensor) else image.tensor()).to(self._device)
            shown = self._sparse(image, volume, plan, stages, quiet)
            skipped, more = shown.skipped, more + shown.notes
            progress(0, needed.windows)
            slabs = partial(run, cancelled=cancelled, progress=progress)
            decoder = partial(make_decoder, self.spec, _size(image), plan.output, volume.voxel_size, self._allocate)
            made = self._scores(shown.image, plan, decoder, stages, slabs)
            del image, shown, source
            with stages.measure("decode"):
                segmentation = on_grid(made.decoder.finish(), volume.shape[1:])
        remarks = (*notes, *more, *made.fallbacks, *made.remarks)
        return Result(
            segmentation,
            stages.seconds,
            remarks,
            len(made.fallbacks),
            made.recomputed,
            diameter,
            estimated=plan.estimated and diameter is not None,
            skipped=skipped,
        )

    def report(self) -> EngineReport:
        """The engine in use; before `warm_up` the one that would run without it."""
        warm, choice, windows = self._warm, self._choice, self._settings.windows
        # Untuned: nobody tried yet what is fastest, and the warnings say how to change that.
        planned = "fixed" if warm is None or self._settings.engine.kind != "auto" else "untuned"
        if warm is not None and warm.plan is not None:
            planned = "cached" if warm.cached else "tuned"
        return EngineReport(
            device=str(self._device),
            device_name=hardware.device_name(self._device),
            engine=choice.engine if warm else "starting",
            precision=choice.precision,
            memory_format=choice.memory_format,
            compile_mode=choice.compile_mode,
            roi_size=self.spec.input.roi_size,
            sw_batch_size=choice.sw_batch_size,
            overlap=windows.overlap,
            blending=windows.blending,
            warm_up_seconds=warm.seconds if warm else 0.0,
            warnings=warm.warnings if warm else (),
            streams=choice.streams,
            planned=planned,
            trials=warm.plan.trials if warm and warm.plan else (),
        )

    def estimate(self, volume: Extent, options: Options) -> Estimate:
        """What segmenting a volume of this shape and voxel size would take. Raises BadParameter and TooLarge."""
        return self.estimator.estimate(volume, options)

    def output(self, options: Options) -> OutputKind:
        """What would come back. Raises BadParameter for options that do not fit."""
        return self.estimator.output(options)

    def _looked_ahead(self) -> Estimator:
        """What can be said of requests, with what is known of the model by now."""
        window_bytes = self._window_bytes * backends.batch_dtype(self._choice).itemsize // 4
        on_host = self._device.type == "cpu"
        choice = self._choice
        scores = None if self._warm is None else self._warm.score_bytes
        return Estimator(self.spec, self._settings, choice.sw_batch_size, window_bytes, on_host, choice.streams, scores)

    def _sized(self, image: Normalised, volume: Volume, options: Options, needed: Estimate, run: Slabs) -> _Sized:
        """Estimate the width of the objects, and plan anew with it where that brings something."""
        plan = self.estimator.plan(options)

        base = _ratios(working_size(volume, self.spec), volume)
        sizer = DiameterEstimator(image, base, self.spec, self._look(plan, run))
        found = self._sizes.recall(volume, lambda: sizer.estimate(stretch_of(volume, base)))
        if found.diameter is None or found.fits:
            return _Sized(plan, needed, found.diameter, (found.note,))
        sized = replace(options, diameter=found.diameter)
        try:
            more = self.estimator.estimate(volume, sized)
            check_memory(more, hardware.available_memory())
        except (TooLarge, OutOfMemory) as error:
            note = f"Objects seem to be {found.diameter} wide, yet the stack is used as it is sampled: {error}"
            return _Sized(plan, needed, found.diameter, (note,))
        return _Sized(plan._replace(diameter=found.diameter), more, found.diameter, (found.note,))

    def _sparse(self, image: Image, volume: Volume, plan: Plan, stages: Stages, run: Slabs) -> Skipping:
        """Leave out windows without anything in them, where the plan says so."""
        if plan.skip_below is None:
            return Skipping(image, None)
        with stages.measure("skip"):
            grid = Grid.cover(_size(image), self.spec.input.roi_size, plan.overlap)
            skipper = EmptyWindowFilter(image, grid, plan.sw_batch_size, self.spec, self._look(plan, run))
            return skipper.skip(volume, plan.skip_below)

    def _look(self, plan: Plan, run: Slabs) -> Callable[[Tensor], Tensor]:
        """Scores [N, K, *roi] of a few windows [N, C, *roi], whichever way they have to be computed."""

        def look(stack: Tensor) -> Tensor:
            return self._scores(stack, plan._replace(overlap=0.0), Collector, Stages(), run).decoder.scores()

        return in_a_stack(look)

    def _scores(self, image: Image, plan: Plan, make: Callable[[], D], stages: Stages, run: Slabs) -> _Made[D]:
        """Where memory runs out, half as many windows are tried; where scores are not finite, the FP32 network."""
        batch_size, fallbacks, spoilt = plan.sw_batch_size, list[str](), list[str]()
        while True:
            decoder = make()
            window = self._warm_up.reference(batch_size) if spoilt else self._window(batch_size)
            try:
                feed(decoder, run(window, image, plan.overlap), stages)
            except (RuntimeError, MemoryError) as error:
                if not exhausted(error) or batch_size == 1:
                    raise
                fallbacks.append(f"Memory did not hold {batch_size} windows at once; fewer were taken.")
                batch_size //= 2
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
            except NonFiniteScores:
                if spoilt or self._is_reference:
                    raise
                how = f"{self._choice.engine}, {self._choice.precision}"
                spoilt.append(f"Scores were not finite ({how}); all of them were computed again in eager fp32.")
            else:
                remarks = spoilt or self._remarks(window)
                return _Made(decoder, fallbacks, remarks, recomputed=bool(spoilt))

    @property
    def _is_reference(self) -> bool:
        """Whether computing again in eager float32 would change nothing."""
        return self._choice.engine == "eager" and self._choice.precision == "fp32"

    def _window(self, batch_size: int) -> SlidingWindow:
        """The warm one, or an eager one for another batch size: compiling that would take longer than it saves."""
        if self._warm is not None and self._choice.sw_batch_size == batch_size:
            return self._warm.window
        # Requests that ask for the same at the same time share batches of it.
        with self._lock:
            window = self._others.get(batch_size)
            if window is None:
                window = self._warm_up.sliding_window(self._module, self._choice, batch_size)
                self._others[batch_size] = window
            return window

    def _remarks(self, used: SlidingWindow) -> list[str]:
        warm = self._warm
        if warm is None or self._choice.engine == "eager" or used is warm.window:
            return []
        return [f"Ran eagerly: only sw_batch_size {self._choice.sw_batch_size} is compiled."]


def _size(image: Image) -> Size:
    """(Z, Y, X)."""
    z, y, x = image.shape[2:]
    return z, y, x


def _ratios(size: Size, volume: Volume) -> tuple[float, float, float]:
    """Voxels of a grid of `size` per voxel of the volume, along (z, y, x)."""
    z, y, x = (after / before for after, before in zip(size, volume.shape[1:], strict=True))
    return z, y, x


def _nothing(_done: int, _total: int) -> None:
    """Nobody counts the windows by which objects are measured."""


def feed(decoder: Taker, slabs: Iterator[Slab], stages: Stages) -> None:
    """Hand every slab to the decoder; the time that it takes counts as stage decode, the rest as windows."""
    while True:
        with stages.measure("windows"):
            slab = next(slabs, None)
        if slab is None:
            return
        with stages.measure("decode"):
            decoder.add(slab.z0, slab.y0, slab.scores)


def check_memory(needed: Estimate, available: int | None) -> None:
    """Raises OutOfMemory where fewer host bytes are available than needed; None: not known."""
    if available is not None and needed.host_bytes > available:
        raise OutOfMemory(
            f"This volume needs about {needed.host_bytes / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are "
            "free; send a smaller part of it, or try again when less is running.",
            needed.host_bytes,
        )


def exhausted(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def translated(needed: Estimate, device: torch.device) -> Iterator[None]:
    """Foreign signs of exhausted memory -> OutOfMemory, and of a device that is gone -> DeviceLost."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            if device.type != "cpu" and not hardware.is_working(device):
                raise DeviceLost(f"{device} has failed and must be started anew with the service.") from error
            raise
        most = max(needed.host_bytes, needed.device_bytes)
        raise OutOfMemory(
            f"There was not enough memory, even for one window at a time; about {most / 2**30:.1f} GiB are needed. "
            "Send a smaller part of the volume, or try again when less is running.",
            most,
        ) from error
