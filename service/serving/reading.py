"""Reading of the pixels of a request: one volume or several time points, and the channels for measurements."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from service.core.quantities import TimeRange
from service.core.types import Description, Extent, Linking, Selection, Volume
from service.inference.types import Series

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader, Source
    from service.serving.parameters import SegmentationRequest

# Bytes per voxel for the labels of a series, assuming 16-bit labels.
_LABEL_BYTES = 2

V = TypeVar("V", Volume, Volume | Description)


class Pixels(NamedTuple):
    """The volumes of a request.

    segmented  the volume to segment [C, Z, Y, X], or the time points of a series
    measured   the same volume with all channels, if objects are measured; None for a series, which reads its own
    """

    segmented: Volume | Series
    measured: Volume | None


class LargePixels(NamedTuple):
    """A file that is too large to be decoded at once.

    segmented  shape and voxel size of the volume to segment
    nbytes     bytes of all pixels that have to be decoded
    """

    segmented: Extent
    nbytes: int


@dataclass(frozen=True)
class PixelSource:
    """A file and the part of it that a request selects.

    read        reads a selection
    read_small  reads a selection if it is small, else describes it
    inspect     describes a selection
    link        how objects are linked across time points; None: they are not linked
    measured    whether objects are measured, in every channel of the file
    drop        deletes decoded pixels if the request was cancelled
    """

    read: Callable[[Selection], Volume]
    read_small: Callable[[Selection], Volume | Description]
    inspect: Callable[[Selection], Description]
    selection: Selection
    link: Linking | None
    measured: bool
    drop: Callable[[], None] = lambda: None

    @classmethod
    def sandboxed(cls, reader: Reader, request: SegmentationRequest, source: Source) -> PixelSource:
        """Return a source that reads an untrusted file in sandboxed processes.

        Decoded pixels are stored in the folder of the request.
        """
        query, folder, cancelled = request.query, request.folder, request.cancelled
        shared = query.input is not None

        def drop() -> None:
            # The folder may have been deleted when the request was cancelled, and then created again by the reader.
            if cancelled():
                shutil.rmtree(folder, ignore_errors=True)

        return cls(
            partial(reader.read, source, scratch=folder, shared=shared, cancelled=cancelled),
            partial(reader.read_small, source, scratch=folder, shared=shared, cancelled=cancelled),
            partial(reader.inspect, source, shared=shared, cancelled=cancelled),
            query.selection,
            query.link,
            query.measurements is not None,
            drop,
        )

    def read_pixels(self) -> Pixels:
        """Read all pixels that the request needs, because the file may be deleted or replaced later.

        Time points of a series are decoded when they are segmented, so the file must exist until the series is done.
        Raises the errors of `Reader.read`.
        """
        if isinstance(self.selection.time, TimeRange):
            return Pixels(Series.from_description(self.inspect(self.selection), self._read_point, self.link), None)
        segmented, measured = self._read_both(self.read, self.selection)
        return Pixels(segmented, measured if self.measured else None)

    def read_small_pixels(self) -> Pixels | LargePixels:
        """Read the pixels as `read_pixels` does if they are small, else return their size."""
        if isinstance(self.selection.time, TimeRange):
            description = self.inspect(self.selection)
            channels = len(description.channels) if self.measured else 1
            series = Series.from_description(description, self._read_point, self.link)
            return LargePixels(series, description.nbytes * channels + _LABEL_BYTES * series.voxels)
        segmented, measured = self._read_both(self.read_small, self.selection)
        if isinstance(segmented, Volume) and isinstance(measured, Volume):
            return Pixels(segmented, measured if self.measured else None)
        return LargePixels(segmented, measured.nbytes + (0 if measured is segmented else segmented.nbytes))

    def _read_both(self, read: Callable[[Selection], V], selection: Selection) -> tuple[V, V]:
        """Return the volume to segment, and the volume in which objects are measured."""
        segmented = read(selection)
        if not self.measured or selection.channel is None:
            return segmented, segmented
        return segmented, read(replace(selection, channel=None))

    def _read_point(self, time: int) -> tuple[Volume, Volume | None]:
        try:
            volume, measured = self._read_both(self.read, replace(self.selection, time=time))
        finally:
            self.drop()
        return volume, measured if self.measured else None
