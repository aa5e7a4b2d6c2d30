"""Sliding-window inference: one fixed batch shape, sums of what windows share, finished scores given away at once.

The result equals `monai.inferers.sliding_window_inference` (same padding, scan positions and importance map), which
the tests hold to 1e-5 in float32. What differs is the work around the network: windows are gathered into one batch
that is allocated once, the last batch is filled up instead of having a shape of its own, and neither the padded image
nor the scores of the whole volume ever exist: windows come in rows along x, rows in layers along z, and of a layer
only the planes that the next one reaches are kept.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from service.core.errors import Cancelled
from service.core.volume import Size
from service.inference.windows.blending import Blender, Blending, Slab, blender, finite
from service.inference.windows.grid import Grid, triple
from service.inference.windows.kernels import Stitching, stitching
from service.models.loader import Network

Box = tuple[int, slice, slice, slice, slice]

# Scores of windows that are not computed, where all are.
NOWHERE = torch.empty(0)


class Image(Protocol):
    """What windows are cut from: a float32 tensor [1, C, Z, Y, X], or what can be indexed like one."""

    @property
    def shape(self) -> Sequence[int]:
        """(1, C, Z, Y, X)."""

    def __getitem__(self, box: Box, /) -> Tensor:
        """The voxels of (0, channels, z, y, x), float32 [C, z, y, x]."""


@runtime_checkable
class Writer(Protocol):
    """An image that can also be written where it is needed."""

    def write(self, box: Box, out: Iterable[Tensor], /) -> None:
        """What indexing with `box` gives, into `out`: for each channel [z, y, x] of any floating dtype."""


@dataclass(frozen=True)
class Sparse:
    """An image of which some windows are not computed: every voxel of these gets the same scores, [K].

    skipped  the first voxels of these windows, as `Grid.positions` gives them; at least one is computed
    scores   float32, where the other scores are
    """

    image: Image
    skipped: frozenset[Size]
    scores: Tensor

    @property
    def shape(self) -> Sequence[int]:
        """(1, C, Z, Y, X)."""
        return self.image.shape

    def __getitem__(self, box: Box, /) -> Tensor:
        """The voxels of the image."""
        return self.image[box]


class WindowSlot:
    """Where one window is put: its place in a batch, [C, *roi], and the channels of that."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.channels = whole, whole.unbind()


class _Stream:
    """The batch of one stream, with all views of it that are ever asked for: torch takes its time to make one."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch
        self.slots = tuple(map(WindowSlot, batch.unbind()))
        # By their number of windows.
        self.beginnings = tuple(batch[:length] for length in range(len(batch) + 1))


class SlidingWindow:
    """Runs one network over volumes of any size, always calling it with one shape, or fewer windows if it is elastic.

    network     [B, C, *roi] -> [B, K, *roi], any floating dtype out; in: `dtype`
    batch_size  B
    device      where batches, weights and scores live
    streams     threads that may call it at the same time, each with a batch of its own
    kernel      what blends, where it suits
    elastic     whether the network takes fewer windows as well, with the same scores to the bit
    lasting     whether its scores stay what they are after its next call
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
        kernel: Stitching = stitching,
        any_batch_size: bool = False,
        owns_scores: bool = False,
    ) -> None:
        self._network, self._any_batch_size, self._owns_scores = network, any_batch_size, owns_scores
        self._kernel = kernel
        self._roi = roi
        self._blending = blending
        shape = (batch_size, channels, *roi)
        empty = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(streams))
        self._streams = tuple(_Stream(batch.to(memory_format=memory_format)) for batch in empty)
        self._capacity = batch_size

    @property
    def batch(self) -> Tensor:
        """The batch buffer of the first stream, [B, C, *roi]: in dtype and strides the network sees no other."""
        return self._streams[0].batch

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """The batch buffers of all streams."""
        return tuple(stream.batch for stream in self._streams)

    @property
    def streams(self) -> int:
        """Threads that may call it at the same time."""
        return len(self._streams)

    @property
    def network(self) -> Network:
        """What the windows run through."""
        return self._network

    @property
    def any_batch_size(self) -> bool:
        """Whether a batch that is not full takes less time than a full one."""
        return self._any_batch_size

    @property
    def owns_scores(self) -> bool:
        """Whether scores are valid beyond the next call of their stream."""
        return self._owns_scores

    def with_network(
        self, network: Network, *, any_batch_size: bool = False, owns_scores: bool = False
    ) -> SlidingWindow:
        """The same windows in the same batch buffers through another network."""
        other = copy.copy(self)
        other._network, other._any_batch_size, other._owns_scores = network, any_batch_size, owns_scores
        return other

    def with_streams(self, streams: int) -> SlidingWindow:
        """The same windows through the same network in so many streams, with batch buffers of their own."""
        other = copy.copy(self)
        other._streams = tuple(_Stream(torch.zeros_like(self.batch)) for _ in range(streams))
        return other

    @property
    def capacity(self) -> int:
        """Windows per call of the network, at most."""
        return self._capacity

    def slots(self, windows: int) -> int:
        """What a batch of so many windows has room for."""
        return windows if self._any_batch_size else self._capacity

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
        """Scores of `image`, as slabs without gaps, z slowest, computed in one of the streams.

        Raises Cancelled when `cancelled()` says so before a batch, NonFiniteScores for NaN or infinite scores.
        """
        scan = self.scan(image, overlap)
        while scan.left:
            if cancelled():
                raise Cancelled(f"given up after {scan.done} of {scan.total} windows")
            part = scan.take(self.capacity)
            (scores,) = self.forward([part], stream)
            yield from scan.blend(part.places, scores)
            progress(scan.done, scan.total)

    def scan(self, image: Image, overlap: float) -> WindowScan:
        """The way of `image` through these windows, from the first on."""
        grid = Grid.cover(triple(image.shape[2:]), self._roi, overlap)
        return WindowScan(image, grid, self._blending, self.batch.device, self._kernel, owns_scores=self._owns_scores)

    def forward(self, parts: Sequence[WindowSlice], stream: int = 0) -> Sequence[Tensor]:
        """Call the network once, on windows of one image or of several, no more than there is `capacity` for.

        Gives the scores of each part, [B, K, *roi] with its number of windows as B, valid until this stream's next
        call, or for good where they are `owns_scores`. To be called in torch's inference mode.
        """
        mine, taken = self._streams[stream], 0
        for scan, places in parts:
            for place in places:
                scan.fill(mine.slots[taken], place)
                taken += 1
        length = self.slots(taken)
        for slot in mine.slots[taken:length]:
            # What an earlier batch left there may be what made it fail.
            slot.whole.zero_()
        scores = self._network(mine.beginnings[length])
        if scores.is_cuda:
            # Who asks how long a batch takes means until it is computed, not until the device was told to.
            torch.cuda.current_stream(scores.device).synchronize()
        if taken < length:
            scores = scores[:taken]
        if len(parts) == 1:
            return [scores]
        return torch.split(scores, [len(part.places) for part in parts])


class WindowSlice(NamedTuple):
    """Some windows of one image, by their places."""

    scan: WindowScan
    places: list[Size]


class WindowScan:
    """One image on its way through windows: taken from it in order, computed anywhere, and blended in order.

    Made by `SlidingWindow.scan`, whose scores are `owns_scores` or not. One thread at a time may take and one at a time
    may blend; filling is anybody's.
    """

    def __init__(  # noqa: PLR0913
        self,
        image: Image,
        grid: Grid,
        blending: Blending,
        device: torch.device,
        kernel: Stitching = stitching,
        *,
        owns_scores: bool = False,
    ) -> None:
        skipped, self._elsewhere = frozenset[Size](), NOWHERE
        if isinstance(image, Sparse):
            skipped, self._elsewhere = image.skipped, image.scores[:, None, None, None]
            image = image.image
        self._image, self._grid = image, grid
        # Asking a protocol takes longer than slicing.
        self._writer = image if isinstance(image, Writer) else None
        self._blending, self._device, self._kernel, self._owns_scores = blending, device, kernel, owns_scores
        places = grid.positions()
        self._positions = (place for place in places if place not in skipped) if skipped else places
        self._to_blend = grid.positions()
        self._blender: Blender | None = None
        self._padded, self._alone = grid.padded != grid.size, grid.count == 1
        lengths = (min(edge, length) for edge, length in zip(grid.roi, grid.size, strict=True))
        # An axis that is shorter than the window lies in its middle.
        inside = (slice(first, first + n) for first, n in zip(grid.before, lengths, strict=True))
        self._inside = (slice(None), *inside)
        # Windows that are computed.
        self.total = self.left = grid.count - len(skipped)
        self._skips = bool(skipped)
        self.done = 0

    def take(self, most: int) -> WindowSlice:
        """The next windows, at most so many."""
        places = list(itertools.islice(self._positions, most))
        self.left -= len(places)
        return WindowSlice(self, places)

    def fill(self, slot: WindowSlot, place: Size) -> None:
        """Put the window at `place` where it belongs."""
        (z, y, x), (depth, height, width) = place, self._grid.roi
        box = (0, slice(None), slice(z, z + depth), slice(y, y + height), slice(x, x + width))
        if self._padded:
            # What an earlier window left there would show in the padding.
            slot.whole.zero_()
            slot = WindowSlot(slot.whole[self._inside])
        if self._writer is not None:
            self._writer.write(box, slot.channels)
        else:
            slot.whole.copy_(self._image[box])

    def blend(self, places: Sequence[Size], scores: Tensor) -> list[Slab]:
        """Take in the scores [B, K, *roi] of the windows at `places`; gives what became final.

        To be called in torch's inference mode. Raises NonFiniteScores.
        """
        if self._alone:
            # Alone in its place, a window has a weight that cancels.
            self.done = 1
            inside = finite(scores, self._kernel)
            inside = inside[(slice(None), *self._inside)] if self._padded else inside
            return [Slab(0, 0, inside if self._owns_scores else inside.clone())]
        if self._blender is None:
            self._blender = blender(self._grid, scores.shape[1], self._blending, self._device, self._kernel)
        slabs = list[Slab]()
        for place, window in zip(places, scores.unbind(), strict=True):
            if self._skips:
                slabs += self._skip(self._blender, place)
            slab = self._blender.add(place, window)
            if slab is not None:
                slabs.append(slab)
        self.done += len(places)
        if self.done == self.total and self._skips:
            slabs += self._skip(self._blender, None)
        return slabs

    def _skip(self, sums: Blender, until: Size | None) -> Iterator[Slab]:
        """Take in the windows that are not computed before the next one that is, or None: all that are left."""
        for place in self._to_blend:
            if place == until:
                return
            slab = sums.add(place, self._elsewhere.expand(-1, *self._grid.roi))
            if slab is not None:
                yield slab
