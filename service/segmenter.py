"""One model on one device: Volume -> Segmentation, in a straight line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from service import hardware
from service.config import Settings
from service.engine import compiled, precision, select
from service.engine.prepare import prepare
from service.errors import BadParameter, OutOfMemory
from service.networks import load
from service.postprocess import Decoder, bytes_per_voxel, make_decoder
from service.preprocess import Size, working_size
from service.preprocess import prepare as prepare_volume
from service.repository import ModelSpec
from service.volume import Options, OutputKind, Segmentation, Volume, label_dtype
from service.windows import Blending, Grid, SlidingWindow

log = logging.getLogger(__name__)


class Result(NamedTuple):
    """`seconds` by stage, in order: prepare, windows, decode. `notes`: what a user should know about this result."""

    segmentation: Segmentation
    seconds: dict[str, float]
    notes: tuple[str, ...]


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


@dataclass(frozen=True)
class Estimate:
    """What a request will take. Bytes are the peak beyond the loaded model; on the CPU all of them are host bytes."""

    windows: int
    sw_batch_size: int
    overlap: float
    working_size: Size
    host_bytes: int
    device_bytes: int


class _Plan(NamedTuple):
    """A request's options after the operator's defaults and limits."""

    output: OutputKind
    sw_batch_size: int
    overlap: float


class Segmenter:
    """Loads a model once and segments volumes with it. One thread at a time may call `segment`.

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
        self._activation_bytes = _activation_bytes(network, (1, spec.input.channels, *spec.input.roi_size))
        self._module = prepare(network, self._device, self._precision.dtype, self._format)
        self._engine: select.Engine | None = None
        self._windows: dict[int, SlidingWindow] = {}

    def warm_up(self) -> None:
        """Compile and run the network with its one batch shape, until it runs as it always will."""
        batch_size = self._settings.windows.sw_batch_size
        window = self._sliding_window(self._module, batch_size)
        self._engine = select.build(self._module, window.batch, self._settings.engine)
        self._windows[batch_size] = self._sliding_window(self._engine.network, batch_size)
        for warning in self.report().warnings:
            log.warning("%s: %s", self.spec.identifier, warning)

    def segment(
        self,
        volume: Volume,
        options: Options,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Result:
        """Segment one volume on its own grid. `progress(done, total)` counts windows.

        Raises BadParameter for options or channels that do not fit, Cancelled once `cancelled()` is true between two
        batches, OutOfMemory, and NonFiniteScores.
        """
        plan = self._plan(options)
        self._check_channels(volume)
        self._check_memory(self.estimate(volume, options))
        seconds = dict.fromkeys(("prepare", "windows", "decode"), 0.0)
        with torch.inference_mode(), _translated(self.estimate(volume, options)):
            with _timed(seconds, "prepare"):
                prepared = prepare_volume(volume, self.spec)
                image = prepared.image.to(self._device)
            size: Size = (image.shape[2], image.shape[3], image.shape[4])
            notes = list(prepared.notes)
            for batch_size in _halvings(plan.sw_batch_size):
                decoder = make_decoder(self.spec, size, plan.output, volume.voxel_size)
                try:
                    self._run(image, decoder, replace_plan(plan, batch_size), seconds, cancelled, progress)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    if batch_size == 1:
                        raise
                    notes.append(f"The device's memory did not hold {batch_size} windows at once; fewer were taken.")
                else:
                    break
            with _timed(seconds, "decode"):
                segmentation = on_grid(decoder.finish(), volume.shape[1:])
        notes += self._batch_notes(plan)
        return Result(replace(segmentation, voxel_size=volume.voxel_size), seconds, tuple(notes))

    def report(self) -> EngineReport:
        """The engine in use; before `warm_up` the one that is being built."""
        engine, windows = self._engine, self._settings.windows
        warnings = engine.warnings if engine else ()
        return EngineReport(
            device=str(self._device),
            device_name=_device_name(self._device),
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

    def estimate(self, volume: Volume, options: Options) -> Estimate:
        """What segmenting would take; only the volume's shape, dtype and voxel size are looked at."""
        plan = self._plan(options)
        size = working_size(volume, self.spec)
        grid = Grid.cover(size, self.spec.input.roi_size, plan.overlap)
        voxels, row = int(np.prod(size)), grid.roi[0] * grid.padded[1] * grid.padded[2]
        outputs = len(self.spec.outputs)
        image = 4 * self.spec.input.channels * int(np.prod(grid.padded))
        windows = 4 * row * (2 * outputs + 3) + plan.sw_batch_size * self._activation_bytes * self._itemsize() // 4
        decoding = bytes_per_voxel(self.spec, plan.output) * voxels
        on_host = self._device.type == "cpu"
        return Estimate(
            windows=grid.count,
            sw_batch_size=plan.sw_batch_size,
            overlap=plan.overlap,
            working_size=size,
            host_bytes=decoding + image + (windows if on_host else 0),
            device_bytes=0 if on_host else image + windows,
        )

    def _run(  # noqa: PLR0913
        self,
        image: torch.Tensor,
        decoder: Decoder,
        plan: _Plan,
        seconds: dict[str, float],
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        with _timed(seconds, "windows"):
            decoding = 0.0
            for slab in self._window(plan.sw_batch_size).run(
                image, plan.overlap, cancelled=cancelled, progress=progress
            ):
                began = time.perf_counter()
                decoder.add(slab.z0, slab.scores)
                decoding += time.perf_counter() - began
        seconds["windows"] -= decoding
        seconds["decode"] += decoding

    def _window(self, batch_size: int) -> SlidingWindow:
        """The warm one, or an eager one for another batch size: compiling for every size that is asked for takes
        longer than it saves."""
        if batch_size not in self._windows:
            return self._sliding_window(self._module, batch_size)
        return self._windows[batch_size]

    def _sliding_window(self, network: Callable[[torch.Tensor], torch.Tensor], batch_size: int) -> SlidingWindow:
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

    def _plan(self, options: Options) -> _Plan:
        windows, limits = self._settings.windows, self._settings.limits
        batch_size = windows.sw_batch_size if options.sw_batch_size is None else options.sw_batch_size
        overlap = windows.overlap if options.overlap is None else options.overlap
        if not 1 <= batch_size <= limits.sw_batch_size:
            raise BadParameter(f"sw_batch_size must be between 1 and {limits.sw_batch_size}, not {batch_size}.")
        if not 0 <= overlap <= limits.overlap:
            raise BadParameter(f"overlap must be between 0 and {limits.overlap}, not {overlap}.")
        return _Plan(self._output(options.output), batch_size, overlap)

    def _output(self, wanted: OutputKind | None) -> OutputKind:
        instances = self.spec.decoding.kind == "instances"
        if wanted == "labels" and not instances:
            raise BadParameter(
                f"{self.spec.name} tells classes apart, not objects; ask for output=classes or output=probabilities."
            )
        return wanted or ("labels" if instances else "classes")

    def _check_channels(self, volume: Volume) -> None:
        have, want = volume.shape[0], self.spec.input.channels
        if have == want:
            return
        named = ", ".join(f"{index}{f' ({name})' if name else ''}" for index, name in enumerate(volume.channels))
        taken = f"{want} channel" + ("s" if want > 1 else "")
        raise BadParameter(
            f"{self.spec.name} takes {taken}, the volume has {have}: {named}; choose with channel= (index or name)."
        )

    def _check_memory(self, estimate: Estimate) -> None:
        available = hardware.cpu().memory_available
        if available is not None and estimate.host_bytes > available:
            raise OutOfMemory(
                f"This volume needs {estimate.host_bytes / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are "
                "free; send a smaller part of it, or try again when less is running.",
                estimate.host_bytes,
            )

    def _batch_notes(self, plan: _Plan) -> list[str]:
        if plan.sw_batch_size in self._windows:
            return []
        return [f"Ran eagerly: only sw_batch_size {self._settings.windows.sw_batch_size} is compiled."]

    def _itemsize(self) -> int:
        return self._precision.dtype.itemsize


def on_grid(segmentation: Segmentation, size: Size) -> Segmentation:
    """The segmentation on a grid of `size` (Z, Y, X): labels by nearest voxel, probabilities trilinear.

    Objects too small for the grid vanish; the remaining ones are renumbered without gaps.
    """
    pixels = segmentation.pixels
    if pixels.shape[-3:] == size:
        return segmentation
    if segmentation.kind == "probabilities":
        scores = torch.from_numpy(pixels)[None]
        resampled = functional.interpolate(scores, size=size, mode="trilinear", align_corners=False)
        return replace(segmentation, pixels=resampled[0].numpy())
    places = (((np.arange(new) + 0.5) * old / new).astype(np.intp) for old, new in zip(pixels.shape, size, strict=True))
    resampled_labels = pixels[np.ix_(*places)]
    if segmentation.kind == "classes":
        return replace(segmentation, pixels=resampled_labels)
    values, inverse = np.unique(resampled_labels, return_inverse=True)
    count = len(values) - int(values[0] == 0)
    numbers = inverse.reshape(size) + int(values[0] != 0)
    return replace(segmentation, pixels=numbers.astype(label_dtype(count)), count=count)


def replace_plan(plan: _Plan, batch_size: int) -> _Plan:
    return plan._replace(sw_batch_size=batch_size)


def _halvings(batch_size: int) -> Iterator[int]:
    while batch_size > 1:
        yield batch_size
        batch_size //= 2
    yield 1


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - began


@contextmanager
def _translated(estimate: Estimate) -> Iterator[None]:
    """Foreign signs of exhausted memory -> OutOfMemory; torch's CPU allocator raises a plain RuntimeError."""
    needed = max(estimate.host_bytes, estimate.device_bytes)
    message = f"There was not enough memory, even for one window at a time; about {needed / 2**30:.1f} GiB are needed."
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(message, needed) from error
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        raise OutOfMemory(message, needed) from error


def _activation_bytes(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Bytes of float32 that the layers' outputs take for one window: the five largest live at about the same time."""
    sizes: list[int] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * 4)

    leaves = [module for module in network.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    with torch.inference_mode():
        network(torch.zeros(shape))
    for hook in hooks:
        hook.remove()
    return sum(sorted(sizes)[-5:])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else hardware.cpu().name
