"""Sliding-window inference: one fixed batch shape, buffers for one row of windows, finished scores given away at once.

The result equals `monai.inferers.sliding_window_inference` (same padding, scan positions and importance map), which
the tests hold to 1e-5 in float32. What differs is the work around the network: windows are gathered into one batch
that is allocated once, the last batch is filled up instead of having a shape of its own, and neither the padded image
nor the scores of the whole volume ever exist: windows come in rows along x, rows in layers along z, and of a layer
only the planes that the next one reaches are kept.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from service.errors import Cancelled, NonFiniteScores
from service.networks import Network

Size = tuple[int, int, int]
Box = tuple[int, slice, slice, slice, slice]

LEAST_WEIGHT = 1e-3

# Scores of windows that are not computed become final all at once: no more bytes of them than these at a time.
SKIPPED_BYTES = 2**26


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

    def write(self, box: Box, out: Tensor, /) -> None:
        """What indexing with `box` gives, into `out`, [C, z, y, x] of any floating dtype."""


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


class Slab(NamedTuple):
    """Finished scores, float32 [1, K, z, y, X], of the planes from `z0` and the rows from `y0` on."""

    z0: int
    y0: int
    scores: Tensor


@dataclass(frozen=True)
class Grid:
    """Where the windows lie on a volume of `size` (Z, Y, X) that is padded to at least one window.

    roi       edges of a window
    before    voxels of padding in front of each axis
    padded    edges of the padded volume
    starts    first voxel of the windows along each axis, in the padded volume
    """

    size: Size
    roi: Size
    before: Size
    padded: Size
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @classmethod
    def cover(cls, size: Size, roi: Size, overlap: float) -> Grid:
        """The positions that MONAI would take for this overlap (a share of the window, 0 <= overlap < 1)."""
        missing = [max(edge - length, 0) for edge, length in zip(roi, size, strict=True)]
        padded = _triple([length + m for length, m in zip(size, missing, strict=True)])
        steps = [_step(length, edge, overlap) for length, edge in zip(padded, roi, strict=True)]
        z, y, x = (_starts(length, edge, step) for length, edge, step in zip(padded, roi, steps, strict=True))
        return cls(size, roi, _triple([m // 2 for m in missing]), padded, (z, y, x))

    @property
    def count(self) -> int:
        """Number of windows."""
        z, y, x = self.starts
        return len(z) * len(y) * len(x)

    @property
    def rows(self) -> int:
        """Number of rows of windows along x."""
        return len(self.starts[0]) * len(self.starts[1])

    @property
    def shared_planes(self) -> int:
        """Most planes that two layers of windows, one z start after the other, have in common."""
        steps = (after - start for start, after in itertools.pairwise(self.starts[0]))
        return max((self.roi[0] - step for step in steps), default=0)

    def rows_to_skip(self, outputs: int, batch_size: int) -> int:
        """Most rows without a window that is computed between two that are: their slabs leave with one batch."""
        row = 4 * outputs * self.roi[0] * self.roi[1] * self.padded[2]
        return max(SKIPPED_BYTES // (row * batch_size), 1)

    def positions(self) -> Iterator[Size]:
        """First voxels of the windows, z slowest."""
        return itertools.product(*self.starts)


@dataclass(frozen=True)
class Blending:
    """How much a voxel counts by its place in the window; `sigma` is a share of the edge (Gaussian only)."""

    mode: Literal["constant", "gaussian"] = "gaussian"
    sigma: float = 0.125


class SlidingWindow:
    """Runs one network over volumes of any size, always calling it with one shape.

    network     [B, C, *roi] -> [B, K, *roi], any floating dtype out; in: `dtype`
    batch_size  B
    device      where batches, weights and scores live
    streams     threads that may call it at the same time, each with a batch of its own
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
    ) -> None:
        self._network = network
        self._roi = roi
        self._blending = blending
        shape = (batch_size, channels, *roi)
        self._batches = tuple(
            torch.zeros(shape, dtype=dtype, device=device).to(memory_format=memory_format) for _ in range(streams)
        )

    @property
    def batch(self) -> Tensor:
        """The batch buffer of the first stream, [B, C, *roi]: in shape, dtype and strides the network sees no other."""
        return self._batches[0]

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """The batch buffers of all streams."""
        return self._batches

    @property
    def streams(self) -> int:
        """Threads that may call it at the same time."""
        return len(self._batches)

    @property
    def network(self) -> Network:
        """What the windows run through."""
        return self._network

    def with_network(self, network: Network) -> SlidingWindow:
        """The same windows in the same batch buffers through another network."""
        other = copy.copy(self)
        other._network = network
        return other

    def with_streams(self, streams: int) -> SlidingWindow:
        """The same windows through the same network in so many streams, with batch buffers of their own."""
        other = copy.copy(self)
        other._batches = tuple(torch.zeros_like(self.batch) for _ in range(streams))
        return other

    @property
    def room(self) -> int:
        """Windows per call of the network."""
        return len(self.batch)

    def run(
        self,
        image: Image,
        overlap: float,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Iterator[Slab]:
        """Scores of `image`, as slabs without gaps, z slowest.

        Raises Cancelled when `cancelled()` says so before a batch, NonFiniteScores for NaN or infinite scores.
        """
        passage = self.passage(image, overlap)
        while passage.left:
            if cancelled():
                raise Cancelled(f"given up after {passage.done} of {passage.total} windows")
            part = passage.take(self.room)
            (scores,) = self.forward([part])
            yield from passage.blend(part.places, scores)
            progress(passage.done, passage.total)

    def passage(self, image: Image, overlap: float) -> Passage:
        """The way of `image` through these windows, from the first on."""
        grid = Grid.cover(_triple(image.shape[2:]), self._roi, overlap)
        return Passage(image, grid, self._blending, self.batch.device)

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part], stream: int = 0) -> list[Tensor]:
        """Call the network once, on windows of one image or of several, no more than there is `room` for.

        Gives the scores of each part, [B, K, *roi] with its number of windows as B, valid until this stream's next
        call.
        """
        batch = self._batches[stream]
        slots = iter(batch)
        for passage, places in parts:
            for place in places:
                passage.fill(next(slots), place)
        for slot in slots:
            # What an earlier batch left there may be what made it fail.
            slot.zero_()
        scores = self._network(batch)
        if scores.is_cuda:
            # Who asks how long a batch takes means until it is computed, not until the device was told to.
            torch.cuda.current_stream(scores.device).synchronize()
        lengths = [len(part.places) for part in parts]
        return list(torch.split(scores[: sum(lengths)], lengths))


class Part(NamedTuple):
    """Some windows of one image, by their places."""

    passage: Passage
    places: list[Size]


class Passage:
    """One image on its way through windows: taken from it in order, computed anywhere, and blended in order.

    Made by `SlidingWindow.passage`. One thread at a time may take and one at a time may blend; filling is anybody's.
    """

    def __init__(self, image: Image, grid: Grid, blending: Blending, device: torch.device) -> None:
        skipped, self._elsewhere = frozenset[Size](), torch.empty(0)
        if isinstance(image, Sparse):
            skipped, self._elsewhere = image.skipped, image.scores[:, None, None, None]
            image = image.image
        self._image, self._grid, self._blending, self._device = image, grid, blending, device
        self._positions = (place for place in grid.positions() if place not in skipped)
        self._to_blend = grid.positions()
        self._blender: _Blender | None = None
        lengths = (min(edge, length) for edge, length in zip(grid.roi, grid.size, strict=True))
        # An axis that is shorter than the window lies in its middle.
        self._inside = tuple(slice(first, first + n) for first, n in zip(grid.before, lengths, strict=True))
        # Windows that are computed.
        self.total = self.left = grid.count - len(skipped)
        self.done = 0

    def take(self, most: int) -> Part:
        """The next windows, at most so many."""
        places = list(itertools.islice(self._positions, most))
        self.left -= len(places)
        return Part(self, places)

    def fill(self, slot: Tensor, place: Size) -> None:
        """Put the window at `place` into `slot`, [C, *roi]."""
        if self._grid.padded != self._grid.size:
            # What an earlier window left there would show in the padding.
            slot.zero_()
        z, y, x = (slice(start, start + edge) for start, edge in zip(place, self._grid.roi, strict=True))
        box, out = (0, slice(None), z, y, x), slot[(slice(None), *self._inside)]
        if isinstance(self._image, Writer):
            self._image.write(box, out)
        else:
            out.copy_(self._image[box])

    @torch.inference_mode()
    def blend(self, places: Sequence[Size], scores: Tensor) -> list[Slab]:
        """Take in the scores [B, K, *roi] of the windows at `places`; gives what became final.

        Raises NonFiniteScores.
        """
        if self._grid.count == 1:
            # Alone in its place, a window has a weight that cancels.
            self.done = 1
            return [Slab(0, 0, _finite(scores.float())[(slice(None), slice(None), *self._inside)].clone())]
        if self._blender is None:
            self._blender = _Blender(self._grid, scores.shape[1], self._blending, self._device)
        slabs = list[Slab | None]()
        for place, window in zip(places, scores, strict=True):
            slabs += self._skip(self._blender, place)
            slabs.append(self._blender.add(place, window))
        self.done += len(places)
        if self.done == self.total:
            slabs += self._skip(self._blender, None)
            slabs.append(self._blender.finish())
        return [slab for slab in slabs if slab is not None]

    def _skip(self, blender: _Blender, until: Size | None) -> Iterator[Slab | None]:
        """Take in the windows that are not computed before the next one that is, or None: all that are left."""
        for place in self._to_blend:
            if place == until:
                return
            yield blender.add(place, self._elsewhere.expand(-1, *self._grid.roi))


class _Blender:
    """Weighted sums of one row of windows along x at a time, and the sums of their weights.

    row     [K, roi z, roi y, X]: the windows of this row, and the part of the row before that lies in it
    layer   [K, z, Y, X]: the planes of the layer before (one z start) that this layer reaches
    Weights have the same shapes without K, and those of a single row are the same for all rows.

    Nothing is zeroed that is written anyway: the buffers do not fit a processor's cache.
    """

    def __init__(self, grid: Grid, outputs: int, blending: Blending, device: torch.device) -> None:
        self._grid = grid
        self._importance = importance_map(grid.roi, blending, device)
        shared = (grid.shared_planes, *grid.padded[1:])
        self._row = torch.empty((outputs, *grid.roi[:2], grid.padded[2]), device=device)
        self._layer = torch.empty((outputs, *shared), device=device)
        self._layer_weight = torch.empty(shared, device=device)
        self._one_row = torch.zeros(self._row.shape[1:], device=device)
        for left in grid.starts[2]:
            self._one_row[:, :, left : left + grid.roi[2]] += self._importance
        self._weight = self._one_row.clone()
        self._reached = 0
        self._z = self._y = -1
        # The first rows of this row came from the one before, the first columns of the others from its windows.
        self._carried = self._right = 0

    def add(self, place: Size, window: Tensor) -> Slab | None:
        """Add the scores [K, *roi] of one window; gives the scores that became final, if any."""
        z, y, left = place
        slab = self._next_row(z, y) if self._z >= 0 and (z, y) != (self._z, self._y) else None
        self._z, self._y = z, y
        carried, known = self._carried, max(self._right - left, 0)
        here = self._row[..., left : left + self._grid.roi[2]]
        old, new = slice(carried), slice(carried, None)
        here[:, :, old].addcmul_(window[:, :, old], self._importance[:, old])
        here[:, :, new, :known].addcmul_(window[:, :, new, :known], self._importance[:, new, :known])
        torch.mul(window[:, :, new, known:], self._importance[:, new, known:], out=here[:, :, new, known:])
        self._right = left + self._grid.roi[2]
        return slab

    def finish(self) -> Slab:
        """What is left after the last window."""
        return self._leave(self._grid.roi[0], self._grid.roi[1])

    def _next_row(self, z: int, y: int) -> Slab:
        """Take leave of this row, as far as the one that begins at (z, y) does not reach into it."""
        depth, height, _ = self._grid.roi
        self._right = 0
        if z != self._z:
            slab = self._leave(z - self._z, height)
            self._weight.copy_(self._one_row)
            self._carried, self._reached = 0, depth - (z - self._z)
            return slab
        step = y - self._y
        slab = self._leave(self._final_planes(), step)
        self._carried = kept = height - step
        for sums in (self._row, self._weight):
            part = sums[..., step:, :]
            # Source and target overlap where windows do by more than a half.
            sums[..., :kept, :].copy_(part if kept <= step else part.clone())
        self._weight[:, kept:] = 0
        self._weight += self._one_row
        return slab

    def _final_planes(self) -> int:
        """Planes of this layer that no later one reaches."""
        later = (start for start in self._grid.starts[0] if start > self._z)
        return next(later, self._z + self._grid.roi[0]) - self._z

    def _leave(self, planes: int, rows: int) -> Slab:
        """Take leave of the first `rows` of this row: `planes` of them are final, the next layer gets the others."""
        kept = self._grid.roi[0] - planes
        for all_sums, layer in ((self._row, self._layer), (self._weight, self._layer_weight)):
            sums, here = all_sums[..., :rows, :], layer[..., self._y : self._y + rows, :]
            sums[..., : self._reached, :, :] += here[..., : self._reached, :, :]
            here[..., :kept, :, :].copy_(sums[..., planes:, :, :])
        scores = self._row[:, :planes, :rows] / self._weight[:planes, :rows]
        # Only an axis that holds a single window is padded, so what is cut off is cut off its only slab.
        inside = (slice(first, first + n) for first, n in zip(self._grid.before, self._grid.size, strict=True))
        return Slab(self._z, self._y, _finite(scores)[(None, slice(None), *inside)])


def _finite(scores: Tensor) -> Tensor:
    """The same scores. Raises NonFiniteScores."""
    # One sum is NaN or infinite as soon as one score is, and reads the scores once while they are in the cache.
    if not torch.isfinite(scores.sum()):
        raise NonFiniteScores("The network returned NaN or infinite scores for this volume; try precision fp32.")
    return scores


@lru_cache(maxsize=16)
def importance_map(roi: Size, blending: Blending, device: torch.device) -> Tensor:
    """Weight of every voxel of a window, float32 [*roi]: that of `monai.data.utils.compute_importance_map`."""
    weight = torch.ones((), device=device)
    if blending.mode == "gaussian":
        for edge in roi:
            middle = (edge - 1) / 2
            distance = torch.arange(edge, dtype=torch.float32, device=device) - middle
            weight = weight.unsqueeze(-1) * torch.exp(distance**2 / (-2 * (blending.sigma * edge) ** 2))
    # Where a Gaussian is next to nothing, dividing by it would make noise of rounding.
    return weight.expand(roi).clamp(min=LEAST_WEIGHT).contiguous()


def _starts(length: int, edge: int, step: int) -> tuple[int, ...]:
    """Every `step` voxels from 0, the last window moved back so that it ends where the volume ends."""
    count = -(-(length - edge) // step) + 1
    return tuple(min(index * step, length - edge) for index in range(count))


def _step(length: int, edge: int, overlap: float) -> int:
    return edge if length == edge else max(int(edge * (1 - overlap)), 1)


def _triple(values: Sequence[int]) -> Size:
    z, y, x = values
    return z, y, x
