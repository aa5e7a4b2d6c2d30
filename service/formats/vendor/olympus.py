"""Olympus OIB, a compound file of TIFFs and settings, read with oiffile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

import numpy as np
from oiffile import CompoundFile, SettingsFile
from tifffile import TiffFile

from service.core.errors import BadFile
from service.core.types import Array
from service.formats.sampling import get_micrometers_per_unit, parse_calibration
from service.formats.vendor.scene import Scene, SceneFile

# Names of planes, such as s_C001Z002T003.tif.
_PLANE_NAME = re.compile(r"s_((?:[A-Z]\d{3})+)\.tif")
# Axes of planes that are supported, in the order in which a scene has them.
_PLANE_AXES = "TCZ"
# Number of axes that settings can describe.
_MAX_AXES = 8


class _StreamCompoundFile(CompoundFile):
    """A compound file in an open stream; the class of the library accepts only a path."""

    def __init__(self, stream: BinaryIO) -> None:
        self.filename, self._fh = "", cast(Any, stream)
        self._fromfile()


class OibScene(Scene):
    """The image of an OIB file."""

    container = "Olympus OIB"

    def __init__(self, stream: BinaryIO) -> None:
        self._file = _StreamCompoundFile(stream)
        stored_names = {name.rpartition("/")[2]: name for name in self._file.files()}
        info: dict[str, Any] = SettingsFile(self._file.open_file("OibInfo.txt"), "OibInfo.txt")["OibSaveInfo"]
        streams = {value: stored_names[key] for key, value in info.items() if key.startswith("Stream")}
        settings = SettingsFile(self._file.open_file(streams[info[info["MainFileName"]]]), "main")
        plane_axes, self._planes = _find_planes(streams)
        self.stored_planes = np.array(list(self._planes), np.int64).reshape(len(self._planes), len(plane_axes))
        first_plane = self._read(next(iter(self._planes.values())))
        self.axes = plane_axes + "YX"
        self.shape = (*(int(length) for length in self.stored_planes.max(axis=0) + 1), *first_plane.shape)
        self.dtype = first_plane.dtype
        sizes_by_axis = dict(_find_sizes(settings))
        sizes = [sizes_by_axis.get(axis) for axis in "ZYX"]
        self.calibration = parse_calibration(sizes, "um", "the metadata of the OIB file")

    def _read(self, name: str) -> Array:
        with self._file.open_file(name) as file, TiffFile(file) as tiff:
            plane: Array = tiff.pages.first.asarray()
        return plane

    def read_plane(self, position: dict[str, int]) -> Array:
        """Return the plane [Y, X] at a position."""
        return self._read(self._planes[tuple(position.get(axis, 0) for axis in self.axes[:-2])])


def _find_planes(streams: Mapping[str, str]) -> tuple[str, dict[tuple[int, ...], str]]:
    """Return the axes of the planes, and the stored name of each plane by its position along these axes."""
    matches = {name: match for name in streams if (match := _PLANE_NAME.fullmatch(name.rpartition("/")[2]))}
    positions = {name: dict(re.findall(r"([A-Z])(\d{3})", match[1])) for name, match in matches.items()}
    if not positions:
        raise BadFile("The file contains no planes.")
    letters = {axis for position in positions.values() for axis in position}
    if letters - set(_PLANE_AXES):
        raise BadFile(f"The axes {''.join(sorted(letters))} of this image are not supported. Export it as an OME-TIFF.")
    axes = "".join(axis for axis in _PLANE_AXES if axis in letters)
    # Planes are numbered from 1.
    return axes, {
        tuple(int(position.get(axis, 1)) - 1 for axis in axes): streams[name] for name, position in positions.items()
    }


def _find_sizes(settings: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield each axis in the settings, and the distance of two of its pixels in micrometers."""
    for number in range(_MAX_AXES):
        axis = settings.get(f"Axis {number} Parameters Common")
        if axis is not None:
            yield axis["AxisCode"], _find_size(axis)


def _find_size(axis: Mapping[str, Any]) -> float | None:
    """Return the distance of two pixels in micrometers, or None if unknown."""
    try:
        count, start, end = int(axis["MaxSize"]), float(axis["StartPosition"]), float(axis["EndPosition"])
        factor = get_micrometers_per_unit(str(axis.get("UnitName", "um")))
    except (KeyError, ValueError):
        return None
    # The positions of planes are those of their centers, and those of pixels are their edges.
    intervals = count - 1 if axis["AxisCode"] == "Z" else count
    return abs(end - start) * factor / intervals or None if factor is not None and intervals > 0 else None


def open_file(stream: BinaryIO) -> SceneFile:
    """Open a file from a stream, which must stay open."""
    return SceneFile(("",), lambda _index: OibScene(stream))
