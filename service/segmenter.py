"""One model on one device: Volume -> Segmentation, in a straight line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from service import hardware
from service.config import Settings
from service.engine import compiled, precision, select
from service.engine.prepare import prepare
from service.errors import BadParameter, DeviceLost, OutOfMemory
from service.metrics import Stages
from service.networks import Network, load
from service.planning import Estimate, Plan, activation_bytes, estimate, make_plan
from service.postprocess import Decoder, make_decoder
from service.preprocess import Size, on_grid
from service.preprocess import prepare as prepare_volume
from service.repository import ModelSpec
from service.volume import Extent, Options, OutputKind, Segmentation, Volume
from service.windows import Blending, Image, Slab, SlidingWindow

log = logging.getLogger(__name__)

Cancelled = Callable[[], bool]
Progress = Callable[[int, int], None]


class Result(NamedTuple):
    """What came out.

    seconds    by stage, in order: prepare, windows, decode
    notes      what a user should know about this result
    fallbacks  how often memory did not hold the batch, and a smaller one was taken
    """

    segmentation: Segmentation
    seconds: dict[str, float]
    notes: tuple[str, ...]
    fallbacks: int = 0


@dataclass(frozen=True)
class EngineReport:
    """How a model runs here. `compile_mode` is None unless compiled; `roi_size` and `sw_batch_size` make the shape."""

    device: str
    device_name: str
    engine: str
    precision: str
    memory_format: str
    compile_mode: str | None
    roi_size: Size
    sw_batch_size: int
    overlap: float
    blending: str
    warm_up_seconds: float
    warnings: tuple[str, ...]


class Segmenter:
    """Loads a model once and segments volumes with it. One thread at a time may call `warm_up` and `segment`.

    On CUDA that must always be the same thread, to which inductor ties the graphs that it records.
    Raises ConfigError for a device that is not there, BrokenModel for a model that does not load.
    """

    def __init__(self, spec: ModelSpec, settings: Settings) -> None:
        self.spec = spec
        self._settings = settings
        self._device = hardware.choose_device(settings.device.name)
        if self._device.type == "cpu":
            torch.set_num_threads(settings.device.threads or hardware.usable_cores())
        if settings.engine.cache_folder is not None:
            compiled.use_cache(settings.engine.cache_folder)
        self._precision = precision.choose(settings.engine.precision, hardware.native_precisions(self._device))
        self._format = torch.channels_last_3d if settings.engine.channels_last else torch.contiguous_format
        network = load(spec)
        float32_bytes = activation_bytes(network, (1, spec.input.channels, *spec.input.roi_size))
        self._window_bytes = float32_bytes * self._precision.dtype.itemsize // 4
        self._module = prepare(network, self._device, self._precision.dtype, self._format)
        self._engine: select.Engine | None = None
        self._warm: SlidingWindow | None = None

    def warm_up(self) -> None:
        """Compile and run the network with its one batch shape, until it runs as it always will."""
        window = self._sliding_window(self._module, self._settings.windows.sw_batch_size)
        self._engine = select.build(self._module, window.batch, self._settings.engine)
        self._warm = window.with_network(self._engine.network)
        for warning in self.report().warnings:
            log.warning("%s: %s", self.spec.identifier, warning)

    def segment(
        self,
        volume: Volume,
        options: Options,
        *,
        cancelled: Cancelled = lambda: False,
        progress: Progress = lambda _done, _total: None,
    ) -> Result:
        """Segment one volume on its own grid. `progress(done, total)` counts windows, from 0 on.

        Raises BadParameter for options or channels that do not fit, Cancelled once `cancelled()` is true between two
        batches, OutOfMemory, NonFiniteScores, and DeviceLost.
        """
        plan = make_plan(self.spec, self._settings, options)
        self._check_channels(volume.shape[0], volume.channels)
        needed = self._estimate(volume, plan)
        check_memory(needed, hardware.available_memory())
        stages = Stages()
        with torch.inference_mode(), translated(needed, self._device):
            with stages.measure("prepare"):
                image, notes = prepare_volume(volume, self.spec)
                if self._device.type != "cpu":
                    image = (image if isinstance(image, Tensor) else image.tensor()).to(self._device)
            progress(0, needed.windows)
            decoder, fallbacks, remarks = self._scores(image, plan, volume, stages, cancelled, progress)
            del image
            with stages.measure("decode"):
                segmentation = on_grid(decoder.finish(), volume.shape[1:])
        return Result(segmentation, stages.seconds, (*notes, *fallbacks, *remarks), len(fallbacks))

    def report(self) -> EngineReport:
        """The engine in use; before `warm_up` the one that is being built."""
        engine, windows = self._engine, self._settings.windows
        warnings = engine.warnings if engine else ()
        return EngineReport(
            device=str(self._device),
            device_name=hardware.device_name(self._device),
            engine=engine.kind if engine else "starting",
            precision=self._precision.name,
            memory_format="channels_last_3d" if self._settings.engine.channels_last else "contiguous",
            compile_mode=engine.compile_mode if engine else None,
            roi_size=self.spec.input.roi_size,
            sw_batch_size=windows.sw_batch_size,
            overlap=windows.overlap,
            blending=windows.blending,
            warm_up_seconds=engine.seconds if engine else 0.0,
            warnings=(*([self._precision.warning] if self._precision.warning else []), *warnings),
        )

    def estimate(self, volume: Extent, options: Options) -> Estimate:
        """What segmenting a volume of this shape and voxel size would take. Raises BadParameter like `segment`."""
        plan = make_plan(self.spec, self._settings, options)
        self._check_channels(volume.shape[0], volume.channels if isinstance(volume, Volume) else ())
        return self._estimate(volume, plan)

    def output(self, options: Options) -> OutputKind:
        """What would come back. Raises BadParameter for options that do not fit."""
        return make_plan(self.spec, self._settings, options).output

    def _estimate(self, volume: Extent, plan: Plan) -> Estimate:
        return estimate(self.spec, volume, plan, self._window_bytes, on_host=self._device.type == "cpu")

    def _scores(  # noqa: PLR0913, PLR0917
        self, image: Image, plan: Plan, volume: Volume, stages: Stages, cancelled: Cancelled, progress: Progress
    ) -> tuple[Decoder, list[str], list[str]]:
        """A decoder that has taken in every score, and notes. Where memory runs out, half as many windows are tried."""
        size: Size = (image.shape[2], image.shape[3], image.shape[4])
        batch_size, fallbacks = plan.sw_batch_size, list[str]()
        while True:
            decoder = make_decoder(self.spec, size, plan.output, volume.voxel_size)
            window = self._window(batch_size)
            try:
                feed(decoder, window.run(image, plan.overlap, cancelled=cancelled, progress=progress), stages)
            except (RuntimeError, MemoryError) as error:
                if not exhausted(error) or batch_size == 1:
                    raise
            else:
                return decoder, fallbacks, self._remarks(window)
            fallbacks.append(f"Memory did not hold {batch_size} windows at once; fewer were taken.")
            batch_size //= 2
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _window(self, batch_size: int) -> SlidingWindow:
        """The warm one, or an eager one for another batch size: compiling that would take longer than it saves."""
        if self._warm is not None and len(self._warm.batch) == batch_size:
            return self._warm
        return self._sliding_window(self._module, batch_size)

    def _remarks(self, used: SlidingWindow) -> list[str]:
        if self._engine is None or self._engine.kind == "eager" or used is self._warm:
            return []
        return [f"Ran eagerly: only sw_batch_size {self._settings.windows.sw_batch_size} is compiled."]

    def _sliding_window(self, network: Network, batch_size: int) -> SlidingWindow:
        windows = self._settings.windows
        return SlidingWindow(
            network,
            self.spec.input.channels,
            self.spec.input.roi_size,
            batch_size,
            blending=Blending(windows.blending, windows.sigma),
            device=self._device,
            dtype=self._precision.dtype,
            memory_format=self._format,
        )

    def _check_channels(self, have: int, names: tuple[str, ...]) -> None:
        want = self.spec.input.channels
        if have == want:
            return
        names = names or ("",) * have
        named = ", ".join(f"{index}{f' ({name})' if name else ''}" for index, name in enumerate(names))
        taken = f"{want} channel" + ("s" if want > 1 else "")
        raise BadParameter(
            f"{self.spec.name} takes {taken}, the volume has {have}: {named}; choose with channel= (index or name)."
        )


def feed(decoder: Decoder, slabs: Iterator[Slab], stages: Stages) -> None:
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
            if device.type != "cpu" and not hardware.works(device):
                raise DeviceLost(f"{device} has failed and must be started anew with the service.") from error
            raise
        most = max(needed.host_bytes, needed.device_bytes)
        raise OutOfMemory(
            f"There was not enough memory, even for one window at a time; about {most / 2**30:.1f} GiB are needed. "
            "Send a smaller part of the volume, or try again when less is running.",
            most,
        ) from error
