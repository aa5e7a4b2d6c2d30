"""TIFF in, OME-TIFF out.

Reading understands ImageJ hyperstacks, OME-TIFF, plain pages and microscope vendors' TIFFs, classic and Big, of either
byte order, with the codecs of imagecodecs. Nothing that a file names is opened, and everything is checked before a
pixel is decoded. What cannot be trusted is to be read through `service.formats.sandbox`.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import tempfile
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from tifffile import TiffFile, TiffWriter

from service.core.buffers import release
from service.core.errors import BadParameter
from service.core.volume import Array, Description, OutputKind, Segmentation, Selection, Volume, VoxelSize
from service.formats import axes, ifd, imagej, metadata, pixels, series, tiff_template
from service.formats.axes import Layout, Part
from service.formats.parse_cache import ReadLog
from service.formats.pixels import Placement
from service.formats.series import StoredImage
from service.formats.tiff_template import Streams, TiffTemplate

Compress = Callable[[Array], Streams | None]

# So often what was written of a large array is let go of.
RELEASED_PAGES = 64

# Beyond this many bytes of pixels a classic TIFF, whose offsets have 32 bits, might not hold its pages.
_CLASSIC_BYTES = 2**32 - 2**26
_SMALL_BYTES, _SMALL_PAGES = 4 * 2**20, 2**10

# Bytes of planes that are compressed in one call, if that is more than one plane.
_BLOCK_BYTES = 2**22
# So many blocks are compressed at the same time, while earlier ones are written.
_AHEAD = 2


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


class _Form(NamedTuple):
    """Everything about a segmentation that files of such are alike in."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: OutputKind
    names: tuple[str, ...]
    voxel_size: VoxelSize | None
    counted: bool

    @classmethod
    def of(cls, made: Segmentation) -> Self:
        shape, dtype = made.pixels.shape, made.pixels.dtype
        return cls(shape, dtype, made.kind, made.names, made.voxel_size, made.count is not None)

    @property
    def pages(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def is_small(self) -> bool:
        """Whether a file of it is made in memory."""
        return math.prod(self.shape) * self.dtype.itemsize <= _SMALL_BYTES and self.pages <= _SMALL_PAGES


def write(
    segmentation: Segmentation, path: Path, *, bigtiff: bool | None = None, compress: Compress = lambda _pixels: None
) -> None:
    """Write labels, classes [Z, Y, X] or probabilities [K, Z, Y, X] as OME-TIFF; `path` appears only once complete.

    One page per plane, Deflate at its fastest level and no predictor, which every reader opens. BigTIFF, unless chosen,
    only where a classic TIFF might be too small. The voxel size goes to PhysicalSizeX, Y, Z in um, to the resolution
    tags, and to a second description for ImageJ's own reader, which knows no OME-XML. `compress` as in `encoded`; what
    it leaves is compressed by the writer of the pages, in strips.
    """
    form = _Form.of(segmentation)
    if bigtiff is None:
        bigtiff = segmentation.pixels.nbytes > _CLASSIC_BYTES
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("w+b") as file:
            if not bigtiff and (content := encoded(segmentation, compress)) is not None:
                file.write(content)
            else:
                pixels = segmentation.pixels
                _write(file, form, _streams(pixels, compress) or pixels, _number(), bigtiff=bigtiff)
                imagej.append(file, imagej.for_imagej(segmentation))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def encoded(segmentation: Segmentation, compress: Compress = lambda _pixels: None) -> bytes | None:
    """The file that `write` writes, where it is small; None: too large to be made in memory.

    compress  gives the zlib streams of the planes and where each of them ends, or None, which leaves that to zlib
    """
    form = _Form.of(segmentation)
    if not form.is_small:
        return None
    streams = compress(segmentation.pixels) or _compressed(segmentation.pixels)
    return _stencil(form).filled(streams, _number(), imagej.for_imagej(segmentation))


def _number() -> str:
    """A UUID of a file's own: nobody has to be unable to guess it, so it needs no call of the system."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@lru_cache(maxsize=32)
def _stencil(form: _Form) -> TiffTemplate:
    made = Segmentation(
        # Of the pixels only the shape matters.
        np.broadcast_to(np.zeros((), form.dtype), form.shape),
        form.kind,
        form.voxel_size,
        np.iinfo(np.uint32).max if form.counted else None,
        form.names,
    )

    def write(stream: BinaryIO) -> None:
        _write(stream, form, itertools.repeat(b"\0", form.pages), tiff_template.NUMBER, bigtiff=False)

    return TiffTemplate.cut(write, imagej.for_imagej(made))


def _write(file: BinaryIO, form: _Form, pixels: Array | Iterator[bytes], number: str, *, bigtiff: bool) -> None:
    """Pixels as they are, or pages compressed by then, in a file with this UUID."""
    pages = _pages(pixels) if isinstance(pixels, np.ndarray) else pixels
    plain = pages is not pixels
    planes = len(form.shape) == 3
    metadata: dict[str, object] = {
        "UUID": number,
        "Creator": "StackSeg",
        "axes": "ZYX" if planes else "CZYX",
        "Name": form.kind,
        "Channel": {"Name": form.kind if planes else [_printable(name) for name in form.names]},
    }
    resolution = None
    if form.voxel_size is not None:
        for axis, edge in zip("ZYX", form.voxel_size, strict=True):
            metadata |= {f"PhysicalSize{axis}": edge, f"PhysicalSize{axis}Unit": "µm"}
        resolution = (1e4 / form.voxel_size.x, 1e4 / form.voxel_size.y)
    with TiffWriter(file, ome=True, bigtiff=bigtiff) as writer:
        writer.write(
            pages,
            shape=form.shape,
            dtype=form.dtype,
            photometric="minisblack",
            compression="adobe_deflate",
            compressionargs={"level": 1},
            rowsperstrip=None if plain else form.shape[-2],
            resolution=resolution,
            resolutionunit="CENTIMETER" if resolution else None,
            metadata=metadata,
            software="StackSeg",
            maxworkers=len(os.sched_getaffinity(0)) if plain else 1,
        )


def _pages(pixels: Array) -> Iterator[Array]:
    """The planes [Y, X] of an array of any shape; of one that lies on disk, a few at a time are in memory."""
    for number, index in enumerate(np.ndindex(pixels.shape[:-2])):
        if number % RELEASED_PAGES == 0:
            release(pixels)
        yield pixels[index]


def _streams(pixels: Array, compress: Compress) -> Iterator[bytes] | None:
    """Planes [Z, Y, X] as `compress` makes them, one after the other; None where it leaves them to others."""
    if pixels.ndim != 3 or compress(pixels[:1]) is None:
        return None
    return _one_by_one(pixels, compress)


def _one_by_one(pixels: Array, compress: Compress) -> Iterator[bytes]:
    count = max(_BLOCK_BYTES // pixels[0].nbytes, 1)
    blocks = (pixels[begin : begin + count] for begin in range(0, len(pixels), count))
    for streams, ends in _ahead(lambda planes: compress(planes) or _compressed(planes), blocks):
        release(pixels)
        for start, end in itertools.pairwise((0, *ends.tolist())):
            yield streams[start:end].tobytes()


def _ahead(compressed: Callable[[Array], Streams], blocks: Iterator[Array]) -> Iterator[Streams]:
    """What comes of each, in order; that of the next few is made in threads meanwhile."""
    with ThreadPoolExecutor(_AHEAD, "compress") as crew:
        coming = deque(crew.submit(compressed, block) for block in itertools.islice(blocks, _AHEAD))
        while coming:
            yield coming.popleft().result()
            coming.extend(crew.submit(compressed, block) for block in itertools.islice(blocks, 1))


def _compressed(pixels: Array) -> Streams:
    """Compress planes by zlib, which is faster than the writer's encoder for small ones; little-endian."""
    little = pixels.dtype.newbyteorder("<")
    streams = [zlib.compress(np.ascontiguousarray(plane, little).data, 1) for plane in _pages(pixels)]
    return np.frombuffer(b"".join(streams), np.uint8), np.cumsum([len(stream) for stream in streams])


def _printable(name: str) -> str:
    """Without the control characters that XML cannot carry."""
    return "".join(letter for letter in name if letter.isprintable())
