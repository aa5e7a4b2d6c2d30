"""Olympus OIB, a compound file of TIFFs and settings, read with oiffile."""

from __future__ import annotations

import re
from typing import Any, BinaryIO, cast

from oiffile import CompoundFile, SettingsFile
from tifffile import TiffFile

from service.core.errors import BadFile
from service.core.types import Array
from service.formats.sampling import get_micrometers_per_unit, parse_calibration
from service.formats.vendor.scene import Scene, SceneFile

# Names of planes, such as s_C001Z002T003.tif.
_PLANE_NAME = re.compile(r"s_((?:[A-Z]\d{3})+)\.tif")
_SIZE_KEY = "Axis {} Parameters Common"


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
        axes_by_code = {
            settings[_SIZE_KEY.format(number)]["AxisCode"]: settings[_SIZE_KEY.format(number)]
            for number in range(8)
            if _SIZE_KEY.format(number) in settings
        }
        self._planes = dict[tuple[tuple[str, int], ...], str]()
        for name, stored_name in streams.items():
            if match := _PLANE_NAME.fullmatch(name.rpartition("/")[2]):
                parts = re.findall(r"([A-Z])(\d{3})", match[1])
                self._planes[tuple(sorted((axis, int(number) - 1) for axis, number in parts))] = stored_name
        if not self._planes:
            raise BadFile("The file contains no planes.")
        letters = {axis for key in self._planes for axis, _ in key}
        if letters - set("TCZ"):
            raise BadFile(
                f"The axes {''.join(sorted(letters))} of this image are not supported. Export it as an OME-TIFF."
            )
        lengths = {axis: 1 + max(n for key in self._planes for a, n in key if a == axis) for axis in letters}
        first = self._read(next(iter(self._planes.values())))
        self.axes = "".join(axis for axis in "TCZ" if axis in letters) + "YX"
        self.shape = (*(lengths[axis] for axis in self.axes[:-2]), *first.shape)
        self.dtype = first.dtype
        sizes = [_find_size(axes_by_code.get(axis)) for axis in "ZYX"]
        self.calibration = parse_calibration(sizes, "um", "the metadata of the OIB file")

    def _read(self, name: str) -> Array:
        with self._file.open_file(name) as file, TiffFile(file) as tiff:
            plane: Array = tiff.pages.first.asarray()
        return plane

    def read_plane(self, position: dict[str, int]) -> Array:
        key = tuple(sorted((axis, position.get(axis, 0)) for axis in self.axes[:-2]))
        if key not in self._planes:
            raise BadFile(f"The file has no plane {', '.join(f'{axis}={n}' for axis, n in key)}.")
        plane = self._read(self._planes[key])
        if plane.shape != self.shape[-2:]:
            raise BadFile(f"A plane has {plane.shape} pixels instead of {self.shape[-2:]}.")
        return plane


def _find_size(axis: dict[str, Any] | None) -> float | None:
    """Return the distance of two pixels in micrometers, or None if unknown."""
    if axis is None:
        return None
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
