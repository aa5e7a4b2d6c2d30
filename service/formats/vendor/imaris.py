"""Imaris IMS, which is HDF5, read with h5py.

Format: https://imaris.oxinst.com/support/imaris-file-format
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, BinaryIO

import h5py
import numpy as np

from service.core.errors import BadFile, TooLarge
from service.core.quantities import TimeInterval
from service.core.types import Array
from service.formats.sampling import get_micrometers_per_unit, parse_calibration
from service.formats.vendor.scene import Scene, SceneFile, find_time_interval, parse_number

# Filters that are part of HDF5: deflate, shuffle, Fletcher32, szip, n-bit and scale-offset. HDF5 would load a library
# for any other filter.
_BUILT_IN_FILTERS = range(1, 7)
MAX_CHUNK_BYTES = 2**28
# HDF5 caches the chunks of each open dataset. Planes are read one by one, and a chunk contains several of them.
_CACHE_BYTES = 2**26
_CACHE_SLOTS = 10_007
# Maximum number of datasets that are open at a time: one per channel.
_MAX_OPEN_DATASETS = 16
MAX_CHANNELS = 2**10
MAX_TIME_POINTS = 2**16
# Name that Imaris gives to channels without a name.
_UNNAMED = "(name not specified)"


class ImarisScene(Scene):
    """The full resolution of an Imaris file."""

    container = "Imaris IMS"

    def __init__(self, file: h5py.File) -> None:
        self._resolution = _open(file, "DataSet/ResolutionLevel 0")
        self._image = _open(file, "DataSetInfo/Image")
        self._open_pixels = lru_cache(_MAX_OPEN_DATASETS)(partial(_open_pixels, self._resolution))
        num_times = _count_groups(self._resolution, "TimePoint", MAX_TIME_POINTS)
        first_time = _open(self._resolution, "TimePoint 0")
        num_channels = _count_groups(first_time, "Channel", MAX_CHANNELS)
        pixels = _open_pixels(first_time, "Channel 0/Data")
        size = self._find_size(first_time, pixels.shape)
        self.axes, self.shape = "TCZYX", (num_times, num_channels, *size)
        self.dtype = pixels.dtype
        self.calibration = parse_calibration(
            [self._find_voxel_size(axis, length) for axis, length in zip((2, 1, 0), size, strict=True)],
            "um",
            "the metadata of the IMS file",
        )
        channels = [_read_attributes(file, f"DataSetInfo/Channel {channel}") for channel in range(num_channels)]
        self.channel_names = tuple(channel.get("Name", "").replace(_UNNAMED, "") for channel in channels)
        self.colors = tuple(map(_parse_color, channels))
        times = _read_attributes(file, "DataSetInfo/TimeInfo")
        self.time_interval = _parse_time_interval([times.get(f"TimePoint{time + 1}", "") for time in range(num_times)])

    def _read_text(self, name: str) -> str:
        return _decode(self._image.attrs.get(name, b""))

    def _find_size(self, first_time: h5py.Group, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size (z, y, x). Datasets are padded to complete chunks, so it is stored separately."""
        stated = [self._read_text(axis) or _read_size(first_time, axis) for axis in "ZYX"]
        size = tuple(int(text or length) for text, length in zip(stated, stored_shape, strict=True))
        if min(size) < 1 or any(stored < length for stored, length in zip(stored_shape, size, strict=True)):
            raise BadFile(f"The file states {size} voxels along z, y and x, but stores {stored_shape}.")
        return size

    def _find_voxel_size(self, axis: int, length: int) -> float | None:
        """Return the voxel size in micrometers, or None if unknown."""
        factor = get_micrometers_per_unit(self._read_text("Unit") or "um")
        bounds = self._read_text(f"ExtMin{axis}"), self._read_text(f"ExtMax{axis}")
        if factor is None or not all(bounds):
            return None
        return abs(parse_number(bounds[1]) - parse_number(bounds[0])) * factor / length or None

    def read_plane(self, position: dict[str, int]) -> Array:
        """Return the plane [Y, X] at a position."""
        path = f"TimePoint {position.get('T', 0)}/Channel {position.get('C', 0)}/Data"
        pixels = self._open_pixels(path)
        if pixels.dtype != self.dtype:
            raise BadFile(f"{path} has the data type {pixels.dtype} instead of {self.dtype}.")
        plane: Array = pixels[position.get("Z", 0), : self.shape[3], : self.shape[4]]
        return plane


def _open(group: h5py.Group, path: str) -> Any:
    """Open a group or dataset of the same file. Soft and external links could refer to other files."""
    for name in path.split("/"):
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise BadFile(f"{path} is missing or is a link.")
        group = group[name]
    return group


def _read_size(time_point: h5py.Group, axis: str) -> str:
    """Return the size of the first channel without padding, or "" if it is not stated."""
    return _decode(_open(time_point, "Channel 0").attrs.get(f"ImageSize{axis}", b""))


def _open_pixels(group: h5py.Group, path: str) -> h5py.Dataset:
    """Open a dataset [Z, Y, X] whose pixels are stored in this file. Raises BadFile, TooLarge."""
    pixels = _open(group, path)
    if not isinstance(pixels, h5py.Dataset) or pixels.ndim != 3 or pixels.dtype.kind not in "uif":
        raise BadFile(f"{path} is not a volume of numbers.")
    properties = pixels.id.get_create_plist()
    if pixels.external or pixels.is_virtual:
        raise BadFile(f"The pixels of {path} are in other files. Save the image as one file.")
    if any(properties.get_filter(index)[0] not in _BUILT_IN_FILTERS for index in range(properties.get_nfilters())):
        raise BadFile(f"{path} is compressed with a filter that is not part of HDF5.")
    if pixels.chunks is not None and math.prod(pixels.chunks) * pixels.dtype.itemsize > MAX_CHUNK_BYTES:
        raise TooLarge(
            f"{path} has chunks of {pixels.chunks} voxels. At most {MAX_CHUNK_BYTES >> 20} MiB are supported."
        )
    return pixels


def _count_groups(group: h5py.Group, name: str, limit: int) -> int:
    """Count the groups "NAME 0", "NAME 1" and so on. Raises TooLarge."""
    count = 0
    while f"{name} {count}" in group:
        count += 1
        if count > limit:
            raise TooLarge(f"The file has more than {limit} groups with the name {name}.")
    return count


def _read_attributes(file: h5py.File, path: str) -> dict[str, str]:
    """Return the attributes of a group as text, or no attributes if the group does not exist."""
    return {name: _decode(value) for name, value in _open(file, path).attrs.items()} if path in file else {}


def _parse_color(channel: Mapping[str, str]) -> str:
    """Return the color of a channel, or "" if it is unknown or a color table."""
    color = [parse_number(part) for part in channel.get("Color", "").split()]
    if channel.get("ColorMode", "BaseColor") != "BaseColor" or len(color) != 3 or any(map(math.isnan, color)):
        return ""
    return "#" + "".join(f"{round(255 * min(max(part, 0), 1)):02x}" for part in color)


def _parse_time_interval(times: Sequence[str]) -> TimeInterval | None:
    """Return the interval between dates such as 2026-11-27 12:00:02.500, or None if one of them is missing."""
    try:
        dates = [datetime.fromisoformat(time) for time in times]
        return find_time_interval([(date - dates[0]).total_seconds() for date in dates])
    except (ValueError, TypeError):
        return None


def _decode(attribute: Any) -> str:
    """Return the text of an attribute. Imaris stores arrays of single characters."""
    return np.asarray(attribute).tobytes().decode("utf-8", "replace").strip("\0 ")


def open_file(stream: BinaryIO) -> SceneFile:
    """Open a file from a stream, which must stay open."""
    file = h5py.File(stream, "r", rdcc_nbytes=_CACHE_BYTES, rdcc_nslots=_CACHE_SLOTS)
    return SceneFile(("",), lambda _index: ImarisScene(file))
