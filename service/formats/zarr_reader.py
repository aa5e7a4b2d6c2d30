"""Read OME-Zarr 0.4 and 0.5, and earlier ones: the finest resolution, chunk by chunk, with what its metadata state.

https://ngff.openmicroscopy.org. Stores that cannot be trusted are read through `service.formats.sandbox`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.volume import Array, Selection, TimeInterval
from service.formats import axes, pixels, time_interval, voxel_size, zarr_store
from service.formats.axes import Layout
from service.formats.open_stack import OpenStack
from service.formats.pixels import Placement
from service.formats.pixels import Store as StorePixels
from service.formats.voxel_size import Calibration
from service.formats.zarr_array import ZarrArray, open_array, read_json, translate_errors
from service.formats.zarr_store import Store

# Chunks of a selection; each is a file to open, or a part of one.
_MAX_CHUNKS = 2**21
_MAX_CHANNELS = 2**16
_IMAGE = "Name the folder of one image, whose metadata have multiscales."


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
        pixels.check_size(math.prod(self.shape) * self.dtype.itemsize, limit_bytes)
        pixels.check_size(self.image.array.chunk_bytes, limit_bytes, "A chunk on the way to the selected volume")
        chunks = math.prod(len(indices) for indices in self._grid)
        if chunks > _MAX_CHUNKS:
            size = "x".join(map(str, self.image.array.chunks))
            raise TooLarge(f"The selected volume is in {chunks} chunks of {size}; write it with larger ones.")

    def decode(self, store: StorePixels) -> None:
        """Decode the selected part, a row of chunks along X at a time."""
        x = self._axes.index("X")
        outer = [indices if axis != x else range(1) for axis, indices in enumerate(self._grid)]
        rows = list(itertools.product(*outer))

        def decode_row(row: tuple[int, ...]) -> None:
            places = [(*row[:x], index, *row[x + 1 :]) for index in self._grid[x]]
            blocks = [self._read(place) for place in places]
            joined = np.concatenate(blocks, axis=4) if len(blocks) > 1 else blocks[0]
            first = {axis: index * step for axis, index, step in zip(self._axes, row, self._steps, strict=True)}
            for number, c, s in self._wanted(first, joined.shape):
                store(number, first.get("Z", 0), first["Y"], np.ascontiguousarray(joined[c, s]))

        pixels.run_in_threads(decode_row, rows, math.prod(self.shape) * self.dtype.itemsize)

    @property
    def _axes(self) -> str:
        """One letter per stored dimension, of those of length 1 that the layout leaves out a dot."""
        return _spread(self.layout, self.image.array.shape)

    @property
    def _steps(self) -> tuple[int, ...]:
        return self.image.array.chunks

    @property
    def _grid(self) -> list[Sequence[int]]:
        """Places of the chunks along each dimension that hold a part of the selection."""
        samples = self.layout.length("S")
        channels = [divmod(number, samples) for number in self.part.channels]
        wanted = {"T": {self.part.time or 0}, "C": {c for c, _ in channels}, "S": {s for _, s in channels}}
        array = self.image.array
        return [
            sorted({index // step for index in wanted[axis]}) if axis in wanted else range(-(-length // step))
            for axis, length, step in zip(self._axes, array.shape, array.chunks, strict=True)
        ]

    def _read(self, place: tuple[int, ...]) -> Array:
        """Read one chunk without what lies beyond the array, [C, S, Z, Y, X] at the selected time."""
        array, letters = self.image.array, self._axes
        inside = tuple(min(step, n - i * step) for i, n, step in zip(place, array.shape, array.chunks, strict=True))
        chunk = array.read_chunk(place)
        if chunk is None:
            chunk = np.broadcast_to(array.fill, inside)
        chunk = chunk[tuple(slice(length) for length in inside)].astype(self.dtype, copy=False)
        for axis in reversed(range(len(letters))):
            if letters[axis] in ".T":
                time = (self.part.time or 0) - place[axis] * array.chunks[axis] if letters[axis] == "T" else 0
                chunk = chunk.take(time, axis)
        kept = letters.replace(".", "").replace("T", "")
        missing = [axis for axis in "CSZYX" if axis not in kept]
        chunk = chunk[(np.newaxis,) * len(missing)]
        return chunk.transpose([("".join(missing) + kept).index(axis) for axis in "CSZYX"])

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
        letters, units = _parse_axes(described.get("axes"), len(array.shape))
        scale = _parse_scale(dataset, described, len(array.shape))
        sizes = dict(zip(letters, zip(scale, units, strict=True), strict=True)) if scale else {}
        edges = [sizes.get(axis, (None, "")) for axis in "ZYX"]
        channels = (attributes.get("omero") or {}).get("channels") or ()
        return ZarrImage(
            f"OME-Zarr {attributes.get('version') or described.get('version') or ''}".strip(),
            array,
            letters,
            tuple(str(channel.get("label") or "")[:200] for channel in channels),
            tuple(_parse_colour(channel.get("color")) for channel in channels),
            voxel_size.from_lengths([size for size, _ in edges], [unit for _, unit in edges], "OME-Zarr"),
            time_interval.parse(*sizes["T"]) if "T" in sizes else None,
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


def _parse_colour(stated: Any) -> str:
    """Return a colour as #rrggbb, "" where none is stated."""
    is_colour = isinstance(stated, str) and re.fullmatch("[0-9a-fA-F]{6}", stated)
    return f"#{stated.lower()}" if is_colour else ""


def _spread(layout: Layout, shape: Sequence[int]) -> str:
    """Return a letter per stored dimension, where the layout may leave out those of length 1."""
    letters, rest = "", list(zip(layout.axes, layout.shape, strict=True))
    for length in shape:
        is_next = bool(rest) and rest[0][1] == length
        letters += rest.pop(0)[0] if is_next else "."
    return letters
