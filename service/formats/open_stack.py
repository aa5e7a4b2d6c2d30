"""Base class of open stacks: an image, its axes and the selected part, before any pixels are decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from service.core.errors import BadParameter, TooLarge
from service.core.quantities import TimeInterval, TimeRange, VoxelSize
from service.core.types import Description, Selection, StackShape
from service.formats import axes
from service.formats.axes import Layout, StackPart
from service.formats.placement import Placement, StoreBlock, get_native_dtype
from service.formats.sampling import Calibration

# Maximum number of planes of a volume. Each plane becomes a page of the result, whatever its size.
MAX_PLANES = 2**16
# Ratio of pixel height and width, and of pixel sizes, from which a requested voxel size seems to be a mistake.
_MAX_PIXEL_RATIO = 1.5
_MAX_SIZE_RATIO = 50.0
# Longest voxel edge in micrometers that is not questioned if the file has no voxel size.
_MAX_PLAUSIBLE_SIZE = 100.0
# Maximum number of planes of all time points of a series.
MAX_SERIES_PLANES = 2**18


class Image(Protocol):
    """Image properties that every format provides."""

    @property
    def container(self) -> str:
        """Name of the file format."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the pixels, in the byte order of the file."""

    @property
    def calibration(self) -> Calibration:
        """Voxel size that the file specifies, in micrometers."""

    @property
    def time_interval(self) -> TimeInterval | None:
        """Time between two time points, or None if unknown."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about choices and assumptions."""


@dataclass(frozen=True)
class OpenStack(ABC):
    """An image with its axes, the selected part, and the names of all channels."""

    image: Image
    layout: Layout
    part: StackPart
    channel_names: tuple[str, ...]

    @property
    @abstractmethod
    def colors(self) -> tuple[str, ...]:
        """One color per stored channel, as in `Description.colours`."""

    @property
    @abstractmethod
    def decoded_bytes(self) -> int:
        """Number of bytes that have to be decoded for the selected part if `locate` returns None."""

    @property
    def scenes(self) -> tuple[str, ...]:
        """Names of the scenes, as in `Description.scenes`."""
        return ()

    @property
    def example_scene(self) -> int | None:
        """Index of the scene, as in `Description.example_scene`."""
        return None

    def find_missing_choice(self, *, is_series: bool) -> BadParameter | None:
        """Return the error if no time point is selected and the file has several.

        is_series  whether a range of time points is selected, from which a single one does not have to be selected
        """
        if self.part.time is not None or is_series:
            return None
        return BadParameter(axes.explain_time_choice(self.layout), parameter="time", suggested={"time": "all"})

    def check_plane_count(self, selection: Selection) -> None:
        """Raise TooLarge if the stack has more than `MAX_PLANES` planes, or a series more than `MAX_SERIES_PLANES`."""
        planes = self.layout.get_length("Z")
        if planes > MAX_PLANES:
            message = f"The stack has {planes} planes, but at most {MAX_PLANES} are supported. Split the stack."
            if "T" in self.layout.axes:
                raise TooLarge(message)
            series_axes = self.layout.axes.replace("Z", "T")
            raise TooLarge(
                f"{message} If the planes are time points, set axes={series_axes}.",
                parameter="axes",
                suggested={"axes": series_axes},
            )
        if isinstance(selection.time, TimeRange):
            planes *= len(axes.select_times(self.layout, selection.time))
        if planes > MAX_SERIES_PLANES:
            raise TooLarge(
                f"The time points have {planes} planes in total, but at most {MAX_SERIES_PLANES} are supported. Select"
                " fewer time points, for example time=0:10.",
                parameter="time",
            )

    @cached_property
    def placement(self) -> Placement | None:
        """Location of the selected pixels in the file, or None if the pixels have to be decoded.

        Raises BadParameter if the part is not selected completely.
        """
        problem = self.find_missing_choice(is_series=False)
        if problem is not None:
            raise problem
        return self.locate()

    @abstractmethod
    def locate(self) -> Placement | None:
        """Locate the selected pixels. Return None unless they are stored uncompressed and with constant strides."""

    @abstractmethod
    def decode(self, store_block: StoreBlock) -> None:
        """Decode each voxel of the selected part once, and pass blocks to `store_block` from several threads.

        Raises BadFile, BadParameter, TooLarge.
        """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the volume, in native byte order."""
        return get_native_dtype(self.image.dtype)

    @property
    def shape(self) -> StackShape:
        """Shape (C, Z, Y, X) of the selected part."""
        return axes.get_part_shape(self.layout, self.part)

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the selected channels."""
        return tuple(self.channel_names[channel_number] for channel_number in self.part.channels)

    def choose_voxel_size(self, selection: Selection) -> VoxelSize | None:
        """Return the voxel size from the request or, if the request has none, from the file."""
        return selection.voxel_size or self.image.calibration.get_voxel_size()

    def list_notes(self, selection: Selection) -> tuple[str, ...]:
        """Return notes for the user about how the file was interpreted."""
        notes = [*self.image.notes, *self.layout.notes]
        if selection.voxel_size is None:
            notes += self.image.calibration.list_user_notes()
        else:
            notes += _check_requested_size(selection.voxel_size, self.image.calibration.get_voxel_size())
        notes += _explain_channel(selection.channel, self.channel_names)
        if self.layout.get_length("Z") == 1:
            notes.append("The selection is a single plane. It is segmented as a stack with one plane.")
        return tuple(notes)

    def get_volume_metadata(self, selection: Selection) -> tuple[VoxelSize | None, tuple[str, ...], tuple[str, ...]]:
        """Return the voxel size, the channel names and the notes of a volume."""
        return self.choose_voxel_size(selection), self.channels, self.list_notes(selection)

    def describe(self, selection: Selection) -> Description:
        """Describe the file and the selected part."""
        time_range = axes.select_times(self.layout, selection.time) if isinstance(selection.time, TimeRange) else None
        voxel_size = self.choose_voxel_size(selection)
        source = self.image.calibration.source if voxel_size else "not stated"
        return Description(
            container=self.image.container,
            axes=self.layout.axes,
            stored_shape=self.layout.shape,
            shape=self.shape,
            dtype=self.image.dtype.name,
            voxel_size=voxel_size,
            voxel_size_from="the request" if selection.voxel_size else source,
            channels=self.channel_names,
            colours=self.colors,
            times=self.layout.get_length("T"),
            notes=self.list_notes(selection),
            time_interval=self.image.time_interval,
            time_points=None if time_range is None else (time_range.start, time_range.stop),
            problem=str(self.find_missing_choice(is_series=time_range is not None) or ""),
            scenes=self.scenes,
            example_scene=self.example_scene,
            partial_voxel_size=None if voxel_size else self.image.calibration.get_partial_voxel_size(),
        )


def _check_requested_size(requested: VoxelSize, stored: VoxelSize | None) -> Iterator[str]:
    """Yield a note if a requested voxel size seems to have another order than Z,Y,X, or another unit than micrometers.

    stored  voxel size that the file specifies
    """
    stored_text = f" The file specifies {_format_size(stored)}." if stored else ""
    stored_ratio = stored.y / stored.x if stored else 1.0
    if not 1 / _MAX_PIXEL_RATIO < requested.y / requested.x / stored_ratio < _MAX_PIXEL_RATIO:
        yield (
            f"With voxel_size={_format_size(requested)}, pixels are {requested.y:g} um high and {requested.x:g} um"
            f" wide. The order is Z,Y,X.{stored_text}"
        )
    ratio = requested.pixel_size / stored.pixel_size if stored else 1.0
    if not 1 / _MAX_SIZE_RATIO < ratio < _MAX_SIZE_RATIO or (not stored and max(requested) > _MAX_PLAUSIBLE_SIZE):
        yield f"voxel_size={_format_size(requested)} is in micrometers.{stored_text or ' Check the unit.'}"


def _format_size(voxel_size: VoxelSize) -> str:
    return ",".join(f"{length:g}" for length in voxel_size)


def _explain_channel(channel: int | str | None, names: Sequence[str]) -> Iterator[str]:
    """Yield a note if the index of a selected channel is the name of another channel."""
    if isinstance(channel, int) and channel < len(names) and str(channel) in names and names[channel] != str(channel):
        yield (
            f"channel={channel} selects the channel with this zero-based index, {names[channel]!r}. The channel named"
            f" {channel} has the index {names.index(str(channel))}."
        )
