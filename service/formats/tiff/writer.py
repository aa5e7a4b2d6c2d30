"""Write a segmentation as OME-TIFF."""

from __future__ import annotations

import io
import itertools
import math
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from isal import isal_zlib
from tifffile import TiffWriter, imwrite

from service.core.buffers import release_pages
from service.core.files.whole_file import write_whole
from service.core.hardware import host
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Array, OutputKind, Segmentation, Volume
from service.formats.tiff import imagej_writer

NOTHING: Mapping[str, str] = MappingProxyType({})
ORIGIN_NAMESPACE = "stackseg/origin"

# A classic TIFF has 32-bit offsets, and might not hold its pages beyond this many bytes of pixels.
_CLASSIC_BYTES = 2**32 - 2**26
# Largest file, in bytes of pixels, that is made in memory. On two cores, threads do not pay off for smaller ones.
_SMALL_BYTES = 4 * 2**20
# Threads that compress. More have brought nothing on a host with 16 cores.
_MAX_THREADS = 8
# Bytes of pixels in a task of such a thread. With single planes of 128 KiB, two threads are slower than none.
_TASK_BYTES = 2**20
# Bytes that are read of a mapped array between two releases of its memory.
_RELEASE_BYTES = 2**24


class _Form(NamedTuple):
    """Everything that decides about a file but its pixels and origin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: OutputKind | Literal["image"]
    voxel_size: VoxelSize | None
    axes: str
    names: tuple[str, ...] = ()
    time_interval: TimeInterval | None = None

    @property
    def pages(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(segmentation: Segmentation, path: Path, origin: Mapping[str, str] = NOTHING) -> None:
    """Write labels, classes [Z, Y, X] or probabilities [K, Z, Y, X] as OME-TIFF; `path` appears only once complete.

    A series has a first axis T and its time interval.

    One page per plane, Deflate and no predictor, which every reader opens. BigTIFF only where a classic TIFF might be
    too small. The voxel size goes to PhysicalSizeX, Y, Z in um, to the resolution tags, and to a second description for
    ImageJ's own reader. So does `origin`, facts about how the segmentation was made by their names: it is an annotation
    of the image in the OME-XML, and lines of that description. Labels and classes have colours.
    """
    # Whoever keeps the file has it written to the disk: most are sent to a client and deleted.
    with write_whole(path, sync=False) as partial, partial.open("w+b") as file:
        _write_segmentation(file, segmentation, origin)


def encode(segmentation: Segmentation, origin: Mapping[str, str] = NOTHING) -> bytes | None:
    """Return the bytes that `write` writes, or None where the file is too large to be made in memory."""
    if segmentation.pixels.nbytes > _SMALL_BYTES:
        return None
    file = io.BytesIO()
    _write_segmentation(file, segmentation, origin)
    return file.getvalue()


def write_image(volume: Volume, path: Path) -> None:
    """Write the first channel of a stack as OME-TIFF ZYX with its voxel size; `path` appears only once complete."""
    shape = volume.shape[1:]
    planes = (volume.read(z, z + 1)[0, 0] for z in range(shape[0]))
    with write_whole(path, sync=False) as partial, partial.open("w+b") as file:
        _write_pages(file, _Form(shape, volume.dtype, "image", volume.voxel_size, "ZYX"), planes, {})


def write_uncompressed(pixels: Array, path: Path) -> None:
    """Write a stack [Z, Y, X] as most microscopes do: an ImageJ TIFF without compression, of up to 16 bits."""
    imwrite(path, pixels, imagej=True, metadata={"axes": "ZYX"})


def _write_segmentation(file: BinaryIO, segmentation: Segmentation, origin: Mapping[str, str]) -> None:
    pixels = segmentation.pixels
    form = _Form(
        pixels.shape,
        pixels.dtype,
        segmentation.kind,
        segmentation.voxel_size,
        segmentation.axes,
        segmentation.names,
        segmentation.time_interval,
    )
    description = imagej_writer.describe(segmentation) + imagej_writer.describe_origin(origin)
    _write_pages(file, form, _planes(pixels), _clean(origin), description)


def _clean(origin: Mapping[str, str]) -> dict[str, str]:
    """Leave out control characters, which XML cannot carry."""
    return {name: "".join(filter(str.isprintable, fact)) for name, fact in origin.items()}


def _describe(form: _Form, origin: Mapping[str, str]) -> dict[str, object]:
    """Return tifffile's metadata for the OME-XML of a file."""
    # XML cannot carry control characters.
    names = ["".join(filter(str.isprintable, name)) for name in form.names]
    metadata: dict[str, object] = {
        "UUID": str(uuid.uuid4()),
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
    file: BinaryIO, form: _Form, planes: Iterator[Array], origin: Mapping[str, str], description: str = ""
) -> None:
    """Write an OME-TIFF of planes [Y, X]; `description` is the one for ImageJ."""
    size, tags = form.voxel_size, list[tuple[int | str, str, int, Any, bool]]()
    if description:
        # By its name, as tifffile takes the number for that of the description which it writes itself.
        tags.append(("ImageDescription", "s", 0, description, True))
    if form.kind in {"labels", "classes"}:
        colours = imagej_writer.label_colours()
        tags.append((imagej_writer.COLOR_MAP, "H", len(colours), colours, True))
    with TiffWriter(file, ome=True, bigtiff=form.nbytes > _CLASSIC_BYTES) as writer:
        writer.write(
            _compress_planes(planes, form),
            shape=form.shape,
            dtype=form.dtype,
            photometric="minisblack",
            compression="adobe_deflate",
            rowsperstrip=form.shape[-2],
            resolution=None if size is None else (1e4 / size.x, 1e4 / size.y),
            resolutionunit=None if size is None else "CENTIMETER",
            metadata=_describe(form, origin),
            software="StackSeg",
            extratags=tags,
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
