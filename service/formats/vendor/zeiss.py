"""Zeiss CZI. Each scene is one image, and tiles of a mosaic are pasted at their positions."""

from __future__ import annotations

import itertools
import re
from functools import cached_property
from typing import BinaryIO
from xml.etree.ElementTree import Element

import numpy as np
from defusedxml.ElementTree import fromstring  # type: ignore[import-untyped]

from service.core.errors import BadFile
from service.core.quantities import TimeInterval
from service.core.types import Array
from service.formats.sampling import Calibration, parse_calibration
from service.formats.vendor import scene
from service.formats.vendor.scene import Scene, SceneFile
from service.formats.vendor.zeiss_blocks import Directory, SegmentReader, get_pixel_format

# Axes along which a scene is read. Along all other axes, only one index is supported.
AXES = "TCZYX"
_OTHER_AXES = {"V": "views", "H": "phases", "R": "rotations", "I": "illumination directions", "B": "blocks"}
_COLOR = re.compile(r"#(?:[0-9A-Fa-f]{2})?([0-9A-Fa-f]{6})")


class CziScene(Scene):
    """One scene of a CZI file.

    blocks    subblocks of the scene at full resolution
    metadata  XML of the whole file
    is_only   whether the file has no other scenes
    """

    container = "Zeiss CZI"

    def __init__(self, reader: SegmentReader, blocks: Directory, metadata: Element, *, is_only: bool) -> None:
        self._reader = reader
        _check_other_axes(blocks)
        pixel_types = np.unique(blocks.pixel_types)
        if len(pixel_types) > 1:
            raise BadFile("The channels have different data types. Export the image as an OME-TIFF.")
        self._pixel_type = int(pixel_types[0])
        self.lossy_compression = blocks.find_lossy_compression()
        self.dtype, num_samples = get_pixel_format(self._pixel_type)
        ranges = [blocks.get_range(axis) for axis in AXES]
        self._origin = np.array([start for start, _ in ranges])
        lengths = [end - start for start, end in ranges]
        if is_only:
            # The metadata specifies the number of planes, but describes all scenes together.
            stated_sizes = (_parse_size(metadata, axis) for axis in AXES[:3])
            lengths[:3] = map(max, lengths, stated_sizes)
        self.axes = AXES + "S" * (num_samples > 1)
        self.shape = (*lengths, num_samples) if num_samples > 1 else tuple(lengths)
        # Tiles with a larger M index cover those with a smaller one.
        starts = np.stack([blocks.get_start(axis) for axis in AXES[:3]], axis=1) - self._origin[:3]
        order = np.lexsort((blocks.get_start("M"), *starts.T[::-1]))
        self._blocks, self._starts = blocks.select(order), starts[order]
        self._planes, self._first_blocks = np.unique(self._starts, axis=0, return_index=True)
        self.stored_planes = self._planes
        self.calibration = _parse_calibration(metadata)
        self.time_interval = _parse_time_interval(metadata)
        self.channel_names, self.colors = _parse_channels(metadata)
        self.notes = self._list_notes()

    def read_plane(self, position: dict[str, int]) -> Array:
        plane = np.zeros((*self.shape[3:5], *(self.shape[5:] or (1,))), self.dtype)
        for index in self._find_blocks(tuple(position.get(axis, 0) for axis in AXES[:3])):
            y, x = (int(self._blocks.starts[axis][index]) - origin for axis, origin in self._plane_origin)
            height, width = (int(self._blocks.sizes[axis][index]) for axis in "YX")
            tile = self._reader.read_tile(int(self._blocks.positions[index]), self._pixel_type, height, width)
            plane[y : y + height, x : x + width] = tile
        return plane if len(self.shape) > 5 else plane[..., 0]

    @cached_property
    def _plane_origin(self) -> list[tuple[str, int]]:
        return list(zip("YX", map(int, self._origin[3:]), strict=True))

    @cached_property
    def _index(self) -> dict[tuple[int, ...], range]:
        """Subblocks of each plane, by its position along T, C and Z."""
        ends = [*self._first_blocks[1:], len(self._starts)]
        return {
            tuple(position): range(first, end)
            for position, first, end in zip(self._planes.tolist(), self._first_blocks, ends, strict=True)
        }

    def _find_blocks(self, position: tuple[int, ...]) -> range:
        if position not in self._index:
            raise BadFile(f"The file has no pixels at the indices {position} along time, channels and z.")
        return self._index[position]

    def _list_notes(self) -> tuple[str, ...]:
        blocks = self._blocks.select(np.array(min(self._index.values(), key=len)))
        tops, lefts = blocks.starts["Y"], blocks.starts["X"]
        covered = _measure_union(tops, tops + blocks.sizes["Y"], lefts, lefts + blocks.sizes["X"])
        missing = 1 - covered / (self.shape[3] * self.shape[4])
        if missing <= 0:
            return ()
        return (f"{missing:.0%} of the image is not covered by a tile of the mosaic. Its pixels are 0 there.",)


def _check_other_axes(blocks: Directory) -> None:
    """Raise BadFile if the scene has several indices along an axis that is not supported."""
    for axis in sorted(set(blocks.starts) - set(AXES) - set("SM")):
        start, end = blocks.get_range(axis)
        if end - start > 1:
            name = _OTHER_AXES.get(axis, f"indices along the axis {axis[:4]!r}")
            raise BadFile(
                f"The image has {end - start} {name}, which are not supported. Process it in ZEN, or export one of them"
                " as an OME-TIFF."
            )


def _measure_union(tops: Array, bottoms: Array, lefts: Array, rights: Array) -> int:
    """Return the number of pixels in the union of rectangles."""
    area = 0
    order = np.argsort(lefts)
    tops, bottoms, lefts, rights = (edges[order] for edges in (tops, bottoms, lefts, rights))
    rows = np.unique(np.concatenate([tops, bottoms]))
    for top, bottom in itertools.pairwise(rows):
        in_row = (tops <= top) & (bottoms > top)
        if in_row.any():
            starts, ends = lefts[in_row], np.maximum.accumulate(rights[in_row])
            # Only the part to the right of all preceding rectangles is new.
            new_starts = np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))
            area += int(np.maximum(ends - new_starts, 0).sum()) * int(bottom - top)
    return area


def _parse_size(metadata: Element, axis: str) -> int:
    """Return the length of an axis, or 0 if it is not stated."""
    text = (metadata.findtext(f"./Metadata/Information/Image/Size{axis}") or "").strip()
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _parse_calibration(metadata: Element) -> Calibration:
    """Return the voxel size. CZI files specify it in meters, with 0 for an unknown size."""
    sizes = [metadata.findtext(f"./Metadata/Scaling/Items/Distance[@Id='{axis}']/Value") or "0" for axis in "ZYX"]
    known_sizes = [None if size.strip() in {"0", "0.0"} else size for size in sizes]
    return parse_calibration(known_sizes, "m", "the metadata of the CZI file")


def _parse_time_interval(metadata: Element) -> TimeInterval | None:
    """Return the time interval, which CZI files specify in seconds as an increment or as a list of offsets."""
    positions = "./Metadata/Information/Image/Dimensions/T/Positions"
    increment = metadata.findtext(f"{positions}/Interval/Increment")
    offsets = (metadata.findtext(f"{positions}/List/Offsets") or "").split()
    return scene.find_time_interval([0, increment] if increment else offsets)


def _parse_channels(metadata: Element) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names and the colors of the channels. The display settings complete missing ones."""
    channels = metadata.findall("./Metadata/Information/Image/Dimensions/Channels/Channel")
    displayed = metadata.findall("./Metadata/DisplaySetting/Channels/Channel")
    if len(displayed) != len(channels):
        displayed = channels
    names, colors = list[str](), list[str]()
    for channel, display in zip(channels, displayed, strict=True):
        names.append(channel.get("Name") or display.get("Name") or "")
        color = _COLOR.fullmatch(channel.findtext("Color") or display.findtext("Color") or "")
        colors.append(f"#{color[1].lower()}" if color else "")
    return tuple(names), tuple(colors)


def open_file(stream: BinaryIO) -> SceneFile:
    """Open a file from a stream, which must stay open."""
    reader = SegmentReader(stream)
    directory = reader.read_directory()
    if not {"X", "Y"} <= directory.starts.keys():
        raise BadFile("The file contains no image.")
    is_downsampled = np.any([directory.sizes[axis] != directory.stored_sizes[axis] for axis in "YX"], axis=0)
    blocks = directory.select(~is_downsampled)
    metadata = fromstring(reader.read_metadata() or b"<ImageDocument/>")
    names = {
        int(element.get("Index", 0)): element.get("Name") or ""
        for element in metadata.findall("./Metadata/Information/Image/Dimensions/S/Scenes/Scene")
    }
    scene_numbers = blocks.get_start("S")
    numbers = np.unique(scene_numbers).tolist()

    def open_scene(index: int) -> Scene:
        selected = blocks.select(scene_numbers == numbers[index])
        return CziScene(reader, selected, metadata, is_only=len(numbers) == 1)

    return SceneFile(tuple(names.get(number, "") for number in numbers), open_scene)
