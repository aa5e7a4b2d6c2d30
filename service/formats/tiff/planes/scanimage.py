"""Arrange the pages of ScanImage files, in which channels, frames, planes and volumes follow one another.

Channels vary fastest. They are followed by the frames of a plane, the planes of a volume, the frames that are discarded
while the objective flies back, and the volumes.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from service.core.types import Array

# Names of properties in ScanImage 2015 and later, in ScanImage 4 and 5, and in ScanImage 3.
_CHANNELS = r"hChannels\.channelSave|SI[45]\.channelsSave"
_CHANNEL_COUNT = r"state\.acq\.numberOfChannelsSave"
_PLANES = (r"hStackManager\.actualNumSlices", r"hStackManager\.numSlices|stackNumSlices|state\.acq\.numberOfZSlices")
_FRAMES = r"hStackManager\.framesPerSlice|acqNumFrames|state\.acq\.numberOfFrames"
_AVERAGED_FRAMES = r"hScan2D\.logAverageFactor|acqNumAveragedFrames"
_ENABLED = r"hStackManager\.enable|hFastZ\.enable|fastZEnable"
_VOLUME_FRAMES = (r"hStackManager\.numFramesPerVolumeWithFlyback", r"hStackManager\.numFramesPerVolume")


class ScanImageLayout(NamedTuple):
    """Numbers of channels, frames per plane, planes per volume, and discarded frames between two volumes."""

    channels: int
    frames: int
    planes: int
    flyback: int

    @property
    def pages_per_volume(self) -> int:
        """Number of pages from the beginning of a volume to that of the next one."""
        return self.channels * (self.frames * self.planes + self.flyback)


def parse_layout(header: str) -> ScanImageLayout | None:
    """Parse the properties of an acquisition, or return None if they do not include the saved channels."""
    channel_numbers = re.findall(r"\d+", _find(header, _CHANNELS))
    channels = len(channel_numbers) or _find_number(header, _CHANNEL_COUNT)
    if not channels:
        return None
    enabled = [value.lower() in {"true", "1"} for value in _find_all(header, _ENABLED)]
    planes = next(filter(None, (_find_number(header, name) for name in _PLANES)), 1)
    if enabled and not any(enabled):
        planes = 1
    # Without a limit, as in a continuous acquisition of one plane, frames are time points.
    frames = max(1, _find_number(header, _FRAMES) // max(1, _find_number(header, _AVERAGED_FRAMES)))
    with_flyback, without_flyback = (_find_number(header, name) for name in _VOLUME_FRAMES)
    if planes == 1:
        return ScanImageLayout(channels, 1, 1, 0)
    return ScanImageLayout(channels, frames, planes, max(0, with_flyback - without_flyback))


def starts_with_volume(layout: ScanImageLayout, description: str) -> bool:
    """Return whether the first page of a file, which has this description, is the first one of a volume."""
    first_frame = _find_number(description, "frameNumbers") or 1
    return (first_frame - 1) * layout.channels % layout.pages_per_volume == 0


def find_positions(layout: ScanImageLayout, page_count: int) -> tuple[str, tuple[int, ...], Array, Array]:
    """Return the axes of the planes, their lengths, and the position [n, axes] and the index [n] of each used page.

    If there are several volumes and several frames per plane, the frames are along an axis without a name, Q.
    """
    shape = layout.planes, layout.frames, layout.channels
    volumes, indices = np.divmod(np.arange(page_count), layout.pages_per_volume)
    is_used = indices < math.prod(shape)
    positions = np.stack([volumes[is_used], *np.unravel_index(indices[is_used], shape)], axis=1)
    volume_count = int(volumes[-1]) + 1
    return "TZQC" if volume_count > 1 else "QZTC", (volume_count, *shape), positions, np.flatnonzero(is_used)


def _find_all(header: str, names: str) -> list[str]:
    """Return the values of properties with one of the names, which is a regular expression."""
    return [value.strip() for value in re.findall(rf"(?:{names})\s*=[ \t]*([^\r\n]*)", header)]


def _find(header: str, names: str) -> str:
    """Return the first value of a property, or ""."""
    return next(iter(_find_all(header, names)), "")


def _find_number(header: str, names: str) -> int:
    """Return the first value of a property if it is a number of up to nine digits, otherwise 0."""
    number = re.match(r"(\d{1,9})(?:\.0*)?$", _find(header, names))
    return int(number[1]) if number else 0
