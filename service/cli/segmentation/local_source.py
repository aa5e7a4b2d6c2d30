"""Read a file of the user's own in this process."""

from __future__ import annotations

from pathlib import Path

from service.core.types import Description, Selection, Volume
from service.formats import stack_reader
from service.formats.zarr.store import Store
from service.serving.parameters import Query
from service.serving.reading import PixelSource


def local_source(path: Path | Store, query: Query, limit_bytes: int, scratch: Path, *, measured: bool) -> PixelSource:
    """Return a file that this process reads, with decoded pixels in the folder `scratch`."""

    def read(selection: Selection) -> Volume:
        return stack_reader.read(path, selection, limit_bytes, scratch)

    def inspect(selection: Selection) -> Description:
        return stack_reader.inspect(path, selection, limit_bytes)

    return PixelSource(read, read, inspect, query.selection, query.link, measured)
