"""An open file of any format, with its image, axes and selected part, before a pixel is decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from service.core.errors import BadParameter
from service.core.quantities import TimeInterval, TimeRange, VoxelSize
from service.core.types import Description, Selection, StackShape
from service.formats import axes
from service.formats.axes import Layout, Part
from service.formats.placement import Placement, StoreBlock, native_dtype
from service.formats.sampling import Calibration


class Image(Protocol):
    """Facts that a format knows of an image."""

    @property
    def container(self) -> str:
        """Name of the format."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the pixels, in the byte order of the file."""

    @property
    def calibration(self) -> Calibration:
        """Sampling in space."""

    @property
    def time_interval(self) -> TimeInterval | None:
        """Sampling in time."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about what was chosen and assumed."""


@dataclass(frozen=True)
class OpenStack(ABC):
    """An image with its axes, the selected part and the names of all channels."""

    image: Image
    layout: Layout
    part: Part
    names: tuple[str, ...]

    @property
    @abstractmethod
    def colours(self) -> tuple[str, ...]:
        """One colour per stored channel, as in `Description`."""

    @property
    @abstractmethod
    def decoded_bytes(self) -> int:
        """Bytes that are decoded on the way to the selected part where it cannot be located."""

    @cached_property
    def placement(self) -> Placement | None:
        """Location of uncompressed pixels at regular distances, None where there are none such. Raises BadParameter."""
        if self.part.time is None:
            raise BadParameter(axes.explain_time_choice(self.layout), parameter="time", suggested={"time": "all"})
        return self.locate()

    @abstractmethod
    def locate(self) -> Placement | None:
        """Return the place of uncompressed pixels at regular distances, None where there are none such."""

    @abstractmethod
    def decode(self, store: StoreBlock) -> None:
        """Decode the selected part, each voxel once, and pass it to `store` in blocks, from several threads.

        Raises BadFile, BadParameter, TooLarge.
        """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of a volume, in native byte order."""
        return native_dtype(self.image.dtype)

    @property
    def shape(self) -> StackShape:
        """(C, Z, Y, X) of the selected part."""
        return axes.part_shape(self.layout, self.part)

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the selected channels."""
        return tuple(self.names[number] for number in self.part.channels)

    def voxel_size(self, selection: Selection) -> VoxelSize | None:
        """Return the caller's voxel size, else the file's."""
        return selection.voxel_size or self.image.calibration.voxel_size()

    def notes(self, selection: Selection) -> tuple[str, ...]:
        """Return what a user should know of how the file was understood."""
        notes = [*self.image.notes, *self.layout.notes]
        if selection.voxel_size is None:
            notes += self.image.calibration.remarks()
        if self.layout.length("Z") == 1:
            notes.append("The selection is a single plane; it is treated as a stack of one.")
        return tuple(notes)

    def facts(self, selection: Selection) -> tuple[VoxelSize | None, tuple[str, ...], tuple[str, ...]]:
        """Return what a volume knows beside its pixels: voxel size, names of its channels, and notes."""
        return self.voxel_size(selection), self.channels, self.notes(selection)

    def describe(self, selection: Selection) -> Description:
        """Describe the file and the selected part."""
        times = axes.select_times(self.layout, selection.time) if isinstance(selection.time, TimeRange) else None
        is_unclear = self.part.time is None and times is None
        voxel_size = self.voxel_size(selection)
        source = self.image.calibration.source if voxel_size else "not stated"
        return Description(
            container=self.image.container,
            axes=self.layout.axes,
            stored_shape=self.layout.shape,
            shape=self.shape,
            dtype=self.image.dtype.name,
            voxel_size=voxel_size,
            voxel_size_from="the request" if selection.voxel_size else source,
            channels=self.names,
            colours=self.colours,
            times=self.layout.length("T"),
            notes=self.notes(selection),
            time_interval=self.image.time_interval,
            time_points=None if times is None else (times.start, times.stop),
            problem=axes.explain_time_choice(self.layout) if is_unclear else "",
        )
