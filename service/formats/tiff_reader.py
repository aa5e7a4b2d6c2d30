"""Read TIFFs: ImageJ hyperstacks, OME-TIFF, plain pages and microscope vendors' TIFFs, with the codecs of imagecodecs.

Classic and Big, of either byte order. No file that a file names is opened, and everything is checked before a pixel is
decoded. Files that cannot be trusted are read through `service.formats.sandbox`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tifffile import TiffFile

from service.core.errors import BadParameter
from service.core.volume import Array, Description, Selection, StackShape, TimeRange, Volume, VoxelSize
from service.formats import axes, ifd, metadata, pixels, series
from service.formats.axes import Layout, Part
from service.formats.pixels import Placement
from service.formats.series import StoredImage


def inspect(file: Path | int, selection: Selection, limit_bytes: int) -> Description:
    """Describe a file and the selected part without decoding pixels.

    `file` is a path, or a descriptor, which is closed. Several time points without a choice are told as `problem`.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    with _open(file, selection, limit_bytes) as stack:
        return stack.describe(selection)


def read(path: Path, selection: Selection, limit_bytes: int, scratch: Path | None = None) -> Volume:
    """Read the selected channels and time point as [C, Z, Y, X] in native byte order, dtype as stored (1-bit: uint8).

    Uncompressed pixels at regular distances are mapped, so the file must outlive the volume; others are decoded to
    memory, or to a file in the folder `scratch`.
    Raises UnsupportedMedia, BadFile, AmbiguousAxes, BadParameter, TooLarge.
    """
    if scratch is not None:
        return _read_to_file(path, selection, limit_bytes, scratch)
    with _open(path, selection, limit_bytes) as stack:
        placement = stack.placement
        if placement is not None:
            return placement.map_volume(pixels.map_file(path), *stack.facts(selection))
        decoded: Array = np.empty(stack.shape, pixels.native_dtype(stack.image))

        def store(channel: int, z0: int, block: Array) -> None:
            decoded[channel, z0 : z0 + len(block)] = block

        pixels.decode(stack.tiff, stack.image, stack.layout, stack.part, store)
        return Volume(stack.shape, decoded.dtype, lambda z0, z1: decoded[:, z0:z1], *stack.facts(selection))


@dataclass(frozen=True)
class Extract:
    """Location of a volume in the file that was read, or in the one that it was decoded to, in plain values."""

    placement: Placement
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]
    notes: tuple[str, ...]
    decoded: bool


def extract(
    file: Path | int, selection: Selection, limit_bytes: int, make_output: Callable[[int], int], small_bytes: int
) -> Extract | Description:
    """Locate the selected pixels in the file itself, or decode them to another one.

    `file` is a path or a descriptor. `make_output` takes the bytes of the decoded pixels and returns the descriptor of
    a file of that length; it is called only where pixels have to be decoded. Descriptors are closed. Where more than
    `small_bytes` would have to be decoded, nothing is, and the description is returned. Raises the errors of `read`,
    and those of `make_output`.
    """
    with _open(file, selection, limit_bytes) as stack:
        if stack.placement is None and stack.decoded_bytes > small_bytes:
            return stack.describe(selection)
        return _extract(stack, selection, make_output)


def _extract(stack: _Stack, selection: Selection, make_output: Callable[[int], int]) -> Extract:
    facts, placement = stack.facts(selection), stack.placement
    if placement is not None:
        return Extract(placement, *facts, decoded=False)
    placement = Placement.dense(pixels.native_dtype(stack.image), stack.shape)
    with os.fdopen(make_output(placement.nbytes), "r+b", buffering=0) as output:

        def store(channel: int, z0: int, block: Array) -> None:
            _write_all(output.fileno(), block, channel * placement.strides[0] + z0 * placement.strides[1])

        pixels.decode(stack.tiff, stack.image, stack.layout, stack.part, store)
    return Extract(placement, *facts, decoded=True)


def _read_to_file(path: Path, selection: Selection, limit_bytes: int, scratch: Path) -> Volume:
    with ExitStack() as files:
        outputs = []

        def make_output(nbytes: int) -> int:
            outputs.append(files.enter_context(pixels.make_file(scratch, nbytes)))
            return os.dup(outputs[0].fileno())

        with _open(path, selection, limit_bytes) as stack:
            found = _extract(stack, selection, make_output)
        content = pixels.map_file(outputs[0].fileno() if found.decoded else path)
    return found.placement.map_volume(content, found.voxel_size, found.channels, found.notes)


def _write_all(descriptor: int, block: Array, offset: int) -> None:
    data = memoryview(block.data).cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@dataclass(frozen=True)
class _Stack:
    """An open file with its image, axes and selected part."""

    tiff: TiffFile
    image: StoredImage
    layout: Layout
    part: Part
    names: tuple[str, ...]

    @property
    def shape(self) -> StackShape:
        """(C, Z, Y, X) of the selected part."""
        return pixels.part_shape(self.layout, self.part)

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the selected channels."""
        return tuple(self.names[number] for number in self.part.channels)

    def voxel_size(self, selection: Selection) -> VoxelSize | None:
        """Return the caller's voxel size, else the file's."""
        return selection.voxel_size or self.image.calibration.voxel_size()

    def notes(self, selection: Selection) -> tuple[str, ...]:
        """Return what a user should know of how the file was understood."""
        notes = [*self.image.notes, *self.layout.notes]
        if selection.voxel_size is None:
            notes += self.image.calibration.remarks()
        if self.layout.length("Z") == 1:
            notes.append("The selection is a single plane; it is treated as a stack of one.")
        return tuple(notes)

    def facts(self, selection: Selection) -> tuple[VoxelSize | None, tuple[str, ...], tuple[str, ...]]:
        """Return what a volume knows beside its pixels: voxel size, names of its channels, and notes."""
        return self.voxel_size(selection), self.channels, self.notes(selection)

    def describe(self, selection: Selection) -> Description:
        """Describe the file and the selected part."""
        times = axes.select_times(self.layout, selection.time) if isinstance(selection.time, TimeRange) else None
        is_unclear = self.part.time is None and times is None
        voxel_size = self.voxel_size(selection)
        source = self.image.calibration.source if voxel_size else "not stated"
        return Description(
            container=self.image.container,
            axes=self.layout.axes,
            stored_shape=self.layout.shape,
            shape=self.shape,
            dtype=np.dtype(self.image.page.dtype).name,
            voxel_size=voxel_size,
            voxel_size_from="the request" if selection.voxel_size else source,
            channels=self.names,
            colours=_colour_channels(self.image, self.layout),
            times=self.layout.length("T"),
            notes=self.notes(selection),
            time_interval=self.image.time_interval,
            time_points=None if times is None else (times.start, times.stop),
            problem=axes.explain_time_choice(self.layout) if is_unclear else "",
        )

    @property
    def decoded_bytes(self) -> int:
        """Bytes that are decoded on the way to the selected part where it cannot be located."""
        return pixels.count_decoded_bytes(self.image, self.layout, self.part)

    @cached_property
    def placement(self) -> Placement | None:
        """Location of uncompressed pixels at regular distances, None where there are none such. Raises BadParameter."""
        if self.part.time is None:
            raise BadParameter(axes.explain_time_choice(self.layout))
        return pixels.locate(self.image, self.layout, self.part)


@contextmanager
def _open(file: Path | int, selection: Selection, limit_bytes: int) -> Iterator[_Stack]:
    with os.fdopen(file, "rb") if isinstance(file, int) else file.open("rb") as stream:
        structure = ifd.scan(stream)
        stream.seek(0)
        with series.translate_errors("reading its tags"):
            tiff = series.open_pages(stream)
            image = series.find_image(tiff, structure, trust=selection.axes is None)
            layout = axes.resolve_axes(image.axes, image.shape, selection.axes, image.doubt)
            names = _name_channels(image, layout)
            part = axes.select(layout, names, selection)
            pixels.check(image, structure, layout, part, limit_bytes)
        yield _Stack(tiff, image, layout, part, names)


def _colour_channels(image: StoredImage, layout: Layout) -> tuple[str, ...]:
    """Return one colour per channel, "" where the file has none; colour samples are red, green and blue themselves."""
    channels, samples = layout.length("C"), layout.length("S")
    if samples > 1:
        rgb = ("#ff0000", "#00ff00", "#0000ff") if samples in {3, 4} else ()
        return (*rgb, *("",) * (samples - len(rgb))) * channels
    return image.colours if len(image.colours) == channels else ("",) * channels


def _name_channels(image: StoredImage, layout: Layout) -> tuple[str, ...]:
    """Return one name per channel and colour sample, such as "DAPI", "GFP red", or "" where the file has none."""
    channels, samples = layout.length("C"), layout.length("S")
    channel_names = image.channels if len(image.channels) == channels else ("",) * channels
    sample_names = metadata.sample_names(image.page, samples) if samples > 1 else ("",)
    return tuple(f"{channel} {sample}".strip() for channel in channel_names for sample in sample_names)
