"""Sliding-window inference with one fixed batch shape, which yields finished scores as early as possible.

The result equals `monai.inferers.sliding_window_inference` (same padding, scan positions and importance map), which
the tests hold to 1e-5 in float32. The work around the network differs: windows are gathered into one batch that is
allocated once, the last batch is filled up instead of having its own shape, and the padded image never exists.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from service.core.errors import Cancelled
from service.core.quantities import Size
from service.inference.windows.blending import (
    Blender,
    Blending,
    BlendingSetup,
    CheckFinite,
    Slab,
    make_blender,
    require_finite,
)
from service.inference.windows.grid import Box, Grid, as_size, split_runs
from service.inference.windows.kernels import WindowKernels, window_kernels
from service.models.network import Network

# Windows [N, C, *roi], float32 -> raw scores [N, K, *roi].
ScoreWindows = Callable[[Tensor], Tensor]
# Returns a context in which the network runs, as `CudaTimer.measure` does.
Measure = Callable[[], AbstractContextManager[object]]


class Image(Protocol):
    """Source of windows: a float32 tensor [1, C, Z, Y, X], or an object that can be indexed like one."""

    @property
    def shape(self) -> Sequence[int]:
        """(1, C, Z, Y, X)."""

    def __getitem__(self, box: Box, /) -> Tensor:
        """Return the voxels of (0, channels, z, y, x), float32 [C, z, y, x]."""


@runtime_checkable
class ReadableInto(Protocol):
    """An image that can also be read into existing memory."""

    def read_into(self, box: Box, out: Iterable[Tensor], /) -> None:
        """Write the voxels of `box` into `out`: one tensor [z, y, x] of any floating dtype for each channel."""


@dataclass(frozen=True)
class SparseImage:
    """An image with windows that are not computed: every voxel of them gets the same scores.

    skipped  first voxels of these windows, from `Grid.positions`; at least one other window is computed
    scores   float32 [K], on the device of the other scores
    """

    image: Image
    skipped: frozenset[Size]
    scores: Tensor

    @property
    def shape(self) -> Sequence[int]:
        return self.image.shape

    def __getitem__(self, box: Box, /) -> Tensor:
        return self.image[box]


class WindowSlot:
    """Memory of one window in a batch, [C, *roi], with views of its channels."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.channels = whole, whole.unbind()


class _Stream:
    """Batch buffer of one stream, with all views of it made in advance, because torch takes microseconds for each."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch
        self.slots = tuple(map(WindowSlot, batch.unbind()))
        # The first windows of the batch, indexed by their number.
        self.first_windows = tuple(batch[:length] for length in range(len(batch) + 1))


class SlidingWindow:
    """One network run over volumes of any size in batches of fixed shape.

    network         [B, C, *roi] of `dtype` -> [B, K, *roi] of any floating dtype
    batch_size      B, the most windows per call; later `capacity`
    device          device of batches, weights and scores
    streams         threads that may call it at the same time, each with its own batch
    kernels         used for blending on devices that they support
    any_batch_size  whether the network takes fewer windows too, with scores equal to the bit
    owns_scores     whether its scores stay valid after its next call
    """

    def __init__(  # noqa: PLR0913
        self,
        network: Network,
        channels: int,
        roi: Size,
        batch_size: int,
        *,
        blending: Blending,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        streams: int = 1,
        kernels: WindowKernels = window_kernels,
        any_batch_size: bool = False,
        owns_scores: bool = False,
    ) -> None:
        self.network, self.capacity = network, batch_size
        self.any_batch_size, self.owns_scores = any_batch_size, owns_scores
        self._kernels = kernels
        self._roi = roi
        self._blending = blending
        shape = (batch_size, channels, *roi)
        empty = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(streams))
        self._streams = tuple(_Stream(batch.to(memory_format=memory_format)) for batch in empty)

    @property
    def batch(self) -> Tensor:
        """Batch buffer of the first stream, [B, C, *roi], with the dtype and strides that the network always sees."""
        return self._streams[0].batch

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """Batch buffers of all streams."""
        return tuple(stream.batch for stream in self._streams)

    @property
    def streams(self) -> int:
        """Number of threads that may call it at the same time."""
        return len(self._streams)

    def with_network(
        self, network: Network, *, any_batch_size: bool = False, owns_scores: bool = False
    ) -> SlidingWindow:
        """Return a copy that runs another network on the batch buffers of this one."""
        other = copy.copy(self)
        other.network, other.any_batch_size, other.owns_scores = network, any_batch_size, owns_scores
        return other

    def with_capacity(self, batch_size: int) -> SlidingWindow:
        """Return a copy that computes fewer windows at once, for a network that takes any number."""
        other = copy.copy(self)
        other.capacity = batch_size
        return other

    def slots(self, windows: int) -> int:
        """Return the size of the batch that this number of windows is computed in."""
        return windows if self.any_batch_size else self.capacity

    @torch.inference_mode()
    def run(
        self,
        image: Image,
        overlap: float,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        stream: int = 0,
    ) -> Iterator[Slab]:
        """Yield the scores of `image` as slabs without gaps, z slowest, computed in one of the streams.

        Raises Cancelled when `cancelled()` returns true before a batch, NonFiniteScores for NaN or infinite scores.
        """
        scan = self.scan(image, overlap)
        while scan.left:
            if cancelled():
                raise Cancelled(f"given up after {scan.done} of {scan.total} windows")
            part = scan.take(self.capacity)
            (scores,) = self.forward([part], stream)
            yield from scan.blend(part.places, scores)
            progress(scan.done, scan.total)

    def scan(self, image: Image, overlap: float, check: CheckFinite = require_finite) -> WindowScan:
        """Return a scan of `image` that begins at its first window; `check` looks at finished scores."""
        grid = Grid.cover(as_size(image.shape[2:]), self._roi, overlap)
        setup = BlendingSetup(self._blending, self.batch.device, self._kernels, check)
        return WindowScan(image, grid, setup, owns_scores=self.owns_scores)

    def forward(
        self, parts: Sequence[WindowSlice], stream: int = 0, *, measure: Measure = nullcontext
    ) -> Sequence[Tensor]:
        """Call the network once, on up to `capacity` windows of one image or several.

        Returns the scores of each part, [B, K, *roi] with its number of windows as B. They are valid until this
        stream's next call, or for good where the network owns its scores. Call it in torch's inference mode.
        A CUDA device may still be computing them.
        """
        buffers, taken = self._streams[stream], 0
        for scan, places in parts:
            scan.fill(buffers.slots[taken : taken + len(places)], buffers.batch[taken : taken + len(places)], places)
            taken += len(places)
        length = self.slots(taken)
        for slot in buffers.slots[taken:length]:
            # Windows of an earlier batch may be the ones that made it fail.
            slot.whole.zero_()
        with measure():
            scores = self.network(buffers.first_windows[length])
        if taken < length:
            scores = scores[:taken]
        if len(parts) == 1:
            return [scores]
        return torch.split(scores, [len(part.places) for part in parts])


def score_stack(windows: Tensor, compute: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
    """Return the scores, float32 [N, K, *roi], of windows [N, C, *roi], which run as a stack without overlap.

    compute  yields the scores [1, K, z, y, x] of a stack [1, C, N * z, y, x] in the order of z
    """
    count, channels, depth, height, width = windows.shape
    stack = windows.transpose(0, 1).reshape(1, channels, count * depth, height, width)
    scores = torch.cat(list(compute(stack)), 2).float()
    return scores[0].reshape(-1, count, depth, height, width).transpose(0, 1)


class WindowSlice(NamedTuple):
    """Some windows of one image, by their first voxels."""

    scan: WindowScan
    places: list[Size]


class WindowScan:
    """Progress of one image: windows are taken in order, computed in any order, and blended in order.

    `SlidingWindow.scan` makes it. One thread at a time may take and one at a time may blend; any thread may fill.
    `total`, `left` and `done` count the windows that are computed, that were not taken yet, and that were blended.
    """

    def __init__(self, image: Image, grid: Grid, setup: BlendingSetup, *, owns_scores: bool = False) -> None:
        self._setup = setup
        skipped, self._skipped_scores = frozenset[Size](), torch.empty(0)
        if isinstance(image, SparseImage):
            skipped, self._skipped_scores = image.skipped, image.scores.view(1, -1, 1, 1, 1).expand(-1, -1, *grid.roi)
            image = image.image
        self._image, self._grid = image, grid
        # Checked once, because an isinstance check of a protocol takes longer than slicing.
        self._readable_into = image if isinstance(image, ReadableInto) else None
        self._owns_scores = owns_scores
        places = grid.positions()
        self._positions = (place for place in places if place not in skipped) if skipped else places
        self._to_blend = grid.positions()
        self._blender: Blender | None = None
        self._padded, self._single = grid.padded != grid.size, grid.count == 1
        # An image that is computed where it is read would need the memory of a whole row.
        has_rows = self._readable_into is None and (isinstance(image, Tensor) or setup.device.type != "cpu")
        self._copies_runs = has_rows and not self._padded
        self._inside = (slice(None), *grid.inside_window)
        self.total = self.left = grid.count - len(skipped)
        self._skips = bool(skipped)
        self.done = 0

    def take(self, most: int) -> WindowSlice:
        """Return the next windows, at most `most`."""
        places = list(itertools.islice(self._positions, most))
        self.left -= len(places)
        return WindowSlice(self, places)

    def fill(self, slots: Sequence[WindowSlot], batch: Tensor, places: Sequence[Size]) -> None:
        """Copy the windows at `places` into a batch [B, C, *roi], of which `slots` are views."""
        if not self._copies_runs:
            for slot, place in zip(slots, places, strict=True):
                self.fill_slot(slot, place)
            return
        # On a GPU one copy of many windows is faster than many copies, which the host launches one by one.
        first, edge = 0, self._grid.roi[2]
        for run in split_runs(places):
            row = self._image[self._box(run.start, edge + (run.windows - 1) * run.step)]
            windows = row.unfold(3, edge, run.step).permute(3, 0, 1, 2, 4)
            batch[first : first + run.windows].copy_(windows)
            first += run.windows

    def _box(self, place: Size, width: int) -> Box:
        (z, y, x), (depth, height, _) = place, self._grid.roi
        return (0, slice(None), slice(z, z + depth), slice(y, y + height), slice(x, x + width))

    def fill_slot(self, slot: WindowSlot, place: Size) -> None:
        """Copy the window at `place` into its memory in a batch."""
        box = self._box(place, self._grid.roi[2])
        if self._padded:
            # An earlier window would show in the padding.
            slot.whole.zero_()
            slot = WindowSlot(slot.whole[self._inside])
        if self._readable_into is not None:
            self._readable_into.read_into(box, slot.channels)
        else:
            slot.whole.copy_(self._image[box])

    def blend(self, places: Sequence[Size], scores: Tensor) -> list[Slab]:
        """Add the scores [B, K, *roi] of the windows at `places`, and return the slabs that became final.

        Call it in torch's inference mode. Raises NonFiniteScores.
        """
        if self._single:
            # The weight of a single window cancels.
            self.done = 1
            inside = self._setup.check(scores)
            inside = inside[(slice(None), *self._inside)] if self._padded else inside
            return [Slab(0, 0, inside if self._owns_scores else inside.clone())]
        if self._blender is None:
            self._blender = make_blender(self._grid, scores.shape[1], self._setup)
        if not self._skips:
            slabs = self._blender.add(places, scores)
        else:
            slabs = list[Slab]()
            for place, window in zip(places, torch.split(scores, 1), strict=True):
                slabs += self._blend_skipped(self._blender, place)
                slabs += self._blender.add([place], window)
        self.done += len(places)
        if self.done == self.total and self._skips:
            slabs += self._blend_skipped(self._blender, None)
        return slabs

    def _blend_skipped(self, blender: Blender, until: Size | None) -> Iterator[Slab]:
        """Add the skipped windows before the window at `until`; None: all that are left."""
        for place in self._to_blend:
            if place == until:
                return
            yield from blender.add([place], self._skipped_scores)
