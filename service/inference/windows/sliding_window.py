"""Sliding-window inference with one fixed batch shape, which yields finished scores as early as possible.

The result equals that of `monai.inferers.sliding_window_inference` (same padding, window positions and weights) to 1e-5
in float32, which the tests check. The implementation differs: windows are copied into a batch buffer that is allocated
once, the last batch is padded instead of having a shape of its own, and the padded image is never created.
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

# Function from windows [N, C, *roi], float32, to raw scores [N, K, *roi].
ScoreWindows = Callable[[Tensor], Tensor]
# Function that returns a context in which the network runs, such as `CudaTimer.measure`.
Measure = Callable[[], AbstractContextManager[object]]


class Image(Protocol):
    """Source of windows: a float32 tensor [1, C, Z, Y, X], or an object that is indexed like one."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape (1, C, Z, Y, X)."""

    def __getitem__(self, box: Box, /) -> Tensor:
        """Return the voxels at (0, channels, z, y, x), float32 [C, z, y, x]."""


@runtime_checkable
class ReadableInto(Protocol):
    """Image that can also be read into existing memory."""

    def read_into(self, box: Box, out: Iterable[Tensor], /) -> None:
        """Write the voxels of `box` into `out`, which has one tensor [z, y, x] of any floating dtype per channel."""


@dataclass(frozen=True)
class SparseImage:
    """Image with skipped windows, whose voxels all get the same scores.

    skipped  first voxels of the skipped windows, from `Grid.positions`; at least one window must not be skipped
    scores   scores of the skipped windows, float32 [K], on the device of the other scores
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
    """Memory of one window in a batch, [C, *roi], and views of its channels."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.channels = whole, whole.unbind()


class _Stream:
    """Batch buffer of one stream. All views are created in advance, because torch takes microseconds for each."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch
        self.slots = tuple(map(WindowSlot, batch.unbind()))
        # View of the first N windows of the batch, at index N.
        self.first_windows = tuple(batch[:length] for length in range(len(batch) + 1))


class SlidingWindow:
    """Runs one network over volumes of any size in batches of fixed shape.

    network                 function from [B, C, *roi] of `dtype` to [B, K, *roi] of any floating dtype
    batch_size              maximum number of windows per call, B; available as `capacity`
    device                  device of the batches, weights and scores
    streams                 number of threads that may call the network concurrently, each with its own batch buffer
    kernels                 used for blending on devices that they support
    accepts_any_batch_size  whether the network also accepts fewer windows, with bitwise equal scores
    owns_scores             whether the scores stay valid after the next call of the network
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
        accepts_any_batch_size: bool = False,
        owns_scores: bool = False,
    ) -> None:
        self.network, self.capacity = network, batch_size
        self.accepts_any_batch_size, self.owns_scores = accepts_any_batch_size, owns_scores
        self._kernels = kernels
        self._roi = roi
        self._blending = blending
        shape = (batch_size, channels, *roi)
        empty = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(streams))
        self._streams = tuple(_Stream(batch.to(memory_format=memory_format)) for batch in empty)

    @property
    def batch(self) -> Tensor:
        """Batch buffer of the first stream, [B, C, *roi]. The network always gets this dtype and these strides."""
        return self._streams[0].batch

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """Batch buffers of all streams."""
        return tuple(stream.batch for stream in self._streams)

    @property
    def streams(self) -> int:
        """Number of threads that may call the network concurrently."""
        return len(self._streams)

    def with_network(
        self, network: Network, *, accepts_any_batch_size: bool = False, owns_scores: bool = False
    ) -> SlidingWindow:
        """Return a copy that runs another network on the batch buffers of this one."""
        other = copy.copy(self)
        other.network, other.accepts_any_batch_size, other.owns_scores = network, accepts_any_batch_size, owns_scores
        return other

    def with_capacity(self, batch_size: int) -> SlidingWindow:
        """Return a copy that computes fewer windows per call, for a network that accepts any batch size."""
        other = copy.copy(self)
        other.capacity = batch_size
        return other

    def slots(self, windows: int) -> int:
        """Return the batch size in which this number of windows is computed."""
        return windows if self.accepts_any_batch_size else self.capacity

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
        """Yield the scores of `image` as contiguous slabs with z slowest, computed in one of the streams.

        Raises Cancelled if `cancelled()` returns true before a batch, and NonFiniteScores for NaN or infinite scores.
        """
        scan = self.scan(image, overlap)
        while scan.left:
            if cancelled():
                raise Cancelled(f"Cancelled after {scan.done} of {scan.total} windows.")
            part = scan.take(self.capacity)
            (scores,) = self.forward([part], stream)
            yield from scan.blend(part.positions, scores)
            progress(scan.done, scan.total)

    def scan(self, image: Image, overlap: float, check: CheckFinite = require_finite) -> WindowScan:
        """Return a scan of `image` that starts at the first window. `check` is applied to finished scores."""
        grid = Grid.cover(as_size(image.shape[2:]), self._roi, overlap)
        setup = BlendingSetup(self._blending, self.batch.device, self._kernels, check)
        return WindowScan(image, grid, setup, owns_scores=self.owns_scores)

    def forward(
        self, parts: Sequence[WindowSlice], stream: int = 0, *, measure: Measure = nullcontext
    ) -> Sequence[Tensor]:
        """Call the network once, on up to `capacity` windows from one or more images.

        Returns the scores of each slice, [B, K, *roi], where B is its number of windows. They are valid until the next
        call of this stream, or permanently if the network owns its scores. A CUDA device may still be computing them.
        Call this in torch's inference mode.
        """
        buffers, taken = self._streams[stream], 0
        for scan, positions in parts:
            scan.fill(
                buffers.slots[taken : taken + len(positions)], buffers.batch[taken : taken + len(positions)], positions
            )
            taken += len(positions)
        length = self.slots(taken)
        for slot in buffers.slots[taken:length]:
            # Clear windows of an earlier batch, which may be the ones that made it fail.
            slot.whole.zero_()
        with measure():
            scores = self.network(buffers.first_windows[length])
        if taken < length:
            scores = scores[:taken]
        if len(parts) == 1:
            return [scores]
        return torch.split(scores, [len(part.positions) for part in parts])


def score_stack(windows: Tensor, compute: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
    """Return the scores, float32 [N, K, *roi], of windows [N, C, *roi], which are computed as one stack.

    compute  yields the scores [1, K, z, y, x] of a stack [1, C, N * z, y, x] in the order of z, without overlap
    """
    count, channels, depth, height, width = windows.shape
    stack = windows.transpose(0, 1).reshape(1, channels, count * depth, height, width)
    scores = torch.cat(list(compute(stack)), 2).float()
    return scores[0].reshape(-1, count, depth, height, width).transpose(0, 1)


class WindowSlice(NamedTuple):
    """Some windows of one image, given by their first voxels."""

    scan: WindowScan
    positions: list[Size]


class WindowScan:
    """Progress of one image: windows are taken in order, computed in any order, and blended in order.

    Created by `SlidingWindow.scan`. One thread at a time may take windows, and one at a time may blend them. Any number
    of threads may fill batches. `total` is the number of windows to compute, `left` counts those not yet taken, and
    `done` those that have been blended.
    """

    def __init__(self, image: Image, grid: Grid, setup: BlendingSetup, *, owns_scores: bool = False) -> None:
        self._setup = setup
        skipped, self._skipped_scores = frozenset[Size](), torch.empty(0)
        if isinstance(image, SparseImage):
            skipped, self._skipped_scores = image.skipped, image.scores.view(1, -1, 1, 1, 1).expand(-1, -1, *grid.roi)
            image = image.image
        self._image, self._grid = image, grid
        # Checked once, because an isinstance check of a protocol is slower than slicing.
        self._readable_into = image if isinstance(image, ReadableInto) else None
        self._owns_scores = owns_scores
        positions = grid.positions()
        self._positions = (position for position in positions if position not in skipped) if skipped else positions
        self._to_blend = grid.positions()
        self._blender: Blender | None = None
        self._padded, self._single = grid.padded != grid.size, grid.count == 1
        # An image that is computed on access would need memory for a whole row.
        has_rows = self._readable_into is None and (isinstance(image, Tensor) or setup.device.type != "cpu")
        self._copies_runs = has_rows and not self._padded
        self._inside = (slice(None), *grid.inside_window)
        self.total = self.left = grid.count - len(skipped)
        self._skips = bool(skipped)
        self.done = 0

    def take(self, max_windows: int) -> WindowSlice:
        """Return up to `max_windows` next windows."""
        positions = list(itertools.islice(self._positions, max_windows))
        self.left -= len(positions)
        return WindowSlice(self, positions)

    def fill(self, slots: Sequence[WindowSlot], batch: Tensor, positions: Sequence[Size]) -> None:
        """Copy the windows at `positions` into a batch [B, C, *roi], of which `slots` are views."""
        if not self._copies_runs:
            for slot, position in zip(slots, positions, strict=True):
                self.fill_slot(slot, position)
            return
        # On a GPU, one copy of many windows is faster than many copies that the host launches one by one.
        first, edge = 0, self._grid.roi[2]
        for run in split_runs(positions):
            row = self._image[self._box(run.start, edge + (run.windows - 1) * run.step)]
            windows = row.unfold(3, edge, run.step).permute(3, 0, 1, 2, 4)
            batch[first : first + run.windows].copy_(windows)
            first += run.windows

    def _box(self, position: Size, width: int) -> Box:
        (z, y, x), (depth, height, _) = position, self._grid.roi
        return (0, slice(None), slice(z, z + depth), slice(y, y + height), slice(x, x + width))

    def fill_slot(self, slot: WindowSlot, position: Size) -> None:
        """Copy the window at `position` into a slot of a batch."""
        box = self._box(position, self._grid.roi[2])
        if self._padded:
            # Clear the voxels of an earlier window in the padding.
            slot.whole.zero_()
            slot = WindowSlot(slot.whole[self._inside])
        if self._readable_into is not None:
            self._readable_into.read_into(box, slot.channels)
        else:
            slot.whole.copy_(self._image[box])

    def blend(self, positions: Sequence[Size], scores: Tensor) -> list[Slab]:
        """Add the scores [B, K, *roi] of the windows at `positions`, and return the slabs that are now final.

        Call this in torch's inference mode. Raises NonFiniteScores.
        """
        if self._single:
            # With a single window, the weights cancel out.
            self.done = 1
            inside = self._setup.check(scores)
            inside = inside[(slice(None), *self._inside)] if self._padded else inside
            return [Slab(0, 0, inside if self._owns_scores else inside.clone())]
        if self._blender is None:
            self._blender = make_blender(self._grid, scores.shape[1], self._setup)
        if not self._skips:
            slabs = self._blender.add(positions, scores)
        else:
            slabs = list[Slab]()
            for position, window in zip(positions, torch.split(scores, 1), strict=True):
                slabs += self._blend_skipped(self._blender, position)
                slabs += self._blender.add([position], window)
        self.done += len(positions)
        if self.done == self.total and self._skips:
            slabs += self._blend_skipped(self._blender, None)
        return slabs

    def _blend_skipped(self, blender: Blender, until: Size | None) -> Iterator[Slab]:
        """Add the skipped windows before the window at `until`, or all remaining ones if it is None."""
        for position in self._to_blend:
            if position == until:
                return
            yield from blender.add([position], self._skipped_scores)
