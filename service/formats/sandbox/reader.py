"""Read untrusted stacks in child processes. If a child crashes, hangs, or is compromised, the service is not affected.

A `Reader` runs several child processes that parse and decode files. Requests and replies are JSON messages on a socket.
Files are passed as open descriptors, and files in a folder are passed when the child requests them. A child returns the
location of the pixels in one of these files, and this process maps the file. A child that crashes or takes too long is
replaced. `confinement` describes the restrictions of a child.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from service.core.buffers import LARGE_ARRAY_BYTES
from service.core.errors import BadFile, NotReady, ReaderKilled, StackSegError
from service.core.quantities import Size
from service.core.types import CancellationCheck, Description, Selection, Volume, never_cancelled
from service.formats.placement import VolumeLocation, map_file
from service.formats.sandbox.child_pool import ChildPool
from service.formats.sandbox.child_process import ReaderProcess
from service.formats.sandbox.remote_store import RemoteStore
from service.formats.sandbox.replies import parse_description, parse_error, parse_location
from service.formats.sandbox.request_files import INVALID_REPLY_MESSAGE, RequestFiles, make_unnamed_file

# This module is not imported here, because only the child may run code that parses files.
CHILD_MODULE = "service.formats.sandbox.child_main"
# Number of processes that start before the first request. Each uses 20 MB and takes 0.2 s to start.
NUM_PRESTARTED_PROCESSES = 2
# Files that decode to at most this size are decoded immediately, usually in less than a second.
MAX_SMALL_FILE_BYTES = 2**25

T = TypeVar("T")

Source = Path | bytearray | RemoteStore
"""Path of a file or a Zarr folder, the content of a file, or a remote Zarr store."""


class Reader:
    """Thread-safe reader of stacks that parses files in child processes.

    Args:
        memory_bytes: memory that a child may use for one file, in addition to the memory of an idle child
        time_limit_seconds: time limit for one file
        max_decoded_bytes: maximum decoded size of a selection from an upload
        max_shared_bytes: maximum decoded size of a selection from a file on the host; None: `max_decoded_bytes`
        process_count: number of files that can be read at the same time; additional callers wait
        module: module that the children run; it must accept the arguments and the socket of `CHILD_MODULE`

    Attributes:
        max_small_bytes: maximum decoded size of the selections that `read_small` decodes

    If `cancelled` returns True while a file is being read, the child is killed and Cancelled is raised.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        memory_bytes: int,
        time_limit_seconds: float,
        max_decoded_bytes: int,
        max_shared_bytes: int | None = None,
        process_count: int = 2,
        module: str = CHILD_MODULE,
    ) -> None:
        self.max_small_bytes = MAX_SMALL_FILE_BYTES
        self._max_decoded_bytes, self._max_shared_bytes = max_decoded_bytes, max_shared_bytes or max_decoded_bytes
        max_bytes = max(self._max_decoded_bytes, self._max_shared_bytes)
        self._children = [
            ReaderProcess(module, memory_bytes, max_bytes, time_limit_seconds) for _ in range(process_count)
        ]
        self._pool = ChildPool(self._children, NUM_PRESTARTED_PROCESSES)
        self._client: str | None = None

    def for_client(self, client: str) -> Reader:
        """Return a reader with the same child processes for the files of one client.

        A process that has read a file of one client never reads a file of another client. The reader on which this
        method is called reads each file in a new process. Starting a process takes about 10 ms of CPU time, which
        is avoided if the process has already read a file of the same client.
        """
        reader = copy.copy(self)
        reader._client = client
        return reader

    def inspect(
        self,
        source: Source,
        selection: Selection,
        *,
        is_shared: bool = False,
        cancelled: CancellationCheck = never_cancelled,
    ) -> Description:
        """Describe a file and the selected part like `stack_reader.inspect`.

        Raises the same errors as `stack_reader.inspect`, BadFile if the child crashes, TooLarge if it takes too long,
        and ReaderKilled if it is killed twice.
        """
        request = self._make_request("inspect", selection, source, is_shared=is_shared)
        with _open_source(source) as file:
            return self._run_request(request, RequestFiles(file), cancelled, parse_description)

    def read(
        self,
        source: Source,
        selection: Selection,
        scratch: Path,
        *,
        is_shared: bool = False,
        cancelled: CancellationCheck = never_cancelled,
    ) -> Volume:
        """Read the selected part of a file like `stack_reader.read`.

        Decoded pixels are written to an unnamed file in the folder `scratch`, which is created if necessary. The volume
        maps that file or the uploaded one, or shares the memory of `source`. If `is_shared` is set, other processes can
        change the file at any time. Such a file is read and never mapped, because accessing a mapped file that was
        truncated kills the process.

        Raises the same errors as `stack_reader.read`, BadFile if the child crashes, TooLarge if it takes too long, and
        ReaderKilled if it is killed twice.
        """
        request = self._make_request("extract", selection, source, is_shared=is_shared, max_decoded_bytes=sys.maxsize)
        volume = self._extract(request, source, scratch, cancelled, is_shared=is_shared)
        if not isinstance(volume, Volume):
            raise BadFile(INVALID_REPLY_MESSAGE)
        return volume

    def read_small(
        self,
        source: Source,
        selection: Selection,
        scratch: Path,
        *,
        is_shared: bool = False,
        cancelled: CancellationCheck = never_cancelled,
    ) -> Volume | Description:
        """Read the selected part like `read`, or only describe it if it decodes to more than `max_small_bytes`."""
        request = self._make_request(
            "extract", selection, source, is_shared=is_shared, max_decoded_bytes=self.max_small_bytes
        )
        return self._extract(request, source, scratch, cancelled, is_shared=is_shared)

    def read_labels(
        self, source: Source, shape: Size, scratch: Path, *, cancelled: CancellationCheck = never_cancelled
    ) -> Volume:
        """Read labels for a stack of shape (Z, Y, X) from a TIFF, or from a .npy file with or without gzip.

        Raises BadParameter if the labels have a different shape, and the same errors as `read`.
        """
        request = self._make_request("labels", Selection(), source, is_shared=False) | {"shape": shape}
        volume = self._extract(request, source, scratch, cancelled, is_shared=False)
        if not isinstance(volume, Volume) or volume.shape != (1, *shape):
            raise BadFile(INVALID_REPLY_MESSAGE)
        return volume

    @property
    def killed_child_count(self) -> int:
        """Number of children that the kernel or a user killed while they were reading a file."""
        return sum(child.kill_count for child in self._children)

    @property
    def missing_layers(self) -> dict[str, str]:
        """Layers of `confinement` that are not in force on this host, with reasons; empty until a child has started."""
        return next((child.missing_layers for child in self._children if child.missing_layers is not None), {})

    def wait_until_ready(self) -> None:
        """Wait until a child is ready, and restart it if it has ended. Raises NotReady if it does not start."""
        with self._pool.borrow(None) as child:
            child.wait_until_ready()

    def close(self) -> None:
        """Stop the child processes. Callers that are still waiting for a reply get NotReady."""
        for child in self._children:
            child.shut_down()
        self._pool.wait_for_all()
        for child in self._children:
            child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _extract(
        self, request: dict[str, Any], source: Source, scratch: Path, cancelled: CancellationCheck, *, is_shared: bool
    ) -> Volume | Description:
        limit_bytes = request["limit_bytes"]
        with _open_source(source) as file, RequestFiles(file, scratch, limit_bytes) as files:

            def parse_result(result: dict[str, Any]) -> Description | tuple[VolumeLocation, bytearray | int]:
                if "description" in result:
                    return parse_description(result["description"])
                location = parse_location(result, limit_bytes)
                input_content = source if isinstance(source, bytearray) else file
                if isinstance(input_content, RemoteStore):
                    return location, files.output_fd
                return location, files.output_fd if location.is_decoded else input_content

            result = self._run_request(request, files, cancelled, parse_result)
            if isinstance(result, Description):
                return result
            location, content = result
            try:
                return _make_volume(location, content, is_streamed=is_shared and not location.is_decoded)
            except (ValueError, OverflowError) as error:
                raise BadFile(
                    "The file is damaged: its pixels extend beyond the end of the file. Copy or export it again."
                ) from error

    def _make_request(
        self, call: str, selection: Selection, source: Source, *, is_shared: bool, max_decoded_bytes: int | None = None
    ) -> dict[str, Any]:
        limit_bytes = self._max_shared_bytes if is_shared else self._max_decoded_bytes
        is_remote = isinstance(source, RemoteStore)
        request = {"call": call, "selection": selection, "limit_bytes": limit_bytes, "remote": is_remote}
        return request if max_decoded_bytes is None else request | {"max_decoded_bytes": max_decoded_bytes}

    def _run_request(
        self,
        request: dict[str, Any],
        files: RequestFiles,
        cancelled: CancellationCheck,
        parse_result: Callable[[Any], T],
    ) -> T:
        """Send a request to a child, and return the result after parsing it with `parse_result`.

        The request is sent again if the child is killed or does not start, because the host may have run out of memory.

        A child that sends an invalid reply is restarted, because the file may have compromised it.
        """
        with self._pool.borrow(self._client) as child:
            try:
                reply = child.call(request, files, self._client, cancelled)
            except (ReaderKilled, NotReady):
                reply = child.call(request, files, self._client, cancelled)
            try:
                error_in_reply = parse_error(reply)
                if error_in_reply is None:
                    return parse_result(reply["result"])
            # The types of the fields raise the errors of the service.
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError, StackSegError) as error:
                child.restart()
                raise BadFile(INVALID_REPLY_MESSAGE) from error
            raise error_in_reply


@contextmanager
def _open_source(source: Source) -> Iterator[int | RemoteStore]:
    """Yield the remote store itself, or a descriptor of the file, the folder, or an in-memory copy of the content."""
    if isinstance(source, RemoteStore):
        yield source
        return
    if isinstance(source, Path):
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    with make_unnamed_file() as file:
        file.write(source)
        file.flush()
        yield file.fileno()


def _make_volume(location: VolumeLocation, content: bytearray | int, *, is_streamed: bool) -> Volume:
    """Return a volume that uses content in memory or in an open file. A large or streamed file is read, not mapped.

    Raises ValueError if the content ends before the pixels.
    """
    placement, metadata_fields = location.placement, (location.voxel_size, location.channels, location.notes)
    if isinstance(content, bytearray):
        return placement.map_volume(content, *metadata_fields)
    # The pages of a large mapped file would fill the memory and count as used memory.
    if placement.nbytes >= LARGE_ARRAY_BYTES or is_streamed:
        return placement.stream_volume(content, *metadata_fields)
    return placement.map_volume(map_file(content), *metadata_fields)
