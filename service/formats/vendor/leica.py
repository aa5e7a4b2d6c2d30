"""Leica LIF, read with liffile."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, BinaryIO

import liffile
import numpy as np

from service.core.errors import BadFile
from service.core.types import Array
from service.formats.sampling import parse_calibration
from service.formats.vendor.scene import Scene, SceneFile, find_time_interval

# liffile's letters for other axes than time, z, channel, y, x, color sample and tile.
_OTHER_AXES = {
    "λ": "emission wavelengths in addition to channels",
    "Λ": "excitation wavelengths in addition to channels",
    "H": "lifetimes",
    "R": "rotations",
    "L": "loops",
}
# Lookup tables of channels with a color.
_COLORS = {
    "red": "#ff0000",
    "green": "#00ff00",
    "blue": "#0000ff",
    "cyan": "#00ffff",
    "magenta": "#ff00ff",
    "yellow": "#ffff00",
    "gray": "#ffffff",
}


class LifScene(Scene):
    """One image of a LIF file, or one tile of it."""

    container = "Leica LIF"

    def __init__(self, image: Any, tile: int | None) -> None:
        self._image, self._tile = image, {} if tile is None else {"M": tile}
        self._channel_axis = _find_channel_axis(image.sizes)
        sizes = {
            "C" if axis == self._channel_axis else axis: length for axis, length in image.sizes.items() if axis != "M"
        }
        _check_axes(sizes)
        self.axes, self.shape = "".join(sizes), tuple(sizes.values())
        self.dtype = np.dtype(image.dtype)
        sizes_in_micrometers = [self._find_pixel_size(axis) for axis in "ZYX"]
        self.calibration = parse_calibration(sizes_in_micrometers, "um", "the metadata of the LIF file")
        self.time_interval = find_time_interval(image.coords.get("T", ()))
        bands = self._find_bands()
        channels = image.xml_element.findall("./Data/Image/ImageDescription/Channels/ChannelDescription")
        colors = tuple(_COLORS.get(channel.get("LUTName", "").lower(), "") for channel in channels)
        self.colors = () if bands else colors
        self.channel_names = bands or tuple(map(_find_channel_name, channels))

    def _find_bands(self) -> tuple[str, ...]:
        """Return the wavelength of each channel, if the channels are the bands of a spectrum."""
        if self._channel_axis == "C":
            return ()
        return tuple(f"{1e9 * float(meters):.4g} nm" for meters in self._image.coords.get(self._channel_axis, ()))

    def _find_pixel_size(self, axis: str) -> float | None:
        """Return the distance of two pixels in micrometers, or None if unknown. LIF files store meters."""
        coordinates = self._image.coords.get(axis)
        if coordinates is None or len(coordinates) < 2:
            return None
        size = abs(float(coordinates[-1] - coordinates[0])) / (len(coordinates) - 1) * 1e6
        return size or None

    def read_plane(self, position: dict[str, int]) -> Array:
        """Return the plane [Y, X] or [Y, X, S] at a position."""
        renamed = {self._channel_axis if axis == "C" else axis: index for axis, index in position.items()}
        plane: Array = self._image.frame(**renamed, **self._tile)
        return plane


def _find_channel_name(channel: Any) -> str:
    """Return the dye of a channel, or else its detector; "" if the file contains neither.

    Dyes are stored with the catalog that defines them, such as Leica/ALEXA 488.
    """
    properties: dict[str, str] = {
        item.findtext("Key", "").strip(): item.findtext("Value", "").strip()
        for item in channel.iterfind("ChannelProperty")
    }
    return properties.get("DyeName", "").rpartition("/")[2].strip() or properties.get("DetectorName", "")


def _find_channel_axis(sizes: Mapping[str, int]) -> str:
    """Return the axis that the channels are along: C, or the wavelength.

    The bands of a spectrum are channels, unless they are recorded for each of several channels.
    """
    spectral_axes = [axis for axis in sizes if axis in "λΛ"]
    return spectral_axes[0] if len(spectral_axes) == 1 and "C" not in sizes else "C"


def _check_axes(sizes: Mapping[str, int]) -> None:
    """Raise BadFile if an image has an unsupported axis, or if its planes are not scanned along Y and X."""
    for axis in sizes.keys() - set("TZCYXS"):
        raise BadFile(f"The image has {_OTHER_AXES.get(axis, f'an axis {axis}')}, which are not supported.")
    plane_axes = [axis for axis in sizes if axis != "S"][-2:]
    if plane_axes != ["Y", "X"]:
        raise BadFile(
            f"The image was scanned along {' and '.join(plane_axes)}. Only scans along Y and X are supported."
        )


class _NamelessStream(io.BufferedReader):
    """A stream without a name. The name of a stream that was opened from a descriptor is a number."""

    name = ""


def open_file(stream: BinaryIO) -> SceneFile:
    """Open a file from a stream, which must stay open. Tiles are separate scenes."""
    raw: Any = stream
    scenes = list[tuple[str, Any, int | None]]()
    for image in liffile.LifFile(_NamelessStream(raw)).images:
        num_tiles = image.sizes.get("M", 0)
        scenes += [(f"{image.path} tile {tile}", image, tile) for tile in range(num_tiles)] or [
            (image.path, image, None)
        ]
    return SceneFile(tuple(name for name, _, _ in scenes), lambda index: LifScene(*scenes[index][1:]))
