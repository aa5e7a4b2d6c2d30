"""Sliding-window inference: one fixed batch shape, preallocated buffers, finished z-slabs given away at once.

The result equals `monai.inferers.sliding_window_inference` (same padding, scan positions and importance map), which
the tests hold to 1e-5 in float32. What differs is the work around the network: windows are gathered into one batch
that is allocated once, the last batch is filled up instead of having a shape of its own, weights are summed once per
row of windows instead of once per window, and the scores of the whole volume never exist at the same time.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from monai.data.utils import compute_importance_map
from monai.utils.enums import BlendMode
from torch import Tensor
from torch.nn import functional

from service.errors import Cancelled, NonFiniteScores
from service.networks import Network

Size = tuple[int, int, int]


class Slab(NamedTuple):
    """Finished scores, float32 [1, K, z, Y, X], of the planes that begin at `z0`."""

    z0: int
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
    ) -> None:
        self._network = network
        self._roi = roi
        self._blending = blending
        self._batch = torch.zeros((batch_size, channels, *roi), dtype=dtype, device=device).to(
            memory_format=memory_format
        )

    @property
    def batch(self) -> Tensor:
        """The one batch buffer, [B, C, *roi]: its shape, dtype and strides are those the network always sees."""
        return self._batch

    def with_network(self, network: Network) -> SlidingWindow:
        """The same windows in the same batch buffer through another network."""
        other = copy.copy(self)
        other._network = network
        return other

    def run(
        self,
        image: Tensor,
        overlap: float,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Iterator[Slab]:
        """Scores of `image`, float32 [1, C, Z, Y, X] on this device, as slabs in z order without gaps.

        Raises Cancelled when `cancelled()` says so before a batch, NonFiniteScores for NaN or infinite scores.
        """
        grid = Grid.cover(_triple(image.shape[2:]), self._roi, overlap)
        image = _pad(image, grid)
        blender: _Blender | None = None
        positions = grid.positions()
        done = 0
        while places := list(itertools.islice(positions, len(self._batch))):
            if cancelled():
                raise Cancelled(f"given up after {done} of {grid.count} windows")
            scores = self._forward(image, places)
            if blender is None:
                blender = _Blender(grid, scores.shape[1], self._blending, self._batch.device)
            for place, window in zip(places, scores, strict=False):
                if (slab := blender.add(place, window)) is not None:
                    yield slab
            done += len(places)
            progress(done, grid.count)
        if blender is not None:
            yield blender.finish()

    def _forward(self, image: Tensor, places: list[Size]) -> Tensor:
        for slot, place in enumerate(places):
            z, y, x = (slice(start, start + edge) for start, edge in zip(place, self._roi, strict=True))
            self._batch[slot].copy_(image[0, :, z, y, x])
        with torch.inference_mode():
            return self._network(self._batch)


class _Blender:
    """Weighted sums of one row of windows after the other; a plane leaves when no later row reaches it."""

    def __init__(self, grid: Grid, outputs: int, blending: Blending, device: torch.device) -> None:
        self._grid = grid
        depth, height, width = grid.roi[0], grid.padded[1], grid.padded[2]
        self._importance = importance_map(grid.roi, blending, device)
        self._row_weight = row_weight(grid, self._importance)
        self._sums = torch.zeros((outputs, depth, height, width), device=device)
        self._weights = torch.zeros((depth, height, width), device=device)
        self._z = -1

    def add(self, place: Size, window: Tensor) -> Slab | None:
        """Add the scores [K, *roi] of one window; gives the planes that became final, if any."""
        slab = None
        if place[0] != self._z:
            if self._z >= 0:
                slab = self._give(place[0] - self._z)
            self._weights += self._row_weight
            self._z = place[0]
        _, y, x = (slice(start, start + edge) for start, edge in zip(place, self._grid.roi, strict=True))
        self._sums[:, :, y, x].addcmul_(window, self._importance)
        return slab

    def finish(self) -> Slab:
        """The planes that are left after the last window; the buffers are given away with them."""
        return self._slab(self._sums.div_(self._weights))

    def _give(self, planes: int) -> Slab:
        scores = self._sums[:, :planes] / self._weights[:planes]
        for buffer in (self._sums, self._weights):
            kept = buffer.shape[-3] - planes
            buffer.narrow(-3, 0, kept).copy_(buffer.narrow(-3, planes, kept).clone())
            buffer.narrow(-3, kept, planes).zero_()
        return self._slab(scores)

    def _slab(self, scores: Tensor) -> Slab:
        # One sum is NaN or infinite as soon as one score is, and reads the slab once while it is still in the cache.
        if not torch.isfinite(scores.sum()):
            raise NonFiniteScores("The network returned NaN or infinite scores for this volume; try precision fp32.")
        # Only an axis that holds a single window is padded, so z padding is seen here only when the one slab is whole.
        (front, y, x), (depth, height, width) = self._grid.before, self._grid.size
        return Slab(self._z, scores[None, :, front : front + depth, y : y + height, x : x + width])


@lru_cache(maxsize=16)
def importance_map(roi: Size, blending: Blending, device: torch.device) -> Tensor:
    """Weight of every voxel of a window, float32 [*roi], as MONAI computes it."""
    mode = BlendMode.GAUSSIAN if blending.mode == "gaussian" else BlendMode.CONSTANT
    return compute_importance_map(roi, mode=mode, sigma_scale=blending.sigma, device=device, dtype=torch.float32)


def row_weight(grid: Grid, importance: Tensor) -> Tensor:
    """Sum of the weights of the windows of one row (one z), float32 [roi z, padded Y, padded X]; equal for all rows."""
    total = torch.zeros((grid.roi[0], *grid.padded[1:]), device=importance.device)
    for y, x in itertools.product(*grid.starts[1:]):
        total[:, y : y + grid.roi[1], x : x + grid.roi[2]] += importance
    return total


def _pad(image: Tensor, grid: Grid) -> Tensor:
    if grid.padded == grid.size:
        return image
    edges: list[int] = []
    for size, padded, before in reversed(list(zip(grid.size, grid.padded, grid.before, strict=True))):
        edges += [before, padded - size - before]
    return functional.pad(image, edges)


def _starts(length: int, edge: int, step: int) -> tuple[int, ...]:
    """Every `step` voxels from 0, the last window moved back so that it ends where the volume ends."""
    count = -(-(length - edge) // step) + 1
    return tuple(min(index * step, length - edge) for index in range(count))


def _step(length: int, edge: int, overlap: float) -> int:
    return edge if length == edge else max(int(edge * (1 - overlap)), 1)


def _triple(values: Sequence[int]) -> Size:
    z, y, x = values
    return z, y, x
