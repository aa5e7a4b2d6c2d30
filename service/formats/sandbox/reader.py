"""Read untrusted stacks in child processes, which may run out of memory or time, crash, or be taken over, without harm.

A `Reader` keeps a few started children. A child parses and decodes; requests and answers are JSON on a socket, files go
to it as open descriptors, those of a folder when it asks for them, and pixels come back as a location in one of them,
which this process maps. A child that dies or takes too long is replaced. `confinement` has what it cannot do.
"""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import TypeAdapter

from service.core.buffers import LARGE_BYTES
from service.core.errors import (
    AmbiguousAxes,
    BadFile,
    BadParameter,
    ReaderKilled,
    RequestError,
    TooLarge,
    UnsupportedMedia,
)
from service.core.quantities import Size
from service.core.types import Cancelling, Description, Selection, Volume, never
from service.formats.placement import Extract, map_file
from service.formats.sandbox.child_process import ReaderProcess
from service.formats.sandbox.remote_store import RemoteStore
from service.formats.sandbox.request_files import NONSENSE, RequestFiles, make_unnamed_file

# It is not imported here: what parses files runs in the child alone.
CHILD_MODULE = "service.formats.sandbox.child_main"
# Processes that start before a file comes. Each takes 20 MB, and a start 0.2 s.
STARTED_EARLY = 2
# What decodes to no more than this is decoded at once: mostly in less than a second.
SMALL_BYTES = 2**25
_ERRORS = {error.slug: error for error in (AmbiguousAxes, BadFile, BadParameter, TooLarge, UnsupportedMedia)}
_DESCRIPTION, _EXTRACT = TypeAdapter(Description), TypeAdapter(Extract)
# The parameter that an error is about, and values to try.
_ADVICE = TypeAdapter(tuple[str | None, dict[str, str]])

T = TypeVar("T")

Source = Path | bytearray | RemoteStore
"""A file, a folder of Zarr, the whole content of a file, or a store of Zarr elsewhere."""


class Reader:
    """Reader of stacks in child processes; thread-safe.

    Args:
        memory_bytes: memory of a child for one file, beyond that of an idle child
        seconds: time for one file
        decoded_bytes: largest selection from an upload
        shared_bytes: largest selection from a shared file; None: `decoded_bytes`
        processes: number of files that are read at the same time; further callers wait
        module: what the children run, with the arguments and the socket of `CHILD_MODULE`

    small_bytes  what decodes to no more than this is decoded by `read_small`
    Where `cancelled` returns True while a file is read, its child is killed, and Cancelled is raised.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        memory_bytes: int,
        seconds: float,
        decoded_bytes: int,
        shared_bytes: int | None = None,
        processes: int = 2,
        module: str = CHILD_MODULE,
    ) -> None:
        self.small_bytes = SMALL_BYTES
        self._decoded_bytes, self._shared_bytes = decoded_bytes, shared_bytes or decoded_bytes
        max_bytes = max(self._decoded_bytes, self._shared_bytes)
        self._children = [ReaderProcess(module, memory_bytes, max_bytes, seconds) for _ in range(processes)]
        # Whoever was idle last is asked first.
        self._idle: queue.LifoQueue[ReaderProcess] = queue.LifoQueue()
        for number, child in enumerate(reversed(self._children), 1 + STARTED_EARLY - processes):
            if number > 0:
                child.begin()
            self._idle.put(child)

    def inspect(
        self, source: Source, selection: Selection, *, shared: bool = False, cancelled: Cancelling = never
    ) -> Description:
        """Describe a file and the selected part, as `stack_reader.inspect` does.

        Raises its errors, BadFile where the child crashes, TooLarge where it runs out of time, and ReaderKilled.
        """
        request = self._request("inspect", selection, source, shared=shared)
        with _open(source) as file:
            return self._call(request, RequestFiles(file), cancelled, _DESCRIPTION.validate_python)

    def read(
        self,
        source: Source,
        selection: Selection,
        scratch: Path,
        *,
        shared: bool = False,
        cancelled: Cancelling = never,
    ) -> Volume:
        """Read the selected part of a file, as `stack_reader.read` does.

        Decoded pixels go to a file without a name in the folder `scratch`, which is made when it is needed. The volume
        maps that file or the uploaded one, or shares the memory of `source`. Others may change a `shared` file at any
        time, so it is read and never mapped: access to a mapped file that became shorter kills the process.

        Raises the errors of `stack_reader.read`, BadFile where the child crashes, TooLarge where it runs out of time,
        and ReaderKilled.
        """
        request = self._request("extract", selection, source, shared=shared, small_bytes=sys.maxsize)
        volume = self._extract(request, source, scratch, cancelled, shared=shared)
        if not isinstance(volume, Volume):
            raise BadFile(NONSENSE)
        return volume

    def read_small(
        self,
        source: Source,
        selection: Selection,
        scratch: Path,
        *,
        shared: bool = False,
        cancelled: Cancelling = never,
    ) -> Volume | Description:
        """Read like `read` where at most `self.small_bytes` have to be decoded, else describe it and decode nothing."""
        request = self._request("extract", selection, source, shared=shared, small_bytes=self.small_bytes)
        return self._extract(request, source, scratch, cancelled, shared=shared)

    def read_labels(self, source: Source, shape: Size, scratch: Path, *, cancelled: Cancelling = never) -> Volume:
        """Read labels for a stack of this shape (Z, Y, X) from a TIFF, or .npy that may be within gzip.

        Raises BadParameter for labels of another shape, and what `read` raises.
        """
        request = self._request("labels", Selection(), source, shared=False) | {"shape": shape}
        volume = self._extract(request, source, scratch, cancelled, shared=False)
        if not isinstance(volume, Volume) or volume.shape != (1, *shape):
            raise BadFile(NONSENSE)
        return volume

    @property
    def kills(self) -> int:
        """The number of children that others have killed while they read a file."""
        return sum(child.kills for child in self._children)

    @property
    def missing(self) -> dict[str, str]:
        """Layers of `confinement` that do not hold on this host, with the reasons; empty until a child has started."""
        return next((child.missing for child in self._children if child.missing is not None), {})

    def await_start(self) -> None:
        """Wait until a child has started. Raises NotReady where it does not start."""
        child = self._idle.get()
        try:
            child.await_start()
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """End the child processes; callers that still wait for an answer get NotReady."""
        for child in self._children:
            child.retire()
        for child in [self._idle.get() for _ in self._children]:
            child.end()
            self._idle.put(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _extract(
        self, request: dict[str, Any], source: Source, scratch: Path, cancelled: Cancelling, *, shared: bool
    ) -> Volume | Description:
        limit = request["limit_bytes"]
        with _open(source) as file, RequestFiles(file, scratch, limit) as files:

            def parse(result: dict[str, Any]) -> Description | tuple[Extract, bytearray | int]:
                if "description" in result:
                    return _DESCRIPTION.validate_python(result["description"])
                located = _parse_extract(result, limit)
                stored = source if isinstance(source, bytearray) else file
                if isinstance(stored, RemoteStore):
                    return located, files.output
                return located, files.output if located.decoded else stored

            found = self._call(request, files, cancelled, parse)
            if isinstance(found, Description):
                return found
            located, content = found
            try:
                return _volume(located, content, streamed=shared and not located.decoded)
            except (ValueError, OverflowError) as error:
                raise BadFile("The file is damaged: its pixels lie outside of it.") from error

    def _request(
        self, call: str, selection: Selection, source: Source, *, shared: bool, small_bytes: int | None = None
    ) -> dict[str, Any]:
        limit_bytes = self._shared_bytes if shared else self._decoded_bytes
        remote = isinstance(source, RemoteStore)
        request = {"call": call, "selection": selection, "limit_bytes": limit_bytes, "remote": remote}
        return request if small_bytes is None else request | {"small_bytes": small_bytes}

    def _call(
        self,
        request: dict[str, Any],
        files: RequestFiles,
        cancelled: Cancelling,
        parse: Callable[[Any], T],
    ) -> T:
        """Have a child answer a request, and return what `parse` makes of its result.

        A child whose reply makes no sense is not asked again: the file may have taken it over.
        """
        child = self._idle.get()
        try:
            try:
                reply = child.ask(request, files, cancelled)
            except ReaderKilled:
                reply = child.ask(request, files, cancelled)
            try:
                _raise_error(reply)
                return parse(reply["result"])
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
                child.begin()
                raise BadFile(NONSENSE) from error
        finally:
            self._idle.put(child)


@contextmanager
def _open(source: Source) -> Iterator[int | RemoteStore]:
    """Open a file, a folder, or a copy in memory of its content, until the end of the block; a store is open."""
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


def _raise_error(reply: dict[str, Any]) -> None:
    """Raise the error that a child has met, if it has."""
    if "errno" in reply:
        raise OSError(int(reply["errno"]), str(reply["message"]))
    if "error" in reply:
        raise _parse_error(reply)


def _parse_error(reply: dict[str, Any]) -> RequestError:
    """Return the error in a child's reply. Raises ValueError where the reply makes no sense."""
    parameter, suggested = _ADVICE.validate_python((reply.get("parameter"), reply.get("suggested", {})))
    kind: type[RequestError] = _ERRORS.get(str(reply["error"]), BadFile)
    return kind(str(reply["message"]), parameter=parameter, suggested=suggested)


def _parse_extract(reply: dict[str, Any], limit_bytes: int) -> Extract:
    """Parse a child's reply about the place of pixels. Raises ValueError where it makes no sense."""
    located = _EXTRACT.validate_python({**reply, "placement": reply})
    placement = located.placement
    if np.dtype(placement.dtype).kind not in "uif" or min(placement.shape) < 1 or placement.nbytes > limit_bytes:
        raise ValueError(NONSENSE)
    return located


def _volume(located: Extract, content: bytearray | int, *, streamed: bool) -> Volume:
    """Return the volume in memory or in an open file, which is mapped only where it is small and not to be `streamed`.

    Raises ValueError where the content ends before the pixels.
    """
    placement, facts = located.placement, (located.voxel_size, located.channels, located.notes)
    if isinstance(content, bytearray):
        return placement.map_volume(content, *facts)
    # A large mapped file would fill memory with its pages, which count as used.
    if placement.nbytes >= LARGE_BYTES or streamed:
        return placement.stream_volume(content, *facts)
    return placement.map_volume(map_file(content), *facts)
