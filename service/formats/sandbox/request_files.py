"""The open files that a child process may use while it handles a request."""

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
from service.core.types import CancellationCheck
from service.formats.placement import make_temporary_file
from service.formats.sandbox.remote_store import RemoteStore
from service.formats.zarr.store import FileRange, open_file

INVALID_REPLY_MESSAGE = "The file is damaged: reading it produced an invalid result. Export the file again."
_FILE_RANGES_ADAPTER = TypeAdapter(list[FileRange])


def make_unnamed_file() -> IO[bytes]:
    """Create an in-memory file, or a temporary file on systems without memfd."""
    try:
        return os.fdopen(os.memfd_create("upload"), "wb")
    except (OSError, AttributeError):
        return tempfile.TemporaryFile()


class RequestFiles:
    """Input of a request, and the output file for decoded pixels, which is created when the child needs it.

    input_fd  descriptor of the input file, or None for a folder or a remote store

    The child receives the descriptor of an input file. From a folder, it receives only the regular files that it
    requests. From a remote store, it receives copies of the ranges that it requests.
    """

    def __init__(self, source: int | RemoteStore, scratch: Path | None = None, limit_bytes: int = 0) -> None:
        self._folder_fd: int | None = None
        self._store: RemoteStore | None = None
        self.input_fd: int | None = None
        if isinstance(source, RemoteStore):
            self._store = source
        elif stat.S_ISDIR(os.fstat(source).st_mode):
            self._folder_fd = source
        else:
            self.input_fd = source
        self._scratch, self._limit_bytes = scratch, limit_bytes
        self._files = ExitStack()
        self._output_file: IO[bytes] | None = None

    def make_output(self, nbytes: int) -> int:
        """Create the output file and return its descriptor. Raises BadFile if it would exceed the size limit."""
        if self._scratch is None or not isinstance(nbytes, int) or not 0 <= nbytes <= self._limit_bytes:
            raise BadFile(INVALID_REPLY_MESSAGE)
        self._output_file = self._files.enter_context(make_temporary_file(self._scratch, nbytes))
        return self._output_file.fileno()

    @contextmanager
    def open_file_in_folder(self, key: str) -> Iterator[int | None]:
        """Yield the descriptor of a file in the folder, or None if the file does not exist. Raises BadFile."""
        if self._folder_fd is None or not isinstance(key, str):
            raise BadFile(INVALID_REPLY_MESSAGE)
        descriptor = open_file(self._folder_fd, key)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @contextmanager
    def fetch(self, ranges: Any, cancelled: CancellationCheck) -> Iterator[tuple[list[int], int]]:
        """Fetch ranges of the objects in a remote store.

        Yields the size of each range, or -1 if the object does not exist, and the descriptor of a file that contains
        the ranges one after the other.
        """
        if self._store is None:
            raise BadFile(INVALID_REPLY_MESSAGE)
        contents = self._store.fetch(_FILE_RANGES_ADAPTER.validate_python(ranges, strict=True), cancelled)
        with make_unnamed_file() as file:
            file.writelines(content for content in contents if content)
            file.flush()
            yield [-1 if content is None else len(content) for content in contents], file.fileno()

    @property
    def output_fd(self) -> int:
        """Descriptor of the output file. Raises ValueError if the child has not requested one."""
        if self._output_file is None:
            raise ValueError(INVALID_REPLY_MESSAGE)
        return self._output_file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
