"""Read OME-Zarr 0.4 and 0.5, and earlier ones: the finest resolution, chunk by chunk, with what its metadata state.

https://ngff.openmicroscopy.org. Stores that cannot be trusted are read through `service.formats.sandbox.reader`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.hardware import host
from service.core.quantities import TimeInterval
from service.core.types import Array, Selection
from service.formats import axes, sampling
from service.formats.axes import Layout
from service.formats.open_stack import OpenStack
from service.formats.placement import Placement, StoreBlock, check_size, native_dtype
from service.formats.sampling import Calibration
from service.formats.zarr import store as zarr_store
from service.formats.zarr.array import ZarrArray, open_array
from service.formats.zarr.store import Store, read_json, translate_errors

# Chunks of a selection; each is a file to open, or a part of one.
_MAX_CHUNKS = 2**21
_MAX_CHANNELS = 2**16
# Of chunks along X that are decoded together, so that what is stored of them is whole planes or rows.
_ROW_BYTES = 2**26
# Of chunks that are asked for at a time, once they are decoded, and their number.
_BATCH_BYTES, _BATCH_CHUNKS = 2**25, 64
# Of all that threads hold at a time.
_DECODING_BYTES = 2**29
_IMAGE = "Name the folder of one image, whose metadata have multiscales."


Place = tuple[int, ...]
"""Place of a chunk in the grid."""

Region = tuple[range, range, range]
"""Voxels along Z, Y and X, one after the other."""


@dataclass(frozen=True)
class ZarrImage:
    """The finest resolution of an OME-Zarr image; `axes` has one letter per stored dimension."""

    container: str
    array: ZarrArray
    axes: str
    channels: tuple[str, ...]
    colours: tuple[str, ...]
    calibration: Calibration
    time_interval: TimeInterval | None
    notes: tuple[str, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the pixels, in the byte order of the file."""
        return self.array.coding.dtype


@dataclass(frozen=True)
class ZarrStack(OpenStack):
    """An image with its axes and the selected part."""

    image: ZarrImage

    @property
    def colours(self) -> tuple[str, ...]:
        """One colour per stored channel."""
        return self.image.colours if len(self.image.colours) == len(self.names) else ("",) * len(self.names)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all chunks that hold a part of the selection."""
        return math.prod(len(indices) for indices in self._grid) * self.image.array.chunk_bytes

    def locate(self) -> Placement | None:
        """Return None: chunks lie in files of their own."""
        return None

    def check(self, limit_bytes: int) -> None:
        """Check what decoding takes. Raises TooLarge."""
        try:
            check_size(math.prod(self.shape) * self.dtype.itemsize, limit_bytes)
        except TooLarge as error:
            raise TooLarge(f"{error} An OME-Zarr of any size: stackseg segment IN OUT --workers N.") from None
        check_size(self.image.array.chunk_bytes, limit_bytes, "A chunk on the way to the selected volume")
        chunks = math.prod(len(indices) for indices in self._grid)
        if chunks > _MAX_CHUNKS:
            size = "x".join(map(str, self.image.array.chunks))
            raise TooLarge(f"The selected volume is in {chunks} chunks of {size}; write it with larger ones.")

    def decode(self, store: StoreBlock) -> None:
        """Decode the selected part, rows of chunks along X at a time, or chunk by chunk where rows are large."""
        self._decode(self._whole, store)

    def read_region(self, region: Region) -> Array:
        """Decode a part of the selection, [C, Z, Y, X] in native byte order, and read no chunk outside of it.

        `region` has the voxels along Z, Y and X. Raises BadFile.
        """
        decoded: Array = np.empty((self.shape[0], *map(len, region)), native_dtype(self.dtype))

        def store(channel: int, start: tuple[int, int, int], block: Array) -> None:
            z, y, x = (slice(first, first + length) for first, length in zip(start, block.shape, strict=True))
            decoded[channel, z, y, x] = block

        self._decode(region, store)
        return decoded

    @property
    def _whole(self) -> Region:
        z, y, x = map(range, self.shape[1:])
        return z, y, x

    def _decode(self, region: Region, store: StoreBlock) -> None:
        """Decode a part of the selection; places that `store` gets are relative to it."""
        array, x = self.image.array, self._axes.index("X")
        grid = self._grid_of(region)
        count = len(grid[x]) if len(grid[x]) * array.chunk_bytes <= _ROW_BYTES else 1
        rows = _split_rows(grid, x, count)
        # Stores that are far away are asked for many chunks at a time.
        step = max(1, min(_BATCH_BYTES // array.chunk_bytes, _BATCH_CHUNKS) // count)
        batches = [rows[first : first + step] for first in range(0, len(rows), step)]

        def decode_batch(batch: list[list[Place]]) -> None:
            stored = iter(array.read_chunks([place for row in batch for place in row]))
            for row in batch:
                self._decode_row(row, list(itertools.islice(stored, len(row))), region, store)

        # A thread holds a batch as it is stored, and a row of it.
        most = max(1, _DECODING_BYTES // ((step + 2) * count * array.chunk_bytes))
        host.run_in_threads(decode_batch, batches, math.prod(map(len, region)) * self.dtype.itemsize, most)

    @property
    def chunk_size(self) -> tuple[int, int, int]:
        """Voxels of a chunk along Z, Y and X."""
        edges = dict(zip(self._axes, self.image.array.chunks, strict=True))
        return edges.get("Z", 1), edges.get("Y", 1), edges.get("X", 1)

    @property
    def _axes(self) -> str:
        """One letter per stored dimension, of those of length 1 that the layout leaves out a dot."""
        return _spread(self.layout, self.image.array.shape)

    @property
    def _grid(self) -> list[Sequence[int]]:
        """Places of the chunks along each dimension that hold a part of the selection."""
        return self._grid_of(self._whole)

    def _grid_of(self, region: Region) -> list[Sequence[int]]:
        """Places of the chunks along each dimension that hold a part of a region of the selection."""
        samples = self.layout.length("S")
        channels = [divmod(number, samples) for number in self.part.channels]
        wanted = {"T": {self.part.time or 0}, "C": {c for c, _ in channels}, "S": {s for _, s in channels}}
        extent = dict(zip("ZYX", region, strict=True))
        array = self.image.array
        return [
            sorted({index // step for index in wanted[axis]})
            if axis in wanted
            else range(extent[axis].start // step, -(-extent[axis].stop // step))
            if axis in extent
            else range(-(-length // step))
            for axis, length, step in zip(self._axes, array.shape, array.chunks, strict=True)
        ]

    def _decode_row(
        self, row: Sequence[Place], stored: Sequence[bytes | None], region: Region, store: StoreBlock
    ) -> None:
        """Decode neighbours along X, and store what lies in the region."""
        blocks = [self._decode_chunk(place, data) for place, data in zip(row, stored, strict=True)]
        joined = np.concatenate(blocks, axis=4) if len(blocks) > 1 else blocks[0]
        steps = zip(self._axes, row[0], self.image.array.chunks, strict=True)
        first = {axis: index * step for axis, index, step in steps}
        start, inside = list[int](), list[slice]()
        for axis, extent, length in zip("ZYX", region, joined.shape[2:], strict=True):
            begin = max(first.get(axis, 0), extent.start)
            start.append(begin - extent.start)
            inside.append(slice(begin - first.get(axis, 0), min(length, extent.stop - first.get(axis, 0))))
        z, y, x = start
        cropped: Array = joined[:, :, inside[0], inside[1], inside[2]]
        for number, c, s in self._wanted(first, joined.shape):
            store(number, (z, y, x), np.ascontiguousarray(cropped[c, s]))

    def _decode_chunk(self, place: Place, stored: bytes | None) -> Array:
        """Decode one chunk without what lies beyond the array, [C, S, Z, Y, X] at the selected time."""
        array, letters = self.image.array, self._axes
        inside = tuple(min(step, n - i * step) for i, n, step in zip(place, array.shape, array.chunks, strict=True))
        if stored is None:
            chunk: Array = np.broadcast_to(array.fill, inside)
        else:
            chunk = array.coding.decode(stored, array.chunks)
        chunk = chunk[tuple(slice(length) for length in inside)].astype(self.dtype, copy=False)
        for axis in reversed(range(len(letters))):
            if letters[axis] in ".T":
                time = (self.part.time or 0) - place[axis] * array.chunks[axis] if letters[axis] == "T" else 0
                chunk = chunk.take(time, axis)
        return _expand(chunk, letters.replace(".", "").replace("T", ""))

    def _wanted(self, first: dict[str, int], shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """Yield the selected channels in a block: number among the selected, and place in it."""
        for position, number in enumerate(self.part.channels):
            c, s = divmod(number, self.layout.length("S"))
            c, s = c - first.get("C", 0), s - first.get("S", 0)
            if 0 <= c < shape[0] and 0 <= s < shape[1]:
                yield position, c, s


def open_stack(store: Store, selection: Selection, limit_bytes: int) -> ZarrStack:
    """Find the image of a store and check the selected part. Raises BadFile, AmbiguousAxes, BadParameter, TooLarge."""
    image = find_image(store)
    layout = axes.resolve_axes(image.axes, image.array.shape, selection.axes)
    channels = layout.length("C") * layout.length("S")
    if channels > _MAX_CHANNELS:
        raise TooLarge(f"The image has {channels} channels; send one with at most {_MAX_CHANNELS}.")
    names = image.channels if len(image.channels) == channels else ("",) * channels
    stack = ZarrStack(image, layout, axes.select(layout, names, selection), names)
    stack.check(limit_bytes)
    return stack


def find_image(store: Store) -> ZarrImage:
    """Find the image of a store, and the finest of its resolutions. Raises BadFile, TooLarge."""
    folder, attributes, notes = _find_group(store)
    with translate_errors("its OME metadata"):
        multiscales = attributes["multiscales"]
        if len(multiscales) > 1:
            notes.append(f"The store describes {len(multiscales)} images at one place; the first of them is read.")
        described = multiscales[0]
        dataset = described["datasets"][0]
        path = zarr_store.join(folder, dataset["path"])
    array = open_array(store, path)
    with translate_errors("its OME metadata"):
        version = attributes.get("version") or described.get("version") or ""
        letters, units = _parse_axes(described.get("axes"), len(array.shape))
        scale = _parse_scale(dataset, described, len(array.shape))
        steps = dict(zip(letters, zip(scale, units, strict=True), strict=True)) if scale else {}
        names, colours = _parse_channels(attributes)
        return ZarrImage(
            f"OME-Zarr {version}".strip(),
            array,
            letters,
            names,
            colours,
            _parse_calibration(steps),
            sampling.parse_time_interval(*steps["T"]) if "T" in steps else None,
            tuple(notes),
        )


def _find_group(store: Store) -> tuple[str, dict[str, Any], list[str]]:
    """Return the group of the image, its OME metadata, and notes about its choice. Raises BadFile."""
    folder, attributes, notes = "", _attributes(store, ""), list[str]()
    if "multiscales" not in attributes and "bioformats2raw.layout" in attributes:
        folder, notes = "0", ["The store is a collection of images; the first of them is read."]
        attributes = _attributes(store, folder)
    if not attributes.get("multiscales"):
        kind = "a plate" if "plate" in attributes else "a well" if "well" in attributes else "no image of OME-Zarr"
        raise BadFile(f"The Zarr store holds {kind}. {_IMAGE}")
    return folder, attributes, notes


def _attributes(store: Store, folder: str) -> dict[str, Any]:
    """Return the OME metadata of a group. Raises BadFile."""
    prefix = f"{folder}/" if folder else ""
    group = read_json(store, f"{prefix}zarr.json")
    with translate_errors("zarr.json"):
        if group is not None:
            if group["node_type"] != "group":
                raise BadFile(f"The folder is a single array of Zarr. {_IMAGE}")
            return dict(group.get("attributes", {}).get("ome", {}))
    return read_json(store, f"{prefix}.zattrs") or {}


def _parse_axes(stated: Any, dimensions: int) -> tuple[str, list[str]]:
    """Return one letter per dimension, Q where it has no meaning here, and the units."""
    if stated is None and dimensions == 5:
        return "TCZYX", [""] * 5
    letters, units = "", []
    for axis in stated or ["?"] * dimensions:
        fields = axis if isinstance(axis, dict) else {"name": axis}
        name = str(fields["name"]).upper()
        letters += {"time": "T", "channel": "C"}.get(str(fields.get("type")), name if name in {*"TCZYX"} else "Q")
        units.append(str(fields.get("unit") or ""))
    if len(letters) != dimensions:
        raise BadFile(f"The OME metadata name {len(letters)} axes of an array of {dimensions} dimensions.")
    return letters, units


def _parse_scale(dataset: dict[str, Any], described: dict[str, Any], dimensions: int) -> list[float]:
    """Return the step along each dimension, [] where none is stated."""
    steps: list[float] = []
    for transformations in (dataset.get("coordinateTransformations"), described.get("coordinateTransformations")):
        for transformation in transformations or ():
            if transformation.get("type") == "scale":
                factors = [float(factor) for factor in transformation["scale"]]
                if len(factors) != dimensions:
                    raise BadFile(f"The OME metadata state a scale of {len(factors)} numbers for {dimensions} axes.")
                steps = [step * factor for step, factor in zip(steps or [1.0] * dimensions, factors, strict=True)]
    return steps


def _parse_calibration(steps: Mapping[str, tuple[float, str]]) -> Calibration:
    """Return the voxel size from the step along each axis and its unit."""
    edges = [steps.get(axis, (None, "")) for axis in "ZYX"]
    return sampling.from_lengths([size for size, _ in edges], [unit for _, unit in edges], "OME-Zarr")


def _parse_channels(attributes: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a name and a colour per channel, () where there are none."""
    channels = (attributes.get("omero") or {}).get("channels") or ()
    names = tuple(str(channel.get("label") or "")[:200] for channel in channels)
    return names, tuple(_parse_colour(channel.get("color")) for channel in channels)


def _parse_colour(stated: Any) -> str:
    """Return a colour as #rrggbb, "" where none is stated."""
    is_colour = isinstance(stated, str) and re.fullmatch("[0-9a-fA-F]{6}", stated)
    return f"#{stated.lower()}" if is_colour else ""


def _expand(chunk: Array, letters: str) -> Array:
    """Return pixels with these axes as [C, S, Z, Y, X]."""
    missing = "".join(axis for axis in "CSZYX" if axis not in letters)
    chunk = chunk[(np.newaxis,) * len(missing)]
    return chunk.transpose([(missing + letters).index(axis) for axis in "CSZYX"])


def _split_rows(grid: Sequence[Sequence[int]], x: int, count: int) -> list[list[Place]]:
    """Return the places of chunks in rows of up to `count` along the dimension `x`."""
    return [
        [(*place[:x], index, *place[x + 1 :]) for index in grid[x][first : first + count]]
        for place in itertools.product(*(indices if axis != x else range(1) for axis, indices in enumerate(grid)))
        for first in range(0, len(grid[x]), count)
    ]


def _spread(layout: Layout, shape: Sequence[int]) -> str:
    """Return a letter per stored dimension, where the layout may leave out those of length 1."""
    letters, rest = "", list(zip(layout.axes, layout.shape, strict=True))
    for length in shape:
        is_next = bool(rest) and rest[0][1] == length
        letters += rest.pop(0)[0] if is_next else "."
    return letters
