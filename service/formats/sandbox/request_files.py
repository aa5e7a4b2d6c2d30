"""Open files that a child process may ask for while it answers one request."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Self

from pydantic import TypeAdapter

from service.core.errors import BadFile
from service.core.types import Cancelling
from service.formats.placement import make_file
from service.formats.sandbox.remote_store import RemoteStore
from service.formats.zarr.store import Part, open_file

NONSENSE = "The file is damaged: what was read of it makes no sense."
_PARTS = TypeAdapter(list[Part])


def make_unnamed_file() -> IO[bytes]:
    """Make a file in memory, or a temporary one on systems without memfd."""
    try:
        return os.fdopen(os.memfd_create("upload"), "wb")
    except (OSError, AttributeError):
        return tempfile.TemporaryFile()


class RequestFiles:
    """The open source of a request, and the file that its pixels are decoded to, made when a child asks for it.

    input  descriptor of the file that the request is about, None for a folder or a store elsewhere

    A child gets a file, of a folder only the regular files in it that it asks for, and of a store elsewhere copies of
    such parts.
    """

    def __init__(self, source: int | RemoteStore, scratch: Path | None = None, limit_bytes: int = 0) -> None:
        self._folder: int | None = None
        self._store: RemoteStore | None = None
        self.input: int | None = None
        if isinstance(source, RemoteStore):
            self._store = source
        elif stat.S_ISDIR(os.fstat(source).st_mode):
            self._folder = source
        else:
            self.input = source
        self._scratch, self._limit_bytes = scratch, limit_bytes
        self._files = ExitStack()
        self._file: IO[bytes] | None = None

    def make_output(self, nbytes: int) -> int:
        """Make the file to decode to and return its descriptor. Raises BadFile for more than the limit."""
        if self._scratch is None or not isinstance(nbytes, int) or not 0 <= nbytes <= self._limit_bytes:
            raise BadFile(NONSENSE)
        self._file = self._files.enter_context(make_file(self._scratch, nbytes))
        return self._file.fileno()

    @contextmanager
    def open_part(self, key: str) -> Iterator[int | None]:
        """Open a file of the folder until the end of the block, None where there is none. Raises BadFile."""
        if self._folder is None or not isinstance(key, str):
            raise BadFile(NONSENSE)
        part = open_file(self._folder, key)
        try:
            yield part
        finally:
            if part is not None:
                os.close(part)

    @contextmanager
    def fetch(self, parts: Any, cancelled: Cancelling) -> Iterator[tuple[list[int], int]]:
        """Fetch parts of objects of a store elsewhere, until the end of the block.

        Returns their sizes, -1 for each whose object is not there, and the descriptor of a file that holds them one
        after the other.
        """
        if self._store is None:
            raise BadFile(NONSENSE)
        contents = self._store.fetch(_PARTS.validate_python(parts, strict=True), cancelled)
        with make_unnamed_file() as file:
            file.writelines(content for content in contents if content)
            file.flush()
            yield [-1 if content is None else len(content) for content in contents], file.fileno()

    @property
    def output(self) -> int:
        """The descriptor of the file to decode to. Raises ValueError where none was asked for."""
        if self._file is None:
            raise ValueError(NONSENSE)
        return self._file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
