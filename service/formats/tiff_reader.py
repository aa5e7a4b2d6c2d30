"""TIFF in, OME-TIFF out.

Reading understands ImageJ hyperstacks, OME-TIFF, plain pages and microscope vendors' TIFFs, classic and Big, of either
byte order, with the codecs of imagecodecs. Nothing that a file names is opened, and everything is checked before a
pixel is decoded. What cannot be trusted is to be read through `service.formats.sandbox`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tifffile import TiffFile

from service.core.errors import BadParameter
from service.core.volume import Array, Description, Selection, Volume, VoxelSize
from service.formats import axes, ifd, metadata, pixels, series
from service.formats.axes import Layout, Part
from service.formats.parse_cache import ReadLog
from service.formats.pixels import Placement
from service.formats.series import StoredImage

# So often what was written of a large array is let go of.
RELEASED_PAGES = 64


def inspect(path: Path, selection: Selection, limit_bytes: int, read_log: ReadLog | None = None) -> Description:
    """What a file holds and what the selection would read of it; no pixel is decoded.

    A time point that has yet to be chosen is no error here, but a note. `read_log` hears of every byte that is read.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    with _opened(path, selection, limit_bytes, read_log) as stack:
        return stack.describe(selection)


def read(path: Path, selection: Selection, limit_bytes: int, scratch: Path | None = None) -> Volume:
    """The selected channels and time point as [C, Z, Y, X] in native byte order, dtype as stored (1-bit: uint8).

    What is stored plainly stays in the file and is mapped, so the file must outlive the volume; what must be decoded
    goes to memory, or to a file in the folder `scratch`.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    if scratch is not None:
        return extract(path, selection, limit_bytes, scratch).volume()
    with _opened(path, selection, limit_bytes) as stack:
        placement = stack.place()
        if placement is not None:
            return placement.volume(pixels.mapped(path), stack.voxel_size(selection), stack.channels)
        decoded: Array = np.empty(pixels.shape_of(stack.layout, stack.part), pixels.delivered_dtype(stack.image))

        def store(channel: int, z0: int, block: Array) -> None:
            decoded[channel, z0 : z0 + len(block)] = block

        stack.decode(store)
        return Volume.from_array(decoded, stack.voxel_size(selection), stack.channels)


@dataclass(frozen=True)
class Extract:
    """A volume as it lies on disk: everything needed to map it, in plain values that can cross a pipe."""

    path: Path
    placement: Placement
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]

    def volume(self) -> Volume:
        """Map the file."""
        return self.placement.volume(pixels.mapped(self.path), self.voxel_size, self.channels)


def extract(
    path: Path, selection: Selection, limit_bytes: int, scratch: Path, read_log: ReadLog | None = None
) -> Extract:
    """Like `read`, but says where the pixels are: in the file itself, or decoded in a new file in `scratch`.

    That folder is made where there is need for it. `read_log` hears of every byte that is read.
    """
    with _opened(path, selection, limit_bytes, read_log) as stack:
        voxel_size = stack.voxel_size(selection)
        placement = stack.place()
        if placement is not None:
            return Extract(path, placement, voxel_size, stack.channels)
        if read_log is not None:
            read_log.end()
        placement = Placement.dense(pixels.delivered_dtype(stack.image), pixels.shape_of(stack.layout, stack.part))
        scratch.mkdir(mode=0o700, exist_ok=True)
        descriptor, name = tempfile.mkstemp(".raw", "pixels-", scratch)
        try:
            os.truncate(descriptor, placement.shape[0] * placement.strides[0])

            def store(channel: int, z0: int, block: Array) -> None:
                _write_all(descriptor, block, channel * placement.strides[0] + z0 * placement.strides[1])

            stack.decode(store)
        except BaseException:
            Path(name).unlink()
            raise
        finally:
            os.close(descriptor)
        return Extract(Path(name), placement, voxel_size, stack.channels)


def _write_all(descriptor: int, block: Array, offset: int) -> None:
    data = memoryview(block.data).cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@dataclass(frozen=True)
class _Stack:
    """An open file with everything settled: which image, which axes, which part."""

    tiff: TiffFile
    image: StoredImage
    layout: Layout
    part: Part
    names: tuple[str, ...]

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the selected channels."""
        return tuple(self.names[number] for number in self.part.channels)

    def voxel_size(self, selection: Selection) -> VoxelSize | None:
        """The caller's, else the file's."""
        return selection.voxel_size or self.image.calibration.voxel_size()

    def describe(self, selection: Selection) -> Description:
        """Everything but the pixels."""
        calibration = self.image.calibration
        notes = [*self.image.notes, *self.layout.notes]
        if selection.voxel_size is None:
            notes += calibration.remarks()
        if self.part.time is None:
            notes.append(axes.must_choose_time(self.layout))
        if self.layout.length("Z") == 1:
            notes.append("The selection is a single plane; it is treated as a stack of one.")
        known = self.voxel_size(selection)
        origin = calibration.source if known else "not stated"
        return Description(
            container=self.image.container,
            axes=self.layout.axes,
            stored_shape=self.layout.shape,
            shape=pixels.shape_of(self.layout, self.part),
            dtype=np.dtype(self.image.page.dtype).name,
            voxel_size=known,
            voxel_size_from="the request" if selection.voxel_size else origin,
            channels=self.names,
            times=self.layout.length("T"),
            notes=tuple(notes),
        )

    def place(self) -> Placement | None:
        """Where the pixels lie plainly, or None."""
        if self.part.time is None:
            raise BadParameter(axes.must_choose_time(self.layout))
        return pixels.place(self.image, self.layout, self.part)

    def decode(self, store: pixels.Store) -> None:
        """Decode the selection in pieces."""
        pixels.decode(self.tiff, self.image, self.layout, self.part, store)


@contextmanager
def _opened(path: Path, selection: Selection, limit_bytes: int, read_log: ReadLog | None = None) -> Iterator[_Stack]:
    with path.open("rb") as file:
        stream = file if read_log is None else read_log.watch(file)
        skeleton = ifd.scan(stream)
        stream.seek(0)
        with series.translated("reading its tags"):
            tiff = series.open_pages(stream)
            found = series.find(tiff, skeleton, trust=selection.axes is None)
            layout = axes.understand(found.axes, found.shape, selection.axes, found.doubt)
            names = _names(found, layout)
            part = axes.select(layout, names, selection)
            pixels.check(found, skeleton, layout, part, limit_bytes)
        yield _Stack(tiff, found, layout, part, names)


def _names(found: StoredImage, layout: Layout) -> tuple[str, ...]:
    """One name per channel, "" where the file has none; those of colour samples follow their channel's."""
    channels, samples = layout.length("C"), layout.length("S")
    outer = found.channels if len(found.channels) == channels else ("",) * channels
    inner = metadata.sample_names(found.page, samples) if samples > 1 else ("",)
    return tuple(f"{name} {sample}".strip() for name in outer for sample in inner)
