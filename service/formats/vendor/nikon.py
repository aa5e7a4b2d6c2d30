"""Nikon ND2, read with nd2. Each position of the stage is one image."""

from __future__ import annotations

import math
import os
import re
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple, cast

import nd2
import numpy as np

from service.core.errors import BadFile
from service.core.quantities import TimeInterval
from service.core.types import Array
from service.formats.sampling import Calibration, parse_calibration, parse_time_interval
from service.formats.vendor.scene import Scene, SceneFile, find_time_interval

_AXES = {"TimeLoop": "T", "NETimeLoop": "T", "ZStackLoop": "Z", "XYPosLoop": "P"}
_FRAME_NAME = re.compile(rb"ImageDataSeq\|(\d{1,9})!")
# Distance from the start of a chunk to the pixels of an uncompressed frame, and from the start of the data of a chunk
# to the pixels of a compressed frame, which follow the time of acquisition in milliseconds.
_FRAME_OFFSET_BYTES = 4096
_TIME = struct.Struct("<d")
# Signature of a chunk, and the sizes of its name and of its data.
_CHUNK_HEADER = struct.Struct("<IIQ")
# Maximum number of time points whose times of acquisition are read.
_MAX_TIMES = 2**12


class FrameFormat(NamedTuple):
    """Format of the frames of a file.

    shape      height, width, number of channels, and number of samples per channel
    row_bytes  number of bytes from one row to the next one
    """

    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    row_bytes: int
    is_compressed: bool

    @property
    def pixel_bytes(self) -> int:
        """Size of a pixel with all channels and samples."""
        return math.prod(self.shape[2:]) * self.dtype.itemsize


class Nd2Scene(Scene):
    """One position of an ND2 file."""

    container = "Nikon ND2"

    def __init__(self, file: nd2.ND2File, loops: Sequence[tuple[str, int]], position: int, stream: BinaryIO) -> None:
        self._loops, self._position = loops, position
        # Only the reader inside the file lists the stored frames.
        self._reader: Any = file._rdr
        self._format = _parse_frame_format(file)
        self.dtype = self._format.dtype
        height, width, num_channels, num_samples = self._format.shape
        own_loops = dict(loops)
        own_loops.pop("P", None)
        self.axes = "".join(own_loops) + "CYX"
        self.shape = (*own_loops.values(), num_channels * num_samples, height, width)
        self.stored_planes = self._find_frames(stream.seek(0, os.SEEK_END))
        # A frame contains all channels, which are read one after another.
        self._read_frame = lru_cache(maxsize=1)(self._decode_frame)
        self.calibration = _parse_calibration(file)
        self.time_interval = _find_time_interval(file) or find_time_interval(self._read_times(stream))
        channels = [channel.channel for channel in getattr(file.metadata, "channels", None) or ()]
        self.channel_names = tuple(channel.name or "" for channel in channels)
        self.colors = tuple("#{:02x}{:02x}{:02x}".format(*channel.color[:3]) for channel in channels)

    def _read_times(self, stream: BinaryIO) -> list[float]:
        """Return the times of acquisition of the first frame of each time point in seconds, if all are stored."""
        num_times = dict(self._loops).get("T", 1)
        times = list[float]()
        for time in range(num_times if num_times <= _MAX_TIMES else 0):
            chunk = self._reader.chunkmap.get(self._name_frame({"T": time}))
            if chunk is None:
                return []
            stream.seek(chunk[0])
            _, name_bytes, _ = _CHUNK_HEADER.unpack(stream.read(_CHUNK_HEADER.size))
            stream.seek(name_bytes, os.SEEK_CUR)
            times.append(_TIME.unpack(stream.read(_TIME.size))[0] / 1000)
        return times

    def _find_frames(self, file_bytes: int) -> Array:
        """Return the positions of the complete frames along the loops except P, as an array [n, loops].

        Raises BadFile if the file has more frames than the loops.
        """
        frame_bytes = 0 if self._format.is_compressed else self._format.shape[0] * self._format.row_bytes
        numbers = [
            int(match[1])
            for name, (offset, _) in self._reader.chunkmap.items()
            if (match := _FRAME_NAME.fullmatch(name)) and offset + _FRAME_OFFSET_BYTES + frame_bytes <= file_bytes
        ]
        lengths = [length for _, length in self._loops]
        frames = np.array(sorted(set(numbers)), np.int64)
        if len(frames) and frames[-1] >= math.prod(lengths):
            raise BadFile(f"The loops of this file have {math.prod(lengths)} frames, but it has {frames[-1] + 1}.")
        if not lengths:
            return np.empty((len(frames), 0), np.int64)
        positions = np.stack(np.unravel_index(frames, lengths), axis=1)
        is_position = np.array([axis == "P" for axis, _ in self._loops])
        selected: Array = positions[(positions[:, is_position] == self._position).all(axis=1)][:, ~is_position]
        return selected

    def read_plane(self, position: dict[str, int]) -> Array:
        plane: Array = self._read_frame(self._name_frame(position))[..., position.get("C", 0)]
        return plane

    def _name_frame(self, position: dict[str, int]) -> bytes:
        """Return the name of the chunk of the frame at a position."""
        lengths = [length for _, length in self._loops]
        indices = [self._position if axis == "P" else position.get(axis, 0) for axis, _ in self._loops]
        number = int(np.ravel_multi_index(indices, lengths)) if lengths else 0
        return b"ImageDataSeq|%d!" % number

    def _decode_frame(self, name: bytes) -> Array:
        """Return a frame [Y, X, C] with all channels."""
        if self._format.is_compressed:
            frame = self._decompress_frame(self._reader._load_chunk(name))
        else:
            frame = self._reader.read_frame(int(name[len(b"ImageDataSeq|") : -1]))
        if frame.shape != self._format.shape:
            raise BadFile(f"A frame has {frame.shape} pixels instead of {self._format.shape}. Export the image again.")
        return frame.reshape(*frame.shape[:2], -1)

    def _decompress_frame(self, data: bytes) -> Array:
        """Return a frame. The library would decompress any amount of data."""
        height, width, *_ = self._format.shape
        nbytes = height * self._format.row_bytes
        content = zlib.decompressobj().decompress(data[_TIME.size :], nbytes)
        if len(content) < nbytes:
            raise BadFile(f"A frame has {len(content)} bytes instead of {nbytes}. Copy or export the file again.")
        rows = np.frombuffer(content, np.uint8).reshape(height, -1)[:, : width * self._format.pixel_bytes]
        frame: Array = np.ascontiguousarray(rows).view(self.dtype).reshape(self._format.shape)
        return frame


def _parse_frame_format(file: nd2.ND2File) -> FrameFormat:
    """Return the format of the frames. Raises BadFile if it is not supported."""
    attributes = file.attributes
    if attributes.compressionType not in {None, "none", "lossless"}:
        raise BadFile(
            "ND2 files with lossy compression are not supported. Export the image as an OME-TIFF in NIS-Elements."
        )
    num_channels = attributes.channelCount or 1
    num_samples = attributes.componentCount // num_channels
    if num_samples == 3:
        # NIS-Elements stores blue before red, but readers disagree, and no specification states the order.
        raise BadFile("Color images in ND2 files are not supported. Export the image as an OME-TIFF in NIS-Elements.")
    shape = attributes.heightPx, attributes.widthPx or 0, num_channels, num_samples
    frame_format = FrameFormat(
        shape, np.dtype(file.dtype), attributes.widthBytes or 0, attributes.compressionType == "lossless"
    )
    min_row_bytes = shape[1] * frame_format.pixel_bytes
    frame_format = frame_format._replace(row_bytes=frame_format.row_bytes or min_row_bytes)
    if min(shape) < 1 or frame_format.row_bytes < min_row_bytes:
        raise BadFile(f"The file states frames of {shape} pixels. Export the image again.")
    return frame_format


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


def _list_loops(file: nd2.ND2File) -> list[tuple[str, int]]:
    """Return the axis and the length of each loop with several steps. Raises BadFile for loops of other kinds."""
    loops = [(_AXES.get(loop.type, "?"), loop.count) for loop in file.experiment if loop.count != 1]
    axes = [axis for axis, _ in loops]
    if "?" in axes or len(set(axes)) < len(axes):
        kinds = ", ".join(f"{loop.type} ({loop.count})" for loop in file.experiment)
        raise BadFile(
            f"The loops of this file are not supported: {kinds}. Export the image as an OME-TIFF in NIS-Elements."
        )
    return loops


def open_file(stream: BinaryIO) -> SceneFile:
    """Open a file from a stream, which must stay open."""
    file = nd2.ND2File(cast(Any, stream))
    loops = _list_loops(file)
    points = [loop.parameters.points for loop in file.experiment if loop.type == "XYPosLoop" and loop.count > 1]
    names = tuple(point.name or "" for point in points[0]) if points else ("",)
    return SceneFile(names, lambda index: Nd2Scene(file, loops, index, stream))
