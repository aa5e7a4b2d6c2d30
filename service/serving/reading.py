"""The pixels of a request: one volume or several time points, and the channels for measurements."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from service.core.quantities import TimeRange
from service.core.types import CancellationCheck, Description, Extent, Linking, Selection, Volume
from service.inference.types import Series

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader, Source
    from service.serving.parameters import SegmentationRequest

# Bytes per voxel for the labels of a series, assuming 16-bit labels.
_LABEL_BYTES = 2

V = TypeVar("V", Volume, Volume | Description)


class Pixels(NamedTuple):
    """The volumes of a request.

    segmentation_input  the volume to segment [C, Z, Y, X], or the time points of a series
    measurement_input   the same volume with all channels, if objects are measured; None for a series, whose time points
                        are read one at a time
    """

    segmentation_input: Volume | Series
    measurement_input: Volume | None


class DeferredPixels(NamedTuple):
    """A file that is too large to be decoded immediately.

    segmentation_input  shape and voxel size of the volume to segment
    nbytes              total size of the pixels to decode, in bytes
    """

    segmentation_input: Extent
    nbytes: int


@dataclass(frozen=True)
class PixelSource:
    """A file and the part of it that a request selects.

    read                   reads a selection
    read_if_small          reads a selection if it is small, otherwise describes it
    inspect                describes a selection
    link                   how objects are linked across time points; None if they are not linked
    has_measurements       whether objects are measured, in every channel of the file
    delete_decoded_pixels  deletes decoded pixels if the request was canceled
    """

    read: Callable[[Selection], Volume]
    read_if_small: Callable[[Selection], Volume | Description]
    inspect: Callable[[Selection], Description]
    selection: Selection
    link: Linking | None
    has_measurements: bool
    delete_decoded_pixels: Callable[[], None] = lambda: None

    @classmethod
    def from_sandbox(cls, reader: Reader, request: SegmentationRequest, source: Source) -> PixelSource:
        """Return a source that reads an untrusted file in sandboxed processes.

        Decoded pixels are stored in the folder of the request.
        """
        query, folder, is_canceled = request.query, request.folder, request.cancelled
        is_on_host = query.input is not None

        def delete_decoded_pixels() -> None:
            # The folder may have been deleted when the request was canceled, and then created again by the reader.
            if is_canceled():
                shutil.rmtree(folder, ignore_errors=True)

        return cls(
            partial(reader.read, source, scratch=folder, is_shared=is_on_host, cancelled=is_canceled),
            partial(reader.read_small, source, scratch=folder, is_shared=is_on_host, cancelled=is_canceled),
            partial(reader.inspect, source, is_shared=is_on_host, cancelled=is_canceled),
            query.selection,
            query.link,
            query.measurements is not None,
            delete_decoded_pixels,
        )

    def read_pixels(self) -> Pixels:
        """Read all pixels that the request needs, because the file may later be deleted or replaced.

        The time points of a series are decoded when they are segmented, so the file must exist until the series is
        done. Raises the same errors as `Reader.read`.
        """
        if isinstance(self.selection.time, TimeRange):
            return Pixels(Series.from_description(self.inspect(self.selection), self._read_time_point, self.link), None)
        segmentation_input, measurement_input = self._read_both_inputs(self.read, self.selection)
        return Pixels(segmentation_input, measurement_input if self.has_measurements else None)

    def read_small_pixels(self) -> Pixels | DeferredPixels:
        """Read the pixels as `read_pixels` does if they are small; otherwise return their size."""
        if isinstance(self.selection.time, TimeRange):
            description = self.inspect(self.selection)
            channel_count = len(description.channels) if self.has_measurements else 1
            series = Series.from_description(description, self._read_time_point, self.link)
            return DeferredPixels(series, description.nbytes * channel_count + _LABEL_BYTES * series.voxel_count)
        segmentation_input, measurement_input = self._read_both_inputs(self.read_if_small, self.selection)
        if isinstance(segmentation_input, Volume) and isinstance(measurement_input, Volume):
            return Pixels(segmentation_input, measurement_input if self.has_measurements else None)
        return DeferredPixels(
            segmentation_input,
            measurement_input.nbytes + (0 if measurement_input is segmentation_input else segmentation_input.nbytes),
        )

    def _read_both_inputs(self, read: Callable[[Selection], V], selection: Selection) -> tuple[V, V]:
        """Return the volume to segment, and the volume in which objects are measured."""
        segmentation_input = read(selection)
        if not self.has_measurements or selection.channel is None:
            return segmentation_input, segmentation_input
        return segmentation_input, read(replace(selection, channel=None))

    def _read_time_point(self, time: int) -> tuple[Volume, Volume | None]:
        try:
            volume, measurement_input = self._read_both_inputs(self.read, replace(self.selection, time=time))
        finally:
            self.delete_decoded_pixels()
        return volume, measurement_input if self.has_measurements else None


def read_with_reservation(  # noqa: PLR0913
    reader: Reader,
    source: Source,
    selection: Selection,
    reserve: Callable[[int], object],
    *,
    scratch: Path,
    is_shared: bool = False,
    cancelled: CancellationCheck,
) -> Volume:
    """Read a selection like `Reader.read`, but call `reserve` with its size before a large volume is decoded."""
    volume = reader.read_small(source, selection, scratch, is_shared=is_shared, cancelled=cancelled)
    reserve(volume.nbytes)
    if isinstance(volume, Volume):
        return volume
    return reader.read(source, selection, scratch, is_shared=is_shared, cancelled=cancelled)
