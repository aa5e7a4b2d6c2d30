"""Read a user's own file in this process, without the sandbox."""

from __future__ import annotations

from pathlib import Path

from service.core.types import Description, Selection, Volume
from service.formats import stack_reader
from service.formats.zarr.store import Store
from service.serving.parameters import Query
from service.serving.reading import PixelSource


def make_local_source(
    path: Path | Store, query: Query, limit_bytes: int, scratch: Path, *, is_measured: bool
) -> PixelSource:
    """Return a source that reads a file in this process and decodes pixels into the folder `scratch`."""

    def read(selection: Selection) -> Volume:
        return stack_reader.read(path, selection, limit_bytes, scratch)

    def inspect(selection: Selection) -> Description:
        return stack_reader.inspect(path, selection, limit_bytes)

    return PixelSource(read, read, inspect, query.selection, query.link, is_measured)
