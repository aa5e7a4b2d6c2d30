"""Olympus OIB, a compound file of TIFFs and settings, and OIF, the same files in a zip archive. Read with oiffile.

An OIF is a file of settings, NAME.oif, and a folder of planes, NAME.oif.files. An archive may contain several of them.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from oiffile import CompoundFile, SettingsFile
from tifffile import TiffFile

from service.core.errors import BadFile, TooLarge
from service.core.files.zip_archive import ZipLimits, open_archive, translate_zip_errors
from service.core.quantities import TimeInterval
from service.core.types import Array
from service.formats.sampling import Calibration, get_micrometers_per_unit, parse_calibration, parse_time_interval
from service.formats.vendor.scene import Scene, SceneFile, parse_number

# Names of planes and of lookup tables, such as s_C001Z002T003.tif and s_LUT1.lut.
_PLANE_NAME = re.compile(r".*_((?:[A-Z]\d{3})+)\.tif", re.DOTALL)
_LUT_NAME = re.compile(r".*_LUT(\d{1,4})\.lut", re.DOTALL)
# Axes of planes that are supported, in the order in which a scene has them.
_PLANE_AXES = "TCZ"
# Number of axes that settings can describe.
_MAX_AXES = 9
# Names of planes have three digits.
_MAX_CHANNELS = 999
# Numbers of sectors of the directory and of the three allocation tables in the header of a compound file.
_TABLE_LENGTHS = struct.Struct("<40x II 16x I 4x I")
_MIN_SECTOR_BYTES = 512
_DAMAGED = "The OIB file is truncated or damaged. Copy or export the file again."
_ZIP_SIGNATURE = b"PK\x03\x04"
_ZIP_LIMITS = ZipLimits(max_entries=2**18, max_directory_bytes=2**25, allows_comment=True)
MAX_MEMBER_BYTES = 2**28
# Archives that macOS creates contain a second file with metadata for each file.
_HIDDEN_PREFIX = "._"
# Name that FluoView gives to the dye of transmitted light.
_NO_DYE = "None"


class OlympusFiles(NamedTuple):
    """The files of an image.

    container  name of the file format
    settings   stored name of the settings
    names      stored name of each other file, by its name without folders
    read       function that returns the content of a file with a stored name
    """

    container: str
    settings: str
    names: Mapping[str, str]
    read: Callable[[str], bytes]

    def read_settings(self, name: str) -> dict[str, Any]:
        """Parse a file of settings. Raises ValueError."""
        settings: dict[str, Any] = SettingsFile(io.BytesIO(self.read(name)), name)
        return settings


class _StreamCompoundFile(CompoundFile):
    """A compound file in an open stream; the class of the library accepts only a path, and follows cyclic chains."""

    def __init__(self, stream: BinaryIO) -> None:
        self.filename, self._fh = "", cast(Any, stream)
        file_bytes = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        counts = _TABLE_LENGTHS.unpack(stream.read(_TABLE_LENGTHS.size))
        if max(counts) * _MIN_SECTOR_BYTES > file_bytes:
            raise BadFile(_DAMAGED)
        stream.seek(0)
        self._fromfile()

    def _sec_chain(self, secid: int, /) -> Generator[bytes]:
        return _stop_at_cycle(super()._sec_chain(secid), len(self._fat))

    def _mini_sec_chain(self, secid: int, /) -> Generator[bytes]:
        return _stop_at_cycle(super()._mini_sec_chain(secid), len(self._minifat))


def _stop_at_cycle(sectors: Iterator[bytes], max_count: int) -> Generator[bytes]:
    for count, sector in enumerate(sectors):
        if count >= max_count or not sector:
            raise BadFile(_DAMAGED)
        yield sector


class OlympusScene(Scene):
    """The image of an OIB file or of an OIF."""

    def __init__(self, files: OlympusFiles) -> None:
        self.container, self._files = files.container, files
        settings = files.read_settings(files.settings)
        axes = {str(axis.get("AxisCode")): axis for axis in _list_axes(settings)}
        stated_lengths = {axis: _parse_length(axes.get(axis, {})) for axis in _PLANE_AXES}
        plane_axes, self._planes = _find_planes(files.names, stated_lengths)
        self.stored_planes = np.array(list(self._planes), np.int64).reshape(len(self._planes), len(plane_axes))
        stated = [stated_lengths[axis] for axis in plane_axes]
        lengths = np.maximum(self.stored_planes.max(axis=0) + 1, stated) if plane_axes else ()
        first_plane = self._read(next(iter(self._planes.values())))
        self.axes = plane_axes + "YX"
        self.shape = (*map(int, lengths), *first_plane.shape)
        self.dtype = first_plane.dtype
        self.calibration = _parse_calibration(settings, axes)
        self.time_interval = _parse_time_interval(axes.get("T", {}))
        num_channels = self.shape[plane_axes.index("C")] if "C" in plane_axes else 1
        self.channel_names = _find_channel_names(settings, min(num_channels, _MAX_CHANNELS))
        self.colors = _find_colors(files, min(num_channels, _MAX_CHANNELS))

    def _read(self, name: str) -> Array:
        with TiffFile(io.BytesIO(self._files.read(name))) as tiff:
            page = tiff.pages.first
            if page.nbytes > MAX_MEMBER_BYTES:
                raise TooLarge(f"A plane has {page.nbytes >> 20} MiB. At most {MAX_MEMBER_BYTES >> 20} are supported.")
            plane: Array = page.asarray()
        return plane

    def read_plane(self, position: dict[str, int]) -> Array:
        """Return the plane [Y, X] at a position."""
        return self._read(self._planes[tuple(position.get(axis, 0) for axis in self.axes[:-2])])


def _find_planes(names: Mapping[str, str], stated_lengths: Mapping[str, int]) -> tuple[str, dict[tuple[int, ...], str]]:
    """Return the axes of the planes, and the stored name of each plane by its position along these axes.

    An axis with several positions in the settings is an axis of the planes, also if their names lack it.
    """
    positions = _parse_plane_names(names)
    axes = _choose_axes({axis for position in positions.values() for axis in position}, stated_lengths)
    # Planes are numbered from 1.
    planes = {
        tuple(int(position.get(axis, 1)) - 1 for axis in axes): names[name] for name, position in positions.items()
    }
    if min(min(position, default=0) for position in planes) < 0 or len(planes) < len(positions):
        raise BadFile("The numbers in the names of the planes are not valid. Export the image as an OME-TIFF.")
    return axes, planes


def _parse_plane_names(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the positions in the names of planes by axis, counted from 1. Raises BadFile if there are none."""
    matches = {name: match for name in names if (match := _PLANE_NAME.fullmatch(name))}
    if not matches:
        raise BadFile("The file contains no planes. A zip archive must contain NAME.oif and the folder NAME.oif.files.")
    return {name: dict(re.findall(r"([A-Z])(\d{3})", match[1])) for name, match in matches.items()}


def _choose_axes(letters: set[str], stated_lengths: Mapping[str, int]) -> str:
    if letters - set(_PLANE_AXES):
        raise BadFile(f"The axes {''.join(sorted(letters))} of this image are not supported. Export it as an OME-TIFF.")
    return "".join(axis for axis in _PLANE_AXES if axis in letters or stated_lengths[axis] > 1)


def _list_axes(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sections of the settings that describe axes."""
    names = (f"Axis {number} Parameters Common" for number in range(_MAX_AXES))
    return [settings[name] for name in names if name in settings]


def _parse_length(axis: Mapping[str, Any]) -> int:
    """Return the number of positions along an axis, or 1 if the axis is not used."""
    return max(1, int(axis.get("MaxSize", 1)))


def _parse_calibration(settings: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]]) -> Calibration:
    image = settings.get("Reference Image Parameter", {})
    z_axis = axes.get("Z", {})
    sizes = [
        _convert_length(z_axis.get("Interval"), z_axis.get("UnitName")) or _find_distance(z_axis),
        _convert_length(image.get("HeightConvertValue"), image.get("HeightUnit")) or _find_distance(axes.get("Y", {})),
        _convert_length(image.get("WidthConvertValue"), image.get("WidthUnit")) or _find_distance(axes.get("X", {})),
    ]
    if _parse_length(z_axis) == 1:
        # Files with a single plane contain the interval of an earlier z-stack.
        sizes[0] = None
    return parse_calibration(sizes, "um", "the metadata of the Olympus file")


def _parse_time_interval(axis: Mapping[str, Any]) -> TimeInterval | None:
    """Return the interval that was set or, if time points were recorded as fast as possible, the mean one."""
    unit, intervals = str(axis.get("UnitName")), _parse_length(axis) - 1
    if not intervals:
        return None
    length = parse_number(axis.get("EndPosition", 0)) - parse_number(axis.get("StartPosition", 0))
    return parse_time_interval(axis.get("Interval"), unit) or parse_time_interval(length / intervals, unit)


def _find_distance(axis: Mapping[str, Any]) -> float | None:
    """Return the distance of two positions along an axis in micrometers, or None if unknown."""
    intervals = _parse_length(axis) - 1
    length = _convert_length(axis.get("EndPosition"), axis.get("UnitName"), axis.get("StartPosition"))
    return length / intervals if length and intervals else None


def _convert_length(end: Any, unit: Any, start: Any = 0) -> float | None:
    """Return the length of an interval in micrometers, or None if it is zero or not known."""
    factor = get_micrometers_per_unit(str(unit))
    length = abs(parse_number(end) - parse_number(start))
    return length * factor or None if factor is not None and not math.isnan(length) else None


def _find_channel_names(settings: Mapping[str, Any], num_channels: int) -> tuple[str, ...]:
    """Return the dyes of the channels. Channels without a dye, or with the dye of another one, have the detector."""
    channels = [settings.get(f"Channel {number} Parameters", {}) for number in range(1, num_channels + 1)]
    dyes = [str(channel.get("DyeName", "")).replace(_NO_DYE, "") for channel in channels]
    detectors = [str(channel.get("CH Name", "")) for channel in channels]
    return tuple(
        dye if dye and dyes.count(dye) == 1 else detector for dye, detector in zip(dyes, detectors, strict=True)
    )


def _find_colors(files: OlympusFiles, num_channels: int) -> tuple[str, ...]:
    """Return the color of the highest intensity of each channel, or "" if it has no lookup table."""
    tables = {int(match[1]): stored for name, stored in files.names.items() if (match := _LUT_NAME.fullmatch(name))}
    colors = list[str]()
    for number in range(1, num_channels + 1):
        table: Any = files.read_settings(tables[number]).get("ColorLUTData", ()) if number in tables else ()
        if len(table):
            blue, green, red = table[-1][:3]
            colors.append(f"#{red:02x}{green:02x}{blue:02x}")
        else:
            colors.append("")
    return tuple(colors)


def _open_compound_file(stream: BinaryIO) -> OlympusFiles:
    file = _StreamCompoundFile(stream)
    stored_names = {name.rpartition("/")[2]: name for name in file.files()}

    def read(name: str) -> bytes:
        with file.open_file(name) as content:
            return content.read()

    info: dict[str, Any] = SettingsFile(file.open_file("OibInfo.txt"), "OibInfo.txt")["OibSaveInfo"]
    names = {str(name).rpartition("/")[2]: stored_names[key] for key, name in info.items() if key.startswith("Stream")}
    return OlympusFiles("Olympus OIB", stored_names[info["MainFileName"]], names, read)


def _open_archive(stream: BinaryIO) -> dict[str, OlympusFiles]:
    """Return the images in a zip archive by their names. Raises BadFile."""
    with translate_zip_errors():
        archive = open_archive(stream, _ZIP_LIMITS)

    def read(name: str) -> bytes:
        size = archive.getinfo(name).file_size
        if size > MAX_MEMBER_BYTES:
            raise TooLarge(f"{name[:80]} has {size} bytes. At most {MAX_MEMBER_BYTES} are supported.")
        with translate_zip_errors():
            return archive.read(name)

    folders = dict[str, dict[str, str]]()
    settings = list[str]()
    for stored_name in archive.namelist():
        folder, _, name = stored_name.rpartition("/")
        if name.startswith(_HIDDEN_PREFIX):
            continue
        folders.setdefault(folder, {})[name] = stored_name
        if name.lower().endswith(".oif"):
            settings.append(stored_name)
    return {
        name.rpartition("/")[2]: OlympusFiles("Olympus OIF", name, folders.get(f"{name}.files", {}), read)
        for name in settings
    }


def open_file(stream: BinaryIO) -> SceneFile:
    """Open a file from a stream, which must stay open. Each OIF in an archive is one scene."""
    is_archive = stream.read(len(_ZIP_SIGNATURE)) == _ZIP_SIGNATURE
    stream.seek(0)
    if not is_archive:
        return SceneFile(("",), lambda _index: OlympusScene(_open_compound_file(stream)))
    images = _open_archive(stream)
    opened = [partial(OlympusScene, files) for files in images.values()]
    return SceneFile(tuple(images), lambda index: opened[index]())
