"""What a request will take before anything runs: its options after the operator's choices, its windows, its memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import nn

from service.core.config import Settings
from service.core.errors import BadParameter, TooLarge
from service.core.volume import (
    Description,
    Diameter,
    DiameterSetting,
    Extent,
    Options,
    OutputKind,
    Size,
    Volume,
    VoxelSize,
)
from service.inference.decoding.decoders import decoding_bytes
from service.inference.decoding.watershed_kernel import CPU
from service.inference.resample import working_size
from service.inference.windows.blending import kept_floats
from service.inference.windows.grid import Grid
from service.inference.windows.kernels import Stitching, stitching
from service.models.module_tree import iter_modules
from service.models.spec import Instances, ModelSpec

# Windows per call where the operator leaves that open and nothing was tuned.
UNTUNED_BATCH = 2


# So many estimates are remembered for a model.
ESTIMATES = 64


class _Extent(NamedTuple):
    """All that an estimate looks at of a volume."""

    shape: tuple[int, int, int, int]
    voxel_size: VoxelSize | None


class Plan(NamedTuple):
    """A request's options after the operator's defaults and limits.

    diameter    of the objects, where the volume is resampled by it
    estimated   whether it is still to be estimated from the stack; until then the stack counts as it is sampled
    skip_below  grey value of windows that are not computed; None: all are
    """

    output: OutputKind
    sw_batch_size: int
    overlap: float
    diameter: Diameter | None = None
    estimated: bool = False
    skip_below: float | Literal["auto"] | None = None


@dataclass(frozen=True)
class Estimate:
    """What a request will take. Bytes are the peak beyond the loaded model; on the CPU all of them are host bytes.

    Pages of the stack, which is read from a mapped file, are not among them: the system takes them back at need.
    """

    windows: int
    sw_batch_size: int
    overlap: float
    working_size: Size
    host_bytes: int
    device_bytes: int


def make_plan(spec: ModelSpec, settings: Settings, options: Options, tuned: int = UNTUNED_BATCH) -> Plan:
    """`tuned` is the batch size where the operator leaves it open.

    Raises BadParameter for options beyond the operator's limits, for outputs that the model does not have, and for a
    diameter that it cannot estimate.
    """
    windows, limits = settings.windows, settings.limits
    configured = tuned if windows.sw_batch_size == "auto" else windows.sw_batch_size
    batch_size = configured if options.sw_batch_size is None else options.sw_batch_size
    overlap = windows.overlap if options.overlap is None else options.overlap
    if not 1 <= batch_size <= limits.sw_batch_size:
        raise BadParameter(f"sw_batch_size must be between 1 and {limits.sw_batch_size}, not {batch_size}.")
    if not 0 <= overlap <= limits.overlap:
        raise BadParameter(f"overlap must be between 0 and {limits.overlap}, not {overlap}.")
    diameter = None if isinstance(options.diameter, str) else options.diameter
    below = windows.skip_below if options.skip_below is None else options.skip_below
    skip_below = None if below == "none" else below
    return Plan(_output(spec, options.output), batch_size, overlap, diameter, _estimated(spec, options), skip_below)


def estimate(  # noqa: PLR0913
    spec: ModelSpec,
    volume: Extent,
    plan: Plan,
    window_bytes: int,
    *,
    on_host: bool,
    streams: int = 1,
    kernel: Stitching = stitching,
) -> Estimate:
    """What a volume of this shape and voxel size will take.

    window_bytes  what the network's layers take for one window
    streams       batches that are computed at the same time, if there are so many
    on_host       the device's memory is the host's
    kernel        what blends, where it suits
    """
    size = working_size(volume, spec, plan.diameter)
    grid = Grid.cover(size, spec.input.roi_size, plan.overlap)
    # Pixels become float32 where a window reads them, unless the whole volume is resampled or lies on the device.
    resampled = size != tuple(volume.shape[1:])
    stored = math.prod(volume.shape[1:]) if resampled else 0
    image = 4 * spec.input.channels * (math.prod(size) + stored) if resampled or not on_host else 0
    # What blending keeps, and the slabs that leave it: one is decoded while those of the next batches wait.
    (depth, height, _), (_, _, along) = grid.roi, grid.padded
    at_once = min(streams, -(-grid.count // plan.sw_batch_size)) * plan.sw_batch_size
    slabs = 2 + -(-at_once // len(grid.starts[2]))
    if plan.skip_below is not None:
        # Before each window that is computed, and behind the last.
        skipped = grid.rows_to_skip(len(spec.outputs), plan.sw_batch_size)
        slabs += min(at_once * (skipped + 1) + skipped, grid.rows)
    # Of the rows of slabs only the last leaves as a whole.
    step = max((after - start for start, after in itertools.pairwise(grid.starts[1])), default=height)
    rows = height if grid.count == 1 else height + (slabs - 1) * step
    outputs = len(spec.outputs)
    kept = kept_floats(grid, outputs, by_kernel=on_host and kernel.suits(CPU))
    running = 4 * (kept + outputs * depth * along * rows) + at_once * window_bytes
    decoding = decoding_bytes(spec, plan.output, size, on_host=on_host)
    # Where the result lies on disk, the planes that a layer of windows is cut from are in memory.
    planes = 4 * volume.shape[0] * math.prod(volume.shape[2:]) * min(depth, volume.shape[1]) if decoding.disk else 0
    return Estimate(
        windows=grid.count,
        sw_batch_size=plan.sw_batch_size,
        overlap=plan.overlap,
        working_size=size,
        host_bytes=decoding.host + planes + image + (running if on_host else 0),
        device_bytes=0 if on_host else decoding.device + image + running,
    )


@dataclass(frozen=True)
class Estimator:
    """What can be said of requests to a model before it is loaded, or with what is known once it is.

    sw_batch_size  windows per call where the operator leaves that open
    window_bytes   that the network's layers take for one window; None: as usual
    score_bytes    that it takes for one instead where windows come `sw_batch_size` at a time; None: the same
    on_host        the device's memory is the host's
    streams        batches of so many windows that are computed at the same time
    """

    spec: ModelSpec
    settings: Settings
    sw_batch_size: int = UNTUNED_BATCH
    window_bytes: int | None = None
    on_host: bool = True
    streams: int = 1
    score_bytes: int | None = None

    def plan(self, options: Options) -> Plan:
        """See `make_plan`."""
        return self._planned(options)

    @cached_property
    def _planned(self) -> Callable[[Options], Plan]:
        """Of the last few options; see `_needed`."""
        spec, settings, tuned = self.spec, self.settings, self.sw_batch_size
        return lru_cache(maxsize=ESTIMATES)(lambda options: make_plan(spec, settings, options, tuned))

    def output(self, options: Options) -> OutputKind:
        """What would come back. Raises BadParameter for options that do not fit."""
        return self.plan(options).output

    def object_size(self, options: Options) -> DiameterSetting:
        """What would be done about the width of objects. Raises BadParameter for options that do not fit."""
        plan = self.plan(options)
        return "auto" if plan.estimated else plan.diameter or "none"

    def estimate(self, volume: Extent, options: Options) -> Estimate:
        """What segmenting a volume of this shape and voxel size would take.

        Raises BadParameter for options or channels that do not fit, and TooLarge for more windows than may be.
        """
        plan = self.plan(options)
        self._check_channels(volume)
        needed = self._needed(_Extent(volume.shape, volume.voxel_size), plan)
        if needed.windows > (most := self.settings.limits.windows):
            raise TooLarge(
                f"The volume would take {needed.windows} windows, and this service computes up to {most} for one"
                " volume. Crop it, or ask for less overlap or a larger diameter."
            )
        return needed

    @cached_property
    def _needed(self) -> Callable[[_Extent, Plan], Estimate]:
        """What stacks take: of the last few, as it is asked several times for each, and clients send such of one kind.

        Nothing of it refers back to this object, which would then outlive a model that is unloaded.
        """
        spec, on_host, most, together = self.spec, self.on_host, self.streams, self.sw_batch_size
        shape = (1, spec.input.channels, *spec.input.roi_size)
        window_bytes = usual_bytes(shape) if self.window_bytes is None else self.window_bytes
        usually = window_bytes if self.score_bytes is None else self.score_bytes

        @lru_cache(maxsize=ESTIMATES)
        def needed(volume: _Extent, plan: Plan) -> Estimate:
            streams = most if plan.sw_batch_size >= together else 1
            nbytes = usually if plan.sw_batch_size == together else window_bytes
            return estimate(spec, volume, plan, nbytes, on_host=on_host, streams=streams)

        return needed

    def _check_channels(self, volume: Extent) -> None:
        have, want = volume.shape[0], self.spec.input.channels
        if have == want:
            return
        names = volume.channels if isinstance(volume, Volume | Description) else ()
        if len(names) != have:
            names = ("",) * have
        named = ", ".join(f"{index}{f' ({name})' if name else ''}" for index, name in enumerate(names))
        taken = f"{want} channel" + ("s" if want > 1 else "")
        raise BadParameter(
            f"{self.spec.name} takes {taken}, the volume has {have}: {named}; choose with channel= (index or name)."
        )


def activation_bytes(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Bytes of float32 that layers take for one input of `shape`: about five of the largest outputs live at once."""
    with torch.inference_mode():
        return watched(network, torch.zeros(shape))[1]


def watched(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The scores of `network` for `x`, and what `activation_bytes` says of that."""
    sizes: list[int] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * 4)

    leaves = [module for module in iter_modules(network) if not list(module.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    try:
        scores: torch.Tensor = network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return scores, sum(sorted(sizes)[-5:]) if leaves else usual_bytes(tuple(x.shape))


def usual_bytes(shape: tuple[int, ...]) -> int:
    """The same where nothing can be watched; 32 channels at full resolution are usual."""
    return 5 * 32 * 4 * math.prod((shape[0], *shape[2:]))


def _estimated(spec: ModelSpec, options: Options) -> bool:
    """Whether the width of the objects is to be estimated."""
    if options.diameter == "auto" and (spec.input.diameter is None or not isinstance(spec.decoding, Instances)):
        raise BadParameter(f"{spec.name} does not say how wide it wants objects to be; leave diameter out.")
    return options.diameter == "auto" or (options.diameter is None and spec.input.estimate_diameter)


def _output(spec: ModelSpec, wanted: OutputKind | None) -> OutputKind:
    instances = spec.decoding.kind == "instances"
    if wanted == "labels" and not instances:
        raise BadParameter(
            f"{spec.name} tells classes apart, not objects; ask for output=classes or output=probabilities."
        )
    return wanted or ("labels" if instances else "classes")
