"""Write a segmentation as OME-TIFF."""

from __future__ import annotations

import io
import itertools
import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, NamedTuple, Self
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from isal import isal_zlib
from tifffile import TiffWriter, imwrite

from service.core.buffers import release_pages
from service.core.files.whole_file import write_whole
from service.core.hardware import host
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Array, OutputKind, Segmentation, Volume
from service.formats.tiff import imagej_writer
from service.formats.tiff import template as tiff_template
from service.formats.tiff.template import TiffTemplate

NOTHING: Mapping[str, str] = MappingProxyType({})
ORIGIN_NAMESPACE = "stackseg/origin"

# A classic TIFF has 32-bit offsets, and might not hold its pages beyond this many bytes of pixels.
_CLASSIC_BYTES = 2**32 - 2**26
# Largest file, in bytes of pixels, that is made in memory. On two cores, threads do not pay off for smaller ones.
_SMALL_BYTES = 4 * 2**20
# Pages up to which a file has a template. At some 300 bytes a page, all that are kept take 10 MB at most.
_TEMPLATE_PAGES = 2**10
# Threads that compress. More have brought nothing on a host with 16 cores.
_MAX_THREADS = 8
# Bytes of pixels in a task of such a thread. With single planes of 128 KiB, two threads are slower than none.
_TASK_BYTES = 2**20
# Steps of the bytes that a template has for the origin of a segmentation.
_ROOM_STEP = 512
# Bytes that are read of a mapped array between two releases of its memory.
_RELEASE_BYTES = 2**24


class _Form(NamedTuple):
    """Everything that decides about a file but its pixels, UUID, number of objects and origin.

    room  bytes that a template has for the origin
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: OutputKind | Literal["image"]
    names: tuple[str, ...]
    voxel_size: VoxelSize | None
    counted: bool
    axes: str
    time_interval: TimeInterval | None
    room: int = 0

    @classmethod
    def of(cls, segmentation: Segmentation, room: int = 0) -> Self:
        shape, dtype, counted = segmentation.pixels.shape, segmentation.pixels.dtype, segmentation.count is not None
        facts = segmentation.kind, segmentation.names, segmentation.voxel_size
        return cls(shape, dtype, *facts, counted, segmentation.axes, segmentation.time_interval, room)

    @property
    def pages(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_template(self) -> bool:
        """Whether a file of this form is made from a template, unless it is to be a BigTIFF."""
        # Unlike the writer, a template would not notice an offset beyond 32 bits.
        return self.nbytes <= _CLASSIC_BYTES and self.pages <= _TEMPLATE_PAGES


def write(
    segmentation: Segmentation, path: Path, origin: Mapping[str, str] = NOTHING, *, bigtiff: bool | None = None
) -> None:
    """Write labels, classes [Z, Y, X] or probabilities [K, Z, Y, X] as OME-TIFF; `path` appears only once complete.

    A series has a first axis T and its time interval.

    One page per plane, Deflate and no predictor, which every reader opens. BigTIFF, unless chosen, only where a classic
    TIFF might be too small. The voxel size goes to PhysicalSizeX, Y, Z in um, to the resolution tags, and to a second
    description for ImageJ's own reader. So does `origin`, facts about how the segmentation was made by their names: it
    is an annotation of the image in the OME-XML, and lines of that description. Labels and classes have colours.
    """
    form = _Form.of(segmentation)
    if bigtiff is None:
        bigtiff = form.nbytes > _CLASSIC_BYTES

    def write_content(file: BinaryIO) -> None:
        pages = _compress_planes(_planes(segmentation.pixels), form)
        if form.has_template and not bigtiff:
            _fill_template(file, segmentation, pages, origin)
        else:
            _write_pages(file, form, pages, _describe(form, _make_uuid(), _clean(origin)), bigtiff=bigtiff)
            description = imagej_writer.describe(segmentation) + imagej_writer.describe_origin(origin)
            imagej_writer.append_description(file, description)

    _write_whole(path, write_content)


def write_image(volume: Volume, path: Path) -> None:
    """Write the first channel of a stack as OME-TIFF ZYX with its voxel size; `path` appears only once complete."""
    shape = volume.shape[1:]
    form = _Form(shape, volume.dtype, "image", (), volume.voxel_size, counted=False, axes="ZYX", time_interval=None)
    pages = _compress_planes((volume.read(z, z + 1)[0, 0] for z in range(shape[0])), form)
    bigtiff = form.nbytes > _CLASSIC_BYTES
    _write_whole(path, lambda file: _write_pages(file, form, pages, _describe(form, _make_uuid(), {}), bigtiff=bigtiff))


def write_uncompressed(pixels: Array, path: Path) -> None:
    """Write a stack [Z, Y, X] as most microscopes do: an ImageJ TIFF without compression, of up to 16 bits."""
    imwrite(path, pixels, imagej=True, metadata={"axes": "ZYX"})


def _write_whole(path: Path, write_content: Callable[[BinaryIO], None]) -> None:
    """Have the content of a file written under another name, which becomes `path` at the end.

    Whoever keeps the file has it written to the disk: most are sent to a client and deleted.
    """
    with write_whole(path, sync=False) as partial, partial.open("w+b") as file:
        write_content(file)


def encode(segmentation: Segmentation, origin: Mapping[str, str] = NOTHING) -> bytes | None:
    """Return the bytes that `write` writes, or None where the file is too large to be made in memory."""
    form = _Form.of(segmentation)
    if form.nbytes > _SMALL_BYTES or not form.has_template:
        return None
    file = io.BytesIO()
    _fill_template(file, segmentation, _compress_planes(_planes(segmentation.pixels), form), origin)
    return file.getvalue()


def _fill_template(
    file: BinaryIO, segmentation: Segmentation, pages: Iterable[bytes], origin: Mapping[str, str]
) -> None:
    """Write what `write` does, from pages that are compressed already, to an empty file."""
    xml = "".join(f"<M K={quoteattr(name)}>{escape(fact)}</M>" for name, fact in _clean(origin).items()).encode()
    lines = imagej_writer.describe_origin(origin)
    # Templates have room for origins of several lengths, so that few of them serve all.
    room = -(-max(len(xml), len(lines)) // _ROOM_STEP) * _ROOM_STEP
    description = imagej_writer.describe(segmentation) + lines
    _template(_Form.of(segmentation, room)).fill(file, pages, _make_uuid(), xml, description)


def _make_uuid() -> str:
    """Return a random UUID. It need not be unpredictable, so no system call is spent on it."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@lru_cache(maxsize=32)
def _template(form: _Form) -> TiffTemplate:
    if form.kind == "image":
        raise ValueError("images have no template")
    segmentation = Segmentation(
        # The template needs only the shape of the pixels.
        np.broadcast_to(np.zeros((), form.dtype), form.shape),
        form.kind,
        form.voxel_size,
        np.iinfo(np.uint32).max if form.counted else None,
        form.names,
        time_interval=form.time_interval,
    )

    def write(stream: BinaryIO) -> None:
        pages = itertools.repeat(b"\0", form.pages)
        metadata = _describe(form, tiff_template.UUID_PLACEHOLDER, tiff_template.origin_placeholder(form.room))
        _write_pages(stream, form, pages, metadata, bigtiff=False)

    return TiffTemplate.prepare(write, imagej_writer.describe(segmentation) + "\n" * form.room, form.room)


def _clean(origin: Mapping[str, str]) -> dict[str, str]:
    """Leave out control characters, which XML cannot carry."""
    return {name: "".join(filter(str.isprintable, fact)) for name, fact in origin.items()}


def _describe(form: _Form, number: str, origin: Mapping[str, str]) -> dict[str, object]:
    """Return tifffile's metadata for the OME-XML of a file with this UUID."""
    # XML cannot carry control characters.
    names = ["".join(filter(str.isprintable, name)) for name in form.names]
    metadata: dict[str, object] = {
        "UUID": number,
        "Creator": "StackSeg",
        "axes": form.axes,
        "Name": form.kind,
        "Channel": {"Name": names if "C" in form.axes else form.kind},
    }
    if origin:
        metadata["MapAnnotation"] = {"Namespace": ORIGIN_NAMESPACE, "Value": dict(origin)}
    if form.time_interval is not None:
        metadata |= {"TimeIncrement": form.time_interval.length, "TimeIncrementUnit": form.time_interval.unit}
    for axis, edge in zip("ZYX", form.voxel_size or (), strict=False):
        metadata |= {f"PhysicalSize{axis}": edge, f"PhysicalSize{axis}Unit": "µm"}
    return metadata


def _write_pages(
    file: BinaryIO, form: _Form, pages: Iterator[bytes], metadata: dict[str, object], *, bigtiff: bool
) -> None:
    """Write a TIFF from pages that are compressed already, and what `_describe` returns."""
    colours = imagej_writer.label_colours() if form.kind in {"labels", "classes"} else ()
    size = form.voxel_size
    with TiffWriter(file, ome=True, bigtiff=bigtiff) as writer:
        writer.write(
            pages,
            shape=form.shape,
            dtype=form.dtype,
            photometric="minisblack",
            compression="adobe_deflate",
            rowsperstrip=form.shape[-2],
            resolution=None if size is None else (1e4 / size.x, 1e4 / size.y),
            resolutionunit=None if size is None else "CENTIMETER",
            metadata=metadata,
            software="StackSeg",
            extratags=[(imagej_writer.COLOR_MAP, "H", len(colours), colours, True)] if colours else (),
        )


def _planes(pixels: Array) -> Iterator[Array]:
    """Yield the planes [Y, X] of an array, and keep only a few planes of a mapped one in memory."""
    step = math.ceil(_RELEASE_BYTES / (math.prod(pixels.shape[-2:]) * pixels.itemsize))
    for number, index in enumerate(np.ndindex(pixels.shape[:-2])):
        if number % step == 0:
            release_pages(pixels)
        yield pixels[index]


def _compress_planes(planes: Iterator[Array], form: _Form) -> Iterator[bytes]:
    """Yield planes [Y, X] compressed, in order. Of all but small files, threads compress the next few meanwhile."""
    if form.nbytes <= _SMALL_BYTES:
        yield from map(_compress, planes)
        return
    workers = min(host.usable_cores(), _MAX_THREADS)
    planes_per_task = max(1, _TASK_BYTES * form.pages // form.nbytes)
    pending: deque[Future[list[bytes]]] = deque()
    with ThreadPoolExecutor(workers, "compress") as threads:
        while batch := list(itertools.islice(planes, planes_per_task)):
            pending.append(threads.submit(_compress_batch, batch))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        for compressed in pending:
            yield from compressed.result()


def _compress_batch(planes: list[Array]) -> list[bytes]:
    return [_compress(plane) for plane in planes]


def _compress(plane: Array) -> bytes:
    """Compress a plane to a zlib stream of little-endian pixels."""
    pixels = np.require(plane, plane.dtype.newbyteorder("<"), ["C"])
    return isal_zlib.compress(pixels, 1)
