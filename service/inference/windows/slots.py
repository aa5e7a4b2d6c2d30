"""Batch buffers of windows, and the padding of windows that extend beyond the image."""

from __future__ import annotations

import torch
from torch import Tensor

from service.inference.windows.grid import Grid, Reading


class WindowSlot:
    """Memory of one window in a batch, [C, *roi], and a view of each of its channels."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.channels = memory, memory.unbind()

    def get_part(self, reading: Reading) -> WindowSlot:
        """Return the part of the window that is read from the image."""
        return WindowSlot(self.memory[(slice(None), *reading.targets)])

    def mirror_end(self, grid: Grid, reading: Reading) -> None:
        """Fill the padding that aligns the end of the image with the mirror image of the voxels before it.

        The last voxel of the image is not repeated, as with `numpy.pad` in the mode "reflect".
        """
        for axis, (voxels, target) in enumerate(zip(reading.box, reading.targets, strict=True)):
            length = grid.size[axis]
            if voxels.stop < length:
                continue
            last = target.stop - 1
            for index in range(
                target.stop, min(target.stop + grid.aligned_size[axis] - length, grid.window_size[axis])
            ):
                source = self.memory.select(axis + 1, max(2 * last - index, target.start))
                self.memory.select(axis + 1, index).copy_(source)


def fill_with_mirror_images(window: Tensor, region: tuple[slice, slice, slice]) -> None:
    """Fill a window [C, z, y, x] outside `region` (z, y, x) with mirror images of the region.

    The outermost voxels are repeated, as with `numpy.pad` in the mode "symmetric".
    """
    for axis, part in enumerate(region, start=1):
        length = part.stop - part.start
        offsets = (torch.arange(window.shape[axis], device=window.device) - part.start) % (2 * length)
        sources = part.start + torch.minimum(offsets, 2 * length - 1 - offsets)
        window.copy_(window.index_select(axis, sources))


class StreamBuffer:
    """Batch buffer of one stream, with all of its views, because creating a view takes microseconds."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch
        self.slots = tuple(map(WindowSlot, batch.unbind()))
        # The entry at index N is a view of the first N windows of the batch.
        self.first_windows = tuple(batch[:length] for length in range(len(batch) + 1))
