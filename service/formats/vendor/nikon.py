"""Nikon ND2, read with nd2. Each position of the stage is one image."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, BinaryIO, cast

import nd2
import numpy as np

from service.core.errors import BadFile
from service.core.quantities import TimeInterval
from service.core.types import Array
from service.formats.sampling import Calibration, parse_calibration, parse_time_interval
from service.formats.vendor.scene import Scene, SceneFile

_AXES = {"TimeLoop": "T", "NETimeLoop": "T", "ZStackLoop": "Z", "XYPosLoop": "P"}
_FRAME_NAME = re.compile(rb"ImageDataSeq\|(\d{1,9})!")
# Distance from the start of a chunk to the pixels of an uncompressed frame, and from the start of the data of a chunk
# to the pixels of a compressed frame, which follow the time of acquisition.
_FRAME_OFFSET_BYTES = 4096
_TIME_BYTES = 8


class Nd2Scene(Scene):
    """One position of an ND2 file."""

    container = "Nikon ND2"

    def __init__(self, file: nd2.ND2File, loops: Sequence[tuple[str, int]], position: int, file_bytes: int) -> None:
        self._file, self._loops, self._position = file, loops, position
        # Only the reader inside the file lists the stored frames.
        self._reader: Any = file._rdr
        attributes = file.attributes
        if attributes.compressionType not in {None, "none", "lossless"}:
            raise BadFile("ND2 files with lossy compression are not supported. Export the image as an OME-TIFF in NIS.")
        self._is_compressed = attributes.compressionType == "lossless"
        num_channels = attributes.channelCount or 1
        num_samples = attributes.componentCount // num_channels
        if num_samples == 3:
            # NIS-Elements stores blue before red, but readers disagree, and no specification states the order.
            raise BadFile("Color images in ND2 files are not supported. Export the image as an OME-TIFF in NIS.")
        self._frame_shape = (attributes.heightPx, attributes.widthPx or 0, num_channels, num_samples)
        self.dtype = np.dtype(file.dtype)
        self._row_bytes = attributes.widthBytes or self._frame_shape[1] * self._pixel_bytes
        if min(self._frame_shape) < 1 or self._row_bytes < self._frame_shape[1] * self._pixel_bytes:
            raise BadFile(f"The file states frames of {self._frame_shape} pixels. Export the image again.")
        loop_axes = "".join(axis for axis, _ in loops if axis != "P")
        self.axes = loop_axes + "CYX"
        loop_lengths = tuple(length for axis, length in loops if axis != "P")
        self.shape = (*loop_lengths, num_channels * num_samples, *self._frame_shape[:2])
        self.stored_planes = self._find_frames(file_bytes)
        # A frame contains all channels, which are read one after another.
        self._read_frame = lru_cache(maxsize=1)(self._decode_frame)
        self.calibration = _parse_calibration(file)
        self.time_interval = _find_time_interval(file)
        channels = [channel.channel for channel in getattr(file.metadata, "channels", None) or ()]
        self.channel_names = tuple(channel.name or "" for channel in channels)
        self.colors = tuple("#{:02x}{:02x}{:02x}".format(*channel.color[:3]) for channel in channels)

    @property
    def _pixel_bytes(self) -> int:
        return math.prod(self._frame_shape[2:]) * self.dtype.itemsize

    def _find_frames(self, file_bytes: int) -> Array:
        """Return the positions of the complete frames along the loops except P, as an array [n, loops]."""
        frame_bytes = 0 if self._is_compressed else self._frame_shape[0] * self._row_bytes
        numbers = [
            int(match[1])
            for name, (offset, _) in self._reader.chunkmap.items()
            if (match := _FRAME_NAME.fullmatch(name)) and offset + _FRAME_OFFSET_BYTES + frame_bytes <= file_bytes
        ]
        lengths = [length for _, length in self._loops]
        frames = np.array(sorted({number for number in numbers if number < math.prod(lengths)}), np.int64)
        if not lengths:
            return np.empty((len(frames), 0), np.int64)
        positions = np.stack(np.unravel_index(frames, lengths), axis=1)
        is_position = np.array([axis == "P" for axis, _ in self._loops])
        selected: Array = positions[(positions[:, is_position] == self._position).all(axis=1)][:, ~is_position]
        return selected

    def read_plane(self, position: dict[str, int]) -> Array:
        lengths = [length for _, length in self._loops]
        indices = [self._position if axis == "P" else position.get(axis, 0) for axis, _ in self._loops]
        number = int(np.ravel_multi_index(indices, lengths)) if lengths else 0
        plane: Array = self._read_frame(number)[..., position.get("C", 0)]
        return plane

    def _decode_frame(self, number: int) -> Array:
        """Return a frame [Y, X, C] with all channels."""
        frame: Array = self._decompress_frame(number) if self._is_compressed else self._reader.read_frame(number)
        if frame.shape != self._frame_shape:
            raise BadFile(f"A frame has {frame.shape} pixels instead of {self._frame_shape}. Export the image again.")
        return frame.reshape(*frame.shape[:2], -1)

    def _decompress_frame(self, number: int) -> Array:
        """Return a frame. The library would decompress any amount of data."""
        data = self._reader._load_chunk(f"ImageDataSeq|{number}!".encode())
        height, width, *samples = self._frame_shape
        nbytes = height * self._row_bytes
        content = zlib.decompressobj().decompress(data[_TIME_BYTES:], nbytes)
        if len(content) < nbytes:
            raise BadFile(f"A frame has {len(content)} bytes instead of {nbytes}. Copy or export the file again.")
        rows = np.frombuffer(content, np.uint8).reshape(height, self._row_bytes)[:, : width * self._pixel_bytes]
        frame: Array = np.ascontiguousarray(rows).view(self.dtype).reshape(height, width, *samples)
        return frame


def _parse_calibration(file: nd2.ND2File) -> Calibration:
    """Return the voxel size. The library replaces unknown sizes with 1, but reports which sizes are known."""
    channels = getattr(file.metadata, "channels", None) or ()
    sizes: list[float | None] = [None, None, None]
    if channels:
        volume = channels[0].volume
        known = zip(volume.axesCalibrated, volume.axesCalibration, strict=True)
        sizes = [size if is_known else None for is_known, size in known][::-1]
    return parse_calibration(sizes, "um", "the metadata of the ND2 file")


def _find_time_interval(file: nd2.ND2File) -> TimeInterval | None:
    """Return the measured interval or, if it is unknown, the intended one. A series with several periods has none."""
    for loop in file.experiment:
        parameters: Any = loop.parameters
        if loop.type == "NETimeLoop":
            parameters = parameters.periods[0] if len(parameters.periods) == 1 else None
        if _AXES.get(loop.type) == "T" and parameters is not None:
            difference = parameters.periodDiff.avg if parameters.periodDiff else None
            return parse_time_interval(difference or parameters.periodMs, "ms")
    return None


def open_file(stream: BinaryIO) -> SceneFile:
    """Open a file from a stream, which must stay open."""
    file_bytes = stream.seek(0, os.SEEK_END)
    file = nd2.ND2File(cast(Any, stream))
    loops = [(_AXES.get(loop.type, "?"), loop.count) for loop in file.experiment if loop.count != 1]
    axes = [axis for axis, _ in loops]
    if "?" in axes or len(set(axes)) < len(axes):
        kinds = ", ".join(f"{loop.type} ({loop.count})" for loop in file.experiment)
        raise BadFile(f"The loops of this file are not supported: {kinds}. Export the image as an OME-TIFF in NIS.")
    points = [loop.parameters.points for loop in file.experiment if loop.type == "XYPosLoop" and loop.count > 1]
    names = tuple(point.name or "" for point in points[0]) if points else ("",)
    return SceneFile(names, lambda index: Nd2Scene(file, loops, index, file_bytes))
