"""Read the pixels of a request: one volume or several time points, and the channels to measure objects in."""

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

# Of one voxel of a series, as far as objects are numbered by 16 bits.
_LABEL_BYTES = 2

V = TypeVar("V", Volume, Volume | Description)


class Pixels(NamedTuple):
    """The volumes that are read from a file.

    segmented  the selected part, [C, Z, Y, X], or the time points of a series
    measured   the same part with all channels, if objects are measured; None for a series, which measures them itself
    """

    segmented: Volume | Series
    measured: Volume | None


class LargePixels(NamedTuple):
    """A file of which not much is decoded yet.

    segmented  the selected part
    nbytes     of all that is to be decoded
    """

    segmented: Extent
    nbytes: int


@dataclass(frozen=True)
class PixelSource:
    """One file, and the part of it that a request asks for.

    read        reads a selection
    read_small  reads a selection if little has to be decoded, else describes it
    inspect     describes a selection
    link        how objects of several time points get one number; None: they do not
    measured    whether objects are measured, in every channel of the file
    drop        deletes decoded pixels once the request was cancelled
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
        """Return a file of unknown origin, which confined processes read. Decoded pixels go to the request's folder."""
        query, folder, cancelled = request.query, request.folder, request.cancelled
        shared = query.input is not None

        def drop() -> None:
            # Whoever gave up may have deleted the folder before the reader has made it again.
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
        """Read all that is needed before anything is computed: later the file may be gone, or another one.

        Of several time points nothing is decoded before their turn: the file has to be there until the series is over.
        Raises what `Reader.read` raises.
        """
        if isinstance(self.selection.time, TimeRange):
            return Pixels(Series.of(self.inspect(self.selection), self._read_point, self.link), None)
        segmented, measured = self._read_both(self.read, self.selection)
        return Pixels(segmented, measured if self.measured else None)

    def read_small_pixels(self) -> Pixels | LargePixels:
        """Read like `read_pixels` if little has to be decoded, else say how many bytes that takes."""
        if isinstance(self.selection.time, TimeRange):
            description = self.inspect(self.selection)
            channels = len(description.channels) if self.measured else 1
            series = Series.of(description, self._read_point, self.link)
            return LargePixels(series, description.nbytes * channels + _LABEL_BYTES * series.voxels)
        segmented, measured = self._read_both(self.read_small, self.selection)
        if isinstance(segmented, Volume) and isinstance(measured, Volume):
            return Pixels(segmented, measured if self.measured else None)
        return LargePixels(segmented, measured.nbytes + (0 if measured is segmented else segmented.nbytes))

    def _read_both(self, read: Callable[[Selection], V], selection: Selection) -> tuple[V, V]:
        """Return the part that is segmented, and the one that objects would be measured in."""
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
