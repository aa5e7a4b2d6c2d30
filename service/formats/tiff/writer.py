"""Write segmentations as OME-TIFF, and stacks as uncompressed TIFF."""

from __future__ import annotations

import io
import itertools
import json
import math
import struct
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from defusedxml.ElementTree import fromstring  # type: ignore[import-untyped]
from isal import isal_zlib
from tifffile import TiffFile, TiffWriter, imwrite

from service.core.buffers import release_pages
from service.core.files.atomic_files import write_atomically
from service.core.hardware import host
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Array, OutputKind, Segmentation, Volume
from service.formats.tiff import imagej_metadata
from service.formats.tiff.imagej_metadata import PROVENANCE_NAMESPACE

NO_PROVENANCE: Mapping[str, str] = MappingProxyType({})

# Maximum size of the pixels in a classic TIFF, which has 32-bit offsets. The remaining bytes are reserved for tags.
_MAX_CLASSIC_TIFF_BYTES = 2**32 - 2**26
# Files with up to this many bytes of pixels are encoded in memory. On two cores, threads do not make this faster.
_MAX_IN_MEMORY_BYTES = 4 * 2**20
# Maximum number of compression threads. More threads were not faster on a host with 16 cores.
_MAX_THREADS = 8
# Bytes of pixels per compression task. If a task is a single plane of 128 KiB, two threads are slower than no threads.
_TASK_BYTES = 2**20
# Number of bytes that are read from a mapped array before its memory pages are released.
_RELEASE_BYTES = 2**24
# Types of the values of tags.
_ASCII, _SHORT, _LONG, _LONG8 = 2, 3, 4, 16


class _FileLayout(NamedTuple):
    """Properties of a file except its pixels and provenance."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: OutputKind | Literal["image"]
    voxel_size: VoxelSize | None
    axes: str
    channel_names: tuple[str, ...] = ()
    time_interval: TimeInterval | None = None

    @property
    def page_count(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(segmentation: Segmentation, path: Path, provenance: Mapping[str, str] = NO_PROVENANCE) -> None:
    """Write labels or classes [Z, Y, X], or probabilities [K, Z, Y, X], as OME-TIFF.

    The array of a time series has an additional first axis T. The file appears only when complete.

    The file has one page per plane, compressed with Deflate without a predictor, which every reader supports. It is a
    BigTIFF only if the pixels might not fit into a classic TIFF. The voxel size is stored as PhysicalSizeX, Y, Z in um,
    in the resolution tags, and in a second description for ImageJ's built-in reader. `provenance` maps names to values
    that describe how the segmentation was made. It is stored as an annotation of the image in the OME-XML, and as lines
    of the second description. Labels and classes have a color map.

    libtiff warns about the second description, and about color maps of 256 colors in files with 16 or 32 bits. ImageJ
    has no other source for the distance of planes and the display range, and reads no other color maps.
    """
    # Most files are sent to a client and deleted, so syncing to disk is left to callers that retain the file.
    with write_atomically(path, sync=False) as partial_path, partial_path.open("w+b") as file:
        _write_segmentation(file, segmentation, provenance)


def encode(segmentation: Segmentation, provenance: Mapping[str, str] = NO_PROVENANCE) -> bytes | None:
    """Return the bytes of the file that `write` would write, or None if it is too large to be encoded in memory."""
    if segmentation.pixels.nbytes > _MAX_IN_MEMORY_BYTES:
        return None
    file = io.BytesIO()
    _write_segmentation(file, segmentation, provenance)
    return file.getvalue()


def read_provenance(path: Path) -> dict[str, str]:
    """Return the provenance in a file that `write` has written."""
    with TiffFile(path) as file:
        description = fromstring(file.pages.first.description)
    return {
        str(entry.get("K")): entry.text or "" for entry in description.iterfind(".//{*}MapAnnotation/{*}Value/{*}M")
    }


def write_image(volume: Volume, path: Path) -> None:
    """Write the first channel of a stack as an OME-TIFF with the axes ZYX. The file appears only when complete."""
    shape = volume.shape[1:]
    planes = (volume.read(z, z + 1)[0, 0] for z in range(shape[0]))
    with write_atomically(path, sync=False) as partial_path, partial_path.open("w+b") as file:
        _write_pages(file, _FileLayout(shape, volume.dtype, "image", volume.voxel_size, "ZYX"), planes, {})


def write_uncompressed(pixels: Array, path: Path) -> None:
    """Write a stack [Z, Y, X] with up to 16 bits per pixel as an uncompressed ImageJ TIFF, as most microscopes do."""
    imwrite(path, pixels, imagej=True, metadata={"axes": "ZYX"})


def make_uncompressed_header(shape: Sequence[int], dtype: np.dtype[Any], axes: str | None) -> bytes:
    """Return the bytes before the pixels of an uncompressed BigTIFF with a single page, as tifffile writes it.

    The pixels must follow in C order and little-endian byte order. If `axes` is None, the file does not name its axes.
    """
    names = {} if axes is None else {"axes": axes}
    description = json.dumps({"shape": list(shape), **names, "truncated": True}).encode() + b"\0"
    width, length = shape[-1], shape[-2]
    tags = {  # tag: type, number of values, value
        256: (_LONG, 1, width),
        257: (_LONG, 1, length),
        258: (_SHORT, 1, 8 * dtype.itemsize),
        259: (_SHORT, 1, 1),  # no compression
        262: (_SHORT, 1, 1),  # zero is black
        270: (_ASCII, len(description), 0),
        273: (_LONG8, 1, 0),
        277: (_SHORT, 1, 1),  # samples per pixel
        278: (_LONG, 1, length),  # rows per strip
        279: (_LONG8, 1, width * length * dtype.itemsize),
        339: (_SHORT, 1, {"u": 1, "i": 2, "f": 3}[dtype.kind]),
    }
    description_offset = 16 + 8 + 20 * len(tags) + 8
    # Aligned for all dtypes, so that the pixels can be mapped.
    pixels_offset = -(-(description_offset + len(description)) // 16) * 16
    tags[270] = (_ASCII, len(description), description_offset)
    tags[273] = (_LONG8, 1, pixels_offset)
    header = struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16)
    directory = b"".join(struct.pack("<HHQQ", tag, *entry) for tag, entry in tags.items())
    content = header + struct.pack("<Q", len(tags)) + directory + struct.pack("<Q", 0) + description
    return content.ljust(pixels_offset, b"\0")


def _write_segmentation(file: BinaryIO, segmentation: Segmentation, provenance: Mapping[str, str]) -> None:
    pixels = segmentation.pixels
    layout = _FileLayout(
        pixels.shape,
        pixels.dtype,
        segmentation.kind,
        segmentation.voxel_size,
        segmentation.axes,
        segmentation.names,
        segmentation.time_interval,
    )
    description = imagej_metadata.make_description(segmentation) + imagej_metadata.make_provenance_lines(provenance)
    _write_pages(file, layout, _iterate_planes(pixels), _remove_control_characters(provenance), description)


def _remove_control_characters(provenance: Mapping[str, str]) -> dict[str, str]:
    """Remove control characters, which XML cannot represent."""
    return {name: "".join(filter(str.isprintable, value)) for name, value in provenance.items()}


def _make_uuid(layout: _FileLayout, provenance: Mapping[str, str]) -> uuid.UUID:
    """Return a random identifier, or one that is determined by the source if that is known.

    A result that is computed or filtered again has the same ETag, and therefore must have the same bytes.
    """
    if provenance.keys().isdisjoint({"filter", "source_blake3"}):
        return uuid.uuid4()
    return uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([layout.kind, layout.shape, dict(provenance)], sort_keys=True))


def _make_ome_metadata(layout: _FileLayout, provenance: Mapping[str, str]) -> dict[str, object]:
    """Return the metadata from which tifffile generates the OME-XML of a file."""
    # XML cannot represent control characters.
    channel_names = ["".join(filter(str.isprintable, name)) for name in layout.channel_names]
    metadata: dict[str, object] = {
        "UUID": str(_make_uuid(layout, provenance)),
        "Creator": "StackSeg",
        "axes": layout.axes,
        "Name": layout.kind,
        "Channel": {"Name": channel_names if "C" in layout.axes else layout.kind},
    }
    if provenance:
        metadata["MapAnnotation"] = {"Namespace": PROVENANCE_NAMESPACE, "Value": dict(provenance)}
    if layout.time_interval is not None:
        metadata |= {"TimeIncrement": layout.time_interval.length, "TimeIncrementUnit": layout.time_interval.unit}
    for axis, size in zip("ZYX", layout.voxel_size or (), strict=False):
        metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "µm"}
    return metadata


def _write_pages(
    file: BinaryIO, layout: _FileLayout, planes: Iterator[Array], provenance: Mapping[str, str], description: str = ""
) -> None:
    """Write planes [Y, X] as an OME-TIFF. `description` is the second image description, for ImageJ."""
    voxel_size, tags = layout.voxel_size, list[tuple[int | str, str, int, Any, bool]]()
    if description:
        # The tag is given by name because tifffile reserves the tag number for the description that it writes itself.
        tags.append(("ImageDescription", "s", 0, description, True))
    if layout.kind in {"labels", "classes"}:
        colors = imagej_metadata.make_label_colors()
        # ImageJ reads only the first of several 8-bit pages if the others have no color map: it considers them to be
        # images of another type. Of deeper pages, it reads the color map of the first page, which is sufficient.
        is_first_page_only = layout.dtype.itemsize > 1
        tags.append((imagej_metadata.COLOR_MAP_TAG, "H", len(colors), colors, is_first_page_only))
    with TiffWriter(file, ome=True, bigtiff=layout.nbytes > _MAX_CLASSIC_TIFF_BYTES) as writer:
        writer.write(
            _compress_planes(planes, layout),
            shape=layout.shape,
            dtype=layout.dtype,
            photometric="minisblack",
            compression="adobe_deflate",
            rowsperstrip=layout.shape[-2],
            resolution=None if voxel_size is None else (1e4 / voxel_size.x, 1e4 / voxel_size.y),
            resolutionunit=None if voxel_size is None else "CENTIMETER",
            metadata=_make_ome_metadata(layout, provenance),
            software="StackSeg",
            extratags=tags,
        )


def _iterate_planes(pixels: Array) -> Iterator[Array]:
    """Yield the planes [Y, X] of an array. Only a few planes of a mapped array are held in memory."""
    planes_per_release = math.ceil(_RELEASE_BYTES / (math.prod(pixels.shape[-2:]) * pixels.itemsize))
    for plane_number, index in enumerate(np.ndindex(pixels.shape[:-2])):
        if plane_number % planes_per_release == 0:
            release_pages(pixels)
        yield pixels[index]


def _compress_planes(planes: Iterator[Array], layout: _FileLayout) -> Iterator[bytes]:
    """Yield compressed planes in order. Unless the file is small, threads compress planes ahead of time."""
    if layout.nbytes <= _MAX_IN_MEMORY_BYTES:
        yield from map(_compress, planes)
        return
    thread_count = min(host.count_usable_cores(), _MAX_THREADS)
    planes_per_task = max(1, _TASK_BYTES * layout.page_count // layout.nbytes)
    futures: deque[Future[list[bytes]]] = deque()
    with ThreadPoolExecutor(thread_count, "compress") as executor:
        while batch := list(itertools.islice(planes, planes_per_task)):
            futures.append(executor.submit(_compress_batch, batch))
            if len(futures) > 2 * thread_count:
                yield from futures.popleft().result()
        for future in futures:
            yield from future.result()


def _compress_batch(planes: list[Array]) -> list[bytes]:
    return [_compress(plane) for plane in planes]


def _compress(plane: Array) -> bytes:
    """Compress the little-endian pixels of a plane to a zlib stream."""
    pixels = np.require(plane, plane.dtype.newbyteorder("<"), ["C"])
    return isal_zlib.compress(pixels, 1)
