"""Sliding-window inference in batches of a fixed shape. Finished scores are yielded as early as possible.

Padding, window positions and weights are the same as in `monai.inferers.sliding_window_inference`. Tests check that the
scores agree to within 1e-5 in float32. The implementation differs: windows are copied into a batch buffer that is
allocated once, the last batch is padded to the fixed shape, and the padded image is never created.
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
    FiniteCheck,
    Slab,
    make_blender,
    require_finite,
)
from service.inference.windows.grid import Box, Grid, as_size, scale_positions, split_runs
from service.inference.windows.kernels import WindowKernels, window_kernels
from service.inference.windows.slots import StreamBuffer, WindowSlot, fill_with_mirror_images
from service.models.network import Network

# Function that computes the raw scores, float32 [N, K, *roi], of windows, float32 [N, C, *roi].
ScoreWindows = Callable[[Tensor], Tensor]
# Function that returns a context manager in which the network is run, such as `CudaTimer.measure`.
Measure = Callable[[], AbstractContextManager[object]]


class Image(Protocol):
    """Source of windows: a float32 tensor [1, C, Z, Y, X], or an object that is indexed like one."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape (1, C, Z, Y, X)."""

    def __getitem__(self, box: Box, /) -> Tensor:
        """Return the voxels at (0, channels, z, y, x), float32 [C, z, y, x]."""


@runtime_checkable
class SupportsReadInto(Protocol):
    """Image that can also be read into existing memory."""

    def read_into(self, box: Box, out: Iterable[Tensor], /) -> None:
        """Write the voxels of `box` to `out`: one tensor [z, y, x] of any floating-point dtype per channel."""


@dataclass(frozen=True)
class SparseImage:
    """Image with skipped windows. All voxels of skipped windows get the same scores.

    skipped_positions  first voxels of the skipped windows, as in `Grid.positions`; not all windows may be skipped
    scores             scores of the skipped windows, float32 [K], on the same device as the computed scores
    """

    image: Image
    skipped_positions: frozenset[Size]
    scores: Tensor

    @property
    def shape(self) -> Sequence[int]:
        return self.image.shape

    def __getitem__(self, box: Box, /) -> Tensor:
        return self.image[box]


class SlidingWindow:
    """Runs one network over volumes of any size in batches of fixed shape.

    network                  function that maps windows [B, C, *roi] of `dtype` to scores [B, K, *roi] of any
                             floating-point dtype
    batch_size               maximum number of windows per call, B; available as `capacity`
    device                   device of the batches, blending weights and scores
    streams                  number of threads that may call the network concurrently, each with its own batch buffer
    kernels                  C++ kernels, used for blending on the devices that they support
    accepts_partial_batches  whether the network also accepts fewer windows, and returns bitwise equal scores for them
    owns_scores              whether the scores remain valid after the next call to the network
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
        accepts_partial_batches: bool = False,
        owns_scores: bool = False,
    ) -> None:
        self.network, self.capacity = network, batch_size
        self.accepts_partial_batches, self.owns_scores = accepts_partial_batches, owns_scores
        self._kernels = kernels
        self._roi, self._blending = roi, blending
        shape = (batch_size, channels, *roi)
        buffers = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(streams))
        self._streams = tuple(StreamBuffer(batch.to(memory_format=memory_format)) for batch in buffers)

    @property
    def batch(self) -> Tensor:
        """Batch buffer of the first stream, [B, C, *roi]. The dtype and strides of all batches are the same."""
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
        self, network: Network, *, accepts_partial_batches: bool = False, owns_scores: bool = False
    ) -> SlidingWindow:
        """Return a copy that runs another network and shares the batch buffers of this object."""
        other = copy.copy(self)
        other.network, other.accepts_partial_batches, other.owns_scores = network, accepts_partial_batches, owns_scores
        return other

    def with_size(self, roi: Size, network: Network) -> SlidingWindow:
        """Return a copy with its own batch buffers for another window size, which `network` must accept."""
        other = self.with_network(network)
        other._roi, shape = roi, (*self.batch.shape[:2], *roi)
        other._streams = tuple(StreamBuffer(batch.new_zeros(shape)) for batch in self.batches)
        return other

    def with_capacity(self, batch_size: int) -> SlidingWindow:
        """Return a copy that processes up to `batch_size` windows per call. The network must accept such batches."""
        other = copy.copy(self)
        other.capacity = batch_size
        return other

    def get_batch_size(self, num_windows: int) -> int:
        """Return the size of the batch that is used for this number of windows."""
        return num_windows if self.accepts_partial_batches else self.capacity

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
        """Compute the scores of `image` in one of the streams, and yield them as adjacent slabs in order of z, then y.

        Raises Cancelled if `cancelled()` returns true before a batch, and NonFiniteScores for NaN or infinite scores.
        """
        scan = self.scan(image, overlap)
        while scan.num_remaining:
            if cancelled():
                raise Cancelled(f"The request was canceled after {scan.num_blended} of {scan.num_windows} windows.")
            window_slice = scan.take(self.capacity)
            (scores,) = self.forward([window_slice], stream)
            yield from scan.blend(window_slice.positions, scores)
            progress(scan.num_blended, scan.num_windows)

    def scan(self, image: Image, overlap: float, check_scores: FiniteCheck = require_finite) -> WindowScan:
        """Return a scan of `image` that starts at the first window. `check_scores` is applied to finished scores."""
        grid = Grid.cover(as_size(image.shape[2:]), self._roi, overlap, self._blending.tiling)
        setup = BlendingSetup(self._blending, self.batch.device, self._kernels, check_scores)
        return WindowScan(image, grid, setup, owns_scores=self.owns_scores, step=self._blending.tiling.step)

    def forward(
        self, window_slices: Sequence[WindowSlice], stream: int = 0, *, measure: Measure = nullcontext
    ) -> Sequence[Tensor]:
        """Call the network once, on up to `capacity` windows from one or more images.

        Returns the scores of each slice, [B, K, *roi], where B is the number of windows in the slice. The scores are
        valid until the next call for this stream, or permanently if the network owns its scores. A CUDA device may
        still be computing them. Call this in torch's inference mode.
        """
        buffers, num_taken = self._streams[stream], 0
        for scan, positions in window_slices:
            scan.fill(
                buffers.slots[num_taken : num_taken + len(positions)],
                buffers.batch[num_taken : num_taken + len(positions)],
                positions,
            )
            num_taken += len(positions)
        batch_size = self.get_batch_size(num_taken)
        for slot in buffers.slots[num_taken:batch_size]:
            # Clear the windows of an earlier batch, because they may be the ones that made that batch fail.
            slot.memory.zero_()
        with measure():
            scores = self.network(buffers.first_windows[batch_size])
        if num_taken < batch_size:
            scores = scores[:num_taken]
        if len(window_slices) == 1:
            return [scores]
        return torch.split(scores, [len(window_slice.positions) for window_slice in window_slices])


def score_stack(windows: Tensor, compute_slabs: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
    """Return the scores, float32 [N, K, *roi], of windows [N, C, *roi], which are processed as one stack.

    compute_slabs  yields the scores [1, K, z, y, x] of a stack [1, C, N * z, y, x] in order of z, without overlap
    """
    count, channels, depth, height, width = windows.shape
    stack = windows.transpose(0, 1).reshape(1, channels, count * depth, height, width)
    scores = torch.cat(list(compute_slabs(stack)), 2).float()
    return scores[0].reshape(-1, count, depth, height, width).transpose(0, 1)


class WindowSlice(NamedTuple):
    """Some windows of one image. `positions` are their first voxels."""

    scan: WindowScan
    positions: list[Size]


class WindowScan:
    """Progress through the windows of one image: they are taken in order, computed in any order, and blended in order.

    Created by `SlidingWindow.scan`. One thread at a time may take windows, and one at a time may blend them. Any number
    of threads may fill batches.

    num_windows    number of windows to compute
    num_remaining  number of windows that have not been taken yet
    num_blended    number of windows that have been blended
    """

    def __init__(
        self, image: Image, grid: Grid, setup: BlendingSetup, *, owns_scores: bool = False, step: Size = (1, 1, 1)
    ) -> None:
        self._setup, self._step, self._score_grid = setup, step, grid.divide(step)
        skipped, self._skipped_scores = frozenset[Size](), torch.empty(0)
        if isinstance(image, SparseImage):
            skipped, self._skipped_scores = (
                image.skipped_positions,
                image.scores.view(1, -1, 1, 1, 1).expand(-1, -1, *self._score_grid.window_size),
            )
            image = image.image
        self._image, self._grid = image, grid
        # Check this only once, because an isinstance check for a protocol is slower than slicing.
        self._direct_image = image if isinstance(image, SupportsReadInto) else None
        self._owns_scores = owns_scores
        positions = grid.positions()
        self._positions = (position for position in positions if position not in skipped) if skipped else positions
        self._positions_to_blend = self._score_grid.positions()
        self._blender: Blender | None = None
        self._is_padded, self._is_single_window = grid.padded_size != grid.size, grid.num_windows == 1
        # Reading a row of an image that is computed on access would need memory for the whole row.
        can_read_rows = self._direct_image is None and (isinstance(image, Tensor) or setup.device.type != "cpu")
        self._can_copy_runs = can_read_rows and not self._is_padded
        self._valid_scores = (slice(None), slice(None), *self._score_grid.valid_region)
        self.num_windows = self.num_remaining = grid.num_windows - len(skipped)
        self._has_skipped_windows = bool(skipped)
        self.num_blended = 0

    def take(self, max_windows: int) -> WindowSlice:
        """Return the next windows, up to `max_windows` of them."""
        positions = list(itertools.islice(self._positions, max_windows))
        self.num_remaining -= len(positions)
        return WindowSlice(self, positions)

    def fill(self, slots: Sequence[WindowSlot], batch: Tensor, positions: Sequence[Size]) -> None:
        """Copy the windows at `positions` into a batch [B, C, *roi]. `slots` are views of the batch."""
        if not self._can_copy_runs:
            for slot, position in zip(slots, positions, strict=True):
                self.fill_slot(slot, position)
            return
        # On a GPU, copying many windows at a time is faster than launching one copy per window.
        first, window_width = 0, self._grid.window_size[2]
        for run in split_runs(positions):
            row = self._image[self._get_box(run.start, window_width + (run.num_windows - 1) * run.step)]
            windows = row.unfold(3, window_width, run.step).permute(3, 0, 1, 2, 4)
            batch[first : first + run.num_windows].copy_(windows)
            first += run.num_windows

    def _get_box(self, position: Size, width: int) -> Box:
        (z, y, x), (depth, height, _) = position, self._grid.window_size
        return (0, slice(None), slice(z, z + depth), slice(y, y + height), slice(x, x + width))

    def fill_slot(self, slot: WindowSlot, position: Size) -> None:
        """Copy the window at `position` into a slot of a batch."""
        if not self._is_padded:
            self._read(self._get_box(position, self._grid.window_size[2]), slot)
            return
        # The padding may still contain voxels of an earlier window.
        slot.memory.zero_()
        reading = self._grid.locate(position)
        self._read((0, slice(None), *reading.box), slot.get_part(reading))
        slot.mirror_end(self._grid, reading)
        if self._grid.is_mirrored:
            fill_with_mirror_images(slot.memory, reading.targets)

    def _read(self, box: Box, slot: WindowSlot) -> None:
        if self._direct_image is not None:
            self._direct_image.read_into(box, slot.channels)
        else:
            slot.memory.copy_(self._image[box])

    def blend(self, positions: Sequence[Size], scores: Tensor) -> list[Slab]:
        """Add the scores [B, K, *roi] of the windows at `positions`, and return the slabs that are now final.

        Call this in torch's inference mode. Raises NonFiniteScores for NaN or infinite scores.
        """
        if self._is_single_window:
            # If there is only one window, the weights cancel out.
            self.num_blended = 1
            valid_scores = self._setup.check_scores(scores)
            valid_scores = valid_scores[self._valid_scores] if self._is_padded else valid_scores
            return [Slab(0, 0, valid_scores if self._owns_scores else valid_scores.clone())]
        positions = scale_positions(positions, self._step)
        if self._blender is None:
            self._blender = make_blender(self._score_grid, scores.shape[1], self._setup)
        if not self._has_skipped_windows:
            slabs = self._blender.add(positions, scores)
        else:
            slabs = list[Slab]()
            for position, window in zip(positions, torch.split(scores, 1), strict=True):
                slabs += self._blend_skipped(self._blender, position)
                slabs += self._blender.add([position], window)
        self.num_blended += len(positions)
        if self.num_blended == self.num_windows and self._has_skipped_windows:
            slabs += self._blend_skipped(self._blender, None)
        return slabs

    def _blend_skipped(self, blender: Blender, next_position: Size | None) -> Iterator[Slab]:
        """Add the skipped windows before the window at `next_position`, or all remaining ones if it is None."""
        for position in self._positions_to_blend:
            if position == next_position:
                return
            yield from blender.add([position], self._skipped_scores)
