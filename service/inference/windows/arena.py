"""Windows whose images and sums lie in memory that stays where it is, so that a batch is one step without the host.

A step gathers windows, runs the network, and adds its weighted scores to their sums. It reads where from a table, int64
[B, 14], on the device, and does the arithmetic of indices there: it can be recorded once, as a CUDA graph by the
`cudagraph` engine or by torch.compile, and replayed for any windows of any images.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from service.core.volume import Size
from service.inference.windows.blending import Blending, CheckFinite, Slab, importance_map, require_finite
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.sliding_window import Image, Measure, SlidingWindow, WindowScan, WindowSlice
from service.models.loader import Network


class Row(NamedTuple):
    """One window of the table: all in numbers of floats of the arenas, or voxels of the window.

    pixel   of its first voxel, which may lie before the image where that is padded
    channel, plane, row   from a pixel to that of the next channel, plane, row
    z0 .. x1  voxels of the window, from and up to, that are inside the image
    total   sum of its first voxel for the first output
    output, total_plane, total_row  from a sum to that of the next output, plane, row
    """

    pixel: int
    channel: int
    plane: int
    row: int
    z0: int
    z1: int
    y0: int
    y1: int
    x0: int
    x1: int
    total: int
    output: int
    total_plane: int
    total_row: int


class Ranges:
    """Ranges of an array of `length`, each the first that is free and long enough."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._ends: dict[int, int] = {}
        self._lock = threading.Lock()
        # Filled without the lock, as garbage may be collected by a thread that holds it.
        self._returned = deque[int]()

    def take(self, length: int) -> int | None:
        """Return the first element of a range, None where there is none. Thread-safe, as is `give_back`."""
        with self._lock:
            while self._returned:
                del self._ends[self._returned.popleft()]
            first = 0
            for start, end in sorted(self._ends.items()):
                if start - first >= length:
                    break
                first = end
            if first + length > self._length:
                return None
            self._ends[first] = first + length
            return first

    def give_back(self, first: int) -> None:
        """Let others have the range that begins here."""
        self._returned.append(first)


class Arena(nn.Module):
    """Memory for the pixels and the sums of several images, float32 [pixels] and [sums] on a device.

    The first sums are for slots of a batch that no window needs.
    """

    def __init__(self, pixels: int, sums: int, unused: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("pixels", torch.zeros(pixels, device=device), persistent=False)
        self.register_buffer("sums", torch.zeros(sums, device=device), persistent=False)
        self.pixel_ranges, self.sum_ranges = Ranges(pixels), Ranges(sums)
        self.sum_ranges.take(unused)

    pixels: Tensor
    sums: Tensor

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes + self.sums.nbytes


class WindowStep(nn.Module):
    """One batch from pixels to sums: what is recorded. It has the shape of a network, of a table instead of windows.

    network  [B, C, *roi] in the dtype and layout of `batch` -> [B, K, *roi]
    """

    def __init__(self, network: nn.Module, arena: Arena, batch: Tensor, outputs: int, blending: Blending) -> None:
        super().__init__()
        self.network, self.arena = network, arena
        self._batch_size, self._dtype = len(batch), batch.dtype
        self._format = torch.channels_last_3d if _is_channels_last(batch) else torch.contiguous_format
        roi = as_size(batch.shape[2:])
        self.register_buffer("importance", importance_map(roi, blending, batch.device).clone(), persistent=False)
        # Channels, or outputs and the sum of weights.
        for name, length in zip("czyxk", (batch.shape[1], *roi, outputs + 1), strict=True):
            self.register_buffer(name, torch.arange(length, device=batch.device), persistent=False)

    importance: Tensor
    c: Tensor
    z: Tensor
    y: Tensor
    x: Tensor
    k: Tensor

    def forward(self, table: Tensor) -> Tensor:
        """Table, int64 [B, 14] of `Row`s -> the table; the sums are changed."""
        columns = table[:, :, None, None, None, None].unbind(1)
        pixel, channel, plane, row, z0, z1, y0, y1, x0, x1, total, output, total_plane, total_row = columns
        z, y, x = self.z[:, None, None], self.y[:, None], self.x
        inside = (z >= z0) & (z < z1) & (y >= y0) & (y < y1) & (x >= x0) & (x < x1)
        c, k = self.c[:, None, None, None], self.k[:, None, None, None]
        pixel = pixel + c * channel + z * plane + y * row + x
        windows = self.arena.pixels[torch.where(inside, pixel, 0)]
        windows = torch.where(inside, windows, 0.0).to(self._dtype).contiguous(memory_format=self._format)
        scores = self.network(windows).float()
        weighted = torch.cat((scores, torch.ones_like(scores[:, :1])), 1) * self.importance
        total = total + k * output + z * total_plane + y * total_row + x
        # One after the other: they overlap, and sums would depend on which comes first.
        for index in range(self._batch_size):
            self.arena.sums.index_add_(0, total[index].flatten(), weighted[index].flatten())
        return table


def _is_channels_last(batch: Tensor) -> bool:
    return batch.shape[1] > 1 and batch.is_contiguous(memory_format=torch.channels_last_3d)


class ArenaWindow(SlidingWindow):
    """Windows that run in steps, of images for which the arena has room; others run as in a `SlidingWindow`.

    window  whose batches, shapes and blending these have
    step    a `WindowStep` of `arena`, or what an engine has made of it
    """

    def __init__(self, window: SlidingWindow, arena: Arena, step: Network, outputs: int) -> None:
        self.__dict__.update(window.__dict__)
        self._arena, self._outputs = arena, outputs
        self._step: Network | None = step

    def with_network(
        self, network: Network, *, any_batch_size: bool = False, owns_scores: bool = False
    ) -> SlidingWindow:
        """Return a copy that runs another network, without steps."""
        other = copy_plain(self)
        return other.with_network(network, any_batch_size=any_batch_size, owns_scores=owns_scores)

    def with_capacity(self, batch_size: int) -> SlidingWindow:
        """Return a copy that computes fewer windows at once, without steps."""
        return copy_plain(self).with_capacity(batch_size)

    def scan(self, image: Image, overlap: float, check: CheckFinite = require_finite) -> WindowScan:
        """Return a scan of `image` that begins at its first window, in the arena where it can be."""
        planes = whole_planes(image)
        if planes is None or planes.device != self.batch.device:
            return super().scan(image, overlap, check)
        grid = Grid.cover(as_size(image.shape[2:]), self._roi, overlap)
        outputs = self._outputs + 1
        pixel = self._arena.pixel_ranges.take(planes.numel())
        total = self._arena.sum_ranges.take(outputs * math.prod(grid.padded))
        found = ArenaScan(image, grid, self._blending, self.batch.device, self._kernels, check)
        for first, ranges in ((pixel, self._arena.pixel_ranges), (total, self._arena.sum_ranges)):
            if first is not None:
                weakref.finalize(found, ranges.give_back, first)
        if pixel is None or total is None:
            return super().scan(image, overlap, check)
        found.place(planes, self._arena, pixel, total, outputs)
        return found

    def forward(
        self, parts: Sequence[WindowSlice], stream: int = 0, *, measure: Measure = nullcontext
    ) -> Sequence[Tensor]:
        """Compute the windows of several images; of those in the arena nothing is returned but their number."""
        there = [part for part in parts if isinstance(part.scan, ArenaScan)]
        others = [part for part in parts if not isinstance(part.scan, ArenaScan)]
        scores = iter(super().forward(others, stream, measure=measure) if others else ())
        if there:
            self._run_step(there, measure)
        return [
            self.batch.new_empty(len(part.places), 0) if isinstance(part.scan, ArenaScan) else next(scores)
            for part in parts
        ]

    def _run_step(self, parts: Sequence[WindowSlice], measure: Measure) -> None:
        assert self._step is not None  # noqa: S101 - as copies without have no scans in the arena
        rows = [part.scan.row(place) for part in parts if isinstance(part.scan, ArenaScan) for place in part.places]
        rows += [unused_row(self._roi)] * (self.capacity - len(rows))
        table = torch.tensor(rows)
        device = self.batch.device
        if device.type == "cuda":
            # Torch does not use pinned memory again before it was copied.
            table = table.pin_memory().to(device, non_blocking=True)
        with measure():
            self._step(table)


class ArenaScan(WindowScan):
    """Progress of one image in an arena: what is blended was added to its sums before.

    Work on an arena runs in one stream of its device, so that a range that is given back while a step still writes
    there is cleared for the next image after that.
    """

    def place(self, planes: Tensor, arena: Arena, pixel: int, total: int, outputs: int) -> None:
        """Copy the planes [C, Z, Y, X] of the image into the arena, and clear its sums, [outputs, Z, Y, X]."""
        self._pixel, self._total = pixel, total
        arena.pixels[pixel : pixel + planes.numel()].view(planes.shape).copy_(planes)
        count = outputs * math.prod(self._grid.padded)
        self._sums = arena.sums[total : total + count].zero_().view(outputs, *self._grid.padded)

    def row(self, place: Size) -> Row:
        """Return what a step needs to know of the window at `place`."""
        grid = self._grid
        (_, height, width), (_, rows, columns) = grid.size, grid.padded
        # First voxel of the window in the image, which padding may move before it.
        z, y, x = (at - before for at, before in zip(place, grid.pad_before, strict=True))
        triples = zip((z, y, x), grid.size, grid.roi, strict=True)
        (z0, z1), (y0, y1), (x0, x1) = ((max(-at, 0), min(length - at, edge)) for at, length, edge in triples)
        pixel = self._pixel + (z * height + y) * width + x
        total = self._total + (place[0] * rows + place[1]) * columns + place[2]
        return Row(
            pixel, math.prod(grid.size), height * width, width, z0, z1, y0, y1, x0, x1, total, *_steps(grid.padded)
        )

    def blend(self, places: Sequence[Size], _scores: Tensor) -> list[Slab]:
        """Return the slabs that became final with the windows at `places`, whose scores are in the sums."""
        slabs = []
        for z, y, x in places:
            depth, height, width = (axis[at] for axis, at in zip(self._grid.overlaps, (z, y, x), strict=True))
            if width.position + 1 == len(self._grid.starts[2]):
                sums = self._sums[:, z : z + depth.final, y : y + height.final]
                slabs.append(Slab(z, y, self._check((sums[:-1] / sums[-1])[(None, slice(None), *self._cropped)])))
        self.done += len(places)
        return slabs

    @property
    def _cropped(self) -> tuple[slice, ...]:
        """Part of a slab that is not padding: only an axis that holds a single window is padded."""
        pairs = zip(self._grid.pad_before, self._grid.size, strict=True)
        return tuple(slice(before, before + length) for before, length in pairs)


def _steps(size: Size) -> tuple[int, int, int]:
    return math.prod(size), size[1] * size[2], size[2]


def unused_row(roi: Size) -> Row:
    """Return the row of a slot without a window: zeros, whose scores go where nobody reads."""
    return Row(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, *_steps(roi))


def unused_table(window: SlidingWindow) -> Tensor:
    """Return a table, int64 [B, 14], without a window."""
    roi = as_size(window.batch.shape[2:])
    return torch.tensor([unused_row(roi)] * window.capacity, device=window.batch.device)


def add_steps(
    window: SlidingWindow, module: nn.Module, outputs: int, nbytes: int, build: Callable[[nn.Module, Tensor], Network]
) -> tuple[ArenaWindow, int]:
    """Return windows that run in steps, and the bytes that their arena takes, `nbytes` or what two windows need.

    module   what `window` calls was made from
    outputs  number of its outputs
    build    has an engine make what runs of a step, given an example of its table
    """
    arena = make_arena(window, outputs, nbytes)
    step = WindowStep(module, arena, window.batch, outputs, window.blending)
    return ArenaWindow(window, arena, build(step, unused_table(window)), outputs), arena.nbytes


def make_arena(window: SlidingWindow, outputs: int, nbytes: int) -> Arena:
    """Return an arena of so many bytes for images and sums of these windows, and at least one of each."""
    _, channels, *roi = window.batch.shape
    voxels = max(nbytes // 4 // (channels + outputs + 1), 2 * math.prod(roi))
    unused = (outputs + 1) * math.prod(roi)
    return Arena(channels * voxels, (outputs + 1) * voxels + unused, unused, window.batch.device)


def whole_planes(image: Image) -> Tensor | None:
    """Return all planes of an image, float32 [C, Z, Y, X], where they are there as such; else None."""
    planes = image[0] if isinstance(image, Tensor) else getattr(image, "whole", None)
    return planes if isinstance(planes, Tensor) and planes.dtype == torch.float32 else None


def copy_plain(window: SlidingWindow) -> SlidingWindow:
    """Return a copy of windows as a `SlidingWindow`."""
    other = SlidingWindow.__new__(SlidingWindow)
    other.__dict__.update(window.__dict__)
    return other
