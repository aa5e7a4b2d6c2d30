"""Read untrusted TIFFs in child processes, which may run out of memory or time, or crash, without harm.

A `Reader` keeps a few started children. A child parses and decodes; it answers in JSON through a pipe, and pixels come
back as a location in a file, which this process maps. A child that dies or takes too long is replaced.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import numpy as np

import service
from service.core.buffers import LARGE_BYTES
from service.core.errors import AmbiguousAxes, BadFile, BadParameter, NotReady, TooLarge, UnsupportedMedia
from service.core.volume import Description, Selection, Volume, VoxelSize
from service.formats import sandbox_child
from service.formats.pixels import Placement, map_file

STARTUP_SECONDS = 60.0

# Files beyond this take long to decode, and leave one process to smaller ones.
LARGE_FILE_BYTES = 2**25

# Variables that Python and its libraries may need; secrets in the environment are not passed on.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")

_ERRORS = {error.slug: error for error in (AmbiguousAxes, BadFile, BadParameter, TooLarge, UnsupportedMedia)}
_log = logging.getLogger(__name__)

Source = Path | bytearray
"""A file, or its whole content."""


class _Extract(NamedTuple):
    """Location of pixels: in the file itself (None), or decoded in another file, by its name in `scratch`."""

    file: str | None
    placement: Placement
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]


class Reader:
    """Reader of TIFFs in child processes; thread-safe.

    Args:
        memory_bytes: memory of a child for one file, beyond that of an idle child
        seconds: time for one file
        decoded_bytes: largest selection from an upload
        shared_bytes: largest selection from a shared file; None: `decoded_bytes`
        processes: number of files that are read at the same time; further callers wait
        large_bytes: files beyond this never occupy all processes at once
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        memory_bytes: int,
        seconds: float,
        decoded_bytes: int,
        shared_bytes: int | None = None,
        processes: int = 2,
        large_bytes: int = LARGE_FILE_BYTES,
    ) -> None:
        self._decoded_bytes, self._shared_bytes = decoded_bytes, shared_bytes or decoded_bytes
        max_bytes = max(self._decoded_bytes, self._shared_bytes)
        self._children = [_Child(memory_bytes, max_bytes, seconds) for _ in range(processes)]
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for child in self._children:
            self._idle.put(child)
        self._large_bytes, self._large = large_bytes, threading.Semaphore(max(processes - 1, 1))

    def inspect(self, source: Source, selection: Selection, *, shared: bool = False) -> Description:
        """Describe a file and the selected part, as `tiff_reader.inspect` does.

        Raises its errors, BadFile where the child crashes, TooLarge where it runs out of time.
        """
        with _path_for_child(source) as path:
            return _parse_description(self._call("inspect", path, selection, self._limit(shared=shared)))

    def read(self, source: Source, selection: Selection, scratch: Path, *, shared: bool = False) -> Volume:
        """Read the selected part of a file, as `tiff_reader.read` does.

        Decoded pixels go to a file in the folder `scratch`, which may be left behind unfinished after a crash.
        The volume maps that file or the uploaded one, or shares the memory of `source`. Others may change a `shared`
        file at any time, so it is read and never mapped: access to a mapped file that became shorter kills the process.

        Raises the errors of `tiff_reader.read`, BadFile where the child crashes, TooLarge where it runs out of time.
        """
        limit = self._limit(shared=shared)
        with _path_for_child(source) as path, self._large if _size(path) > self._large_bytes else nullcontext():
            located = _parse_extract(self._call("extract", path, selection, limit, scratch), limit)
        try:
            return _volume(located, source, scratch, shared=shared)
        except ValueError as error:
            raise BadFile("The file is damaged: its pixels lie outside of it.") from error

    @property
    def opens(self) -> bool:
        """Whether children can open unnamed files of this process as /proc/PID/fd/N; False until one has started."""
        return any(child.opens for child in self._children)

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

    def _limit(self, *, shared: bool) -> int:
        return self._shared_bytes if shared else self._decoded_bytes

    def _call(
        self, call: str, path: Path, selection: Selection, limit_bytes: int, scratch: Path | None = None
    ) -> dict[str, Any]:
        child = self._idle.get()
        try:
            reply = child.ask(
                {
                    "call": call,
                    # Not `resolve`: the link /proc/PID/fd/N must be opened as it is, as its target may have moved.
                    "path": os.fspath(path.absolute()),
                    "selection": asdict(selection),
                    "limit_bytes": limit_bytes,
                    "scratch": None if scratch is None else os.fspath(scratch.absolute()),
                }
            )
        finally:
            self._idle.put(child)
        if "errno" in reply:
            raise OSError(reply["errno"], reply["message"], os.fspath(path))
        if "error" in reply:
            raise _ERRORS.get(reply["error"], BadFile)(str(reply["message"]))
        result: dict[str, Any] = reply["result"]
        return result


class _Child:
    """One child process, started at once and restarted when it has ended; used by one thread at a time."""

    def __init__(self, memory_bytes: int, decoded_bytes: int, seconds: float) -> None:
        self._arguments = [str(memory_bytes), str(decoded_bytes), str(seconds)]
        self._seconds = seconds
        self._retired = False
        # Whether it can open a file that this process has open; False until it has started.
        self.opens = False
        self._process = self._start()
        self._ready = False

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        if self._retired:
            raise NotReady("The service is stopping.")
        if self._process.poll() is not None:
            self.end()
            self._process, self._ready = self._start(), False
        if not self._ready:
            self._await_start()
        try:
            cast("IO[bytes]", self._process.stdin).write(json.dumps(request).encode() + b"\n")
            return self._receive(self._seconds)
        except TimeoutError:
            self.end()
            raise TooLarge(
                f"Reading the file took more than {self._seconds:g} seconds. Crop it, or save it uncompressed."
            ) from None
        except (EOFError, BrokenPipeError):
            if self._retired:
                raise NotReady("The service is stopping.") from None
            self._log_death()
            raise BadFile(
                "The file is damaged: the program that decodes it crashed. Export it again, uncompressed."
            ) from None

    def retire(self) -> None:
        """Kill the process for good; a caller that waits for its answer gets NotReady."""
        self._retired = True
        self._process.kill()

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._complaints):
            if pipe is not None:
                pipe.close()

    def _await_start(self) -> None:
        try:
            self.opens = bool(self._receive(STARTUP_SECONDS)["opens"])
        except (EOFError, TimeoutError):
            self._process.kill()
            self._log_death()
            raise NotReady("The process that reads TIFFs does not start; the operator finds more in the log.") from None
        self._ready = True
        if not self.opens:
            _warn_of_closed_files()

    def _start(self) -> subprocess.Popen[bytes]:
        root = os.fspath(Path(service.__file__).parents[1])
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
        }
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        complaints = os.fspath(descriptor_path(self._complaints.fileno()))
        return subprocess.Popen(  # noqa: S603 - this interpreter, with the module beside this one
            [sys.executable, "-m", sandbox_child.__name__, *self._arguments, complaints],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
            env=environment,
        )

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Receive the next line from the child. Raises EOFError where it has ended, TimeoutError where it is silent."""
        descriptor = cast("IO[bytes]", self._process.stdout).fileno()
        deadline = time.monotonic() + seconds
        # select.select takes no descriptor beyond 1023, and a busy server has more.
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise EOFError
            line += chunk
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _log_death(self) -> None:
        status = self._process.wait()
        self._complaints.seek(0)
        complaints = self._complaints.read()[-2000:].decode(errors="replace")
        _log.warning("A process that reads TIFFs ended with status %d. %s", status, complaints)


def descriptor_path(descriptor: int) -> Path:
    """Return a path by which another process can open a file that this one has open."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@contextmanager
def _path_for_child(source: Source) -> Iterator[Path]:
    """Provide a path by which a child can open the file during the block."""
    if isinstance(source, Path):
        yield source
        return
    with _unnamed_file() as file:
        file.write(source)
        file.flush()
        yield descriptor_path(file.fileno())


def _unnamed_file() -> IO[bytes]:
    """Make a file in memory, or a temporary one on systems without memfd."""
    try:
        return os.fdopen(os.memfd_create("upload"), "wb")
    except (OSError, AttributeError):
        return tempfile.TemporaryFile()


@cache
def _warn_of_closed_files() -> None:
    """Log a warning, once per process."""
    _log.warning("The processes that read TIFFs cannot open files of this process; small uploads go to the disk, too.")


def _size(path: Path) -> int:
    """Return the bytes of the file, 0 where it cannot be examined; reading it then raises the error."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _parse_extract(reply: dict[str, Any], limit_bytes: int) -> _Extract:
    """Parse a child's reply. Raises BadFile where it makes no sense, as a child may be compromised."""
    placement = Placement(reply["dtype"], int(reply["offset"]), _four(reply["shape"]), _four(reply["strides"]))
    if np.dtype(placement.dtype).kind not in "uif" or placement.nbytes > limit_bytes:
        raise BadFile("The file is damaged: what was read of it makes no sense.")
    file = None if reply["file"] is None else Path(reply["file"]).name
    return _Extract(file, placement, sandbox_child.parse_voxel_size(reply["voxel_size"]), tuple(reply["channels"]))


def _volume(located: _Extract, source: Source, scratch: Path, *, shared: bool) -> Volume:
    """Return the volume in the decoded file, or in the source, which others may change where it is `shared`.

    Raises ValueError where the file ends before the pixels.
    """
    placement, facts = located.placement, (located.voxel_size, located.channels)
    file = source if located.file is None else scratch / located.file
    if isinstance(file, bytearray):
        return placement.map_volume(file, *facts)
    # A large mapped file would fill memory with its pages, which count as used.
    if placement.nbytes >= LARGE_BYTES or (shared and located.file is None):
        return placement.stream_volume(file, *facts)
    return placement.map_volume(map_file(file), *facts)


def _four(values: list[Any]) -> tuple[int, int, int, int]:
    a, b, c, d = (int(value) for value in values)
    return a, b, c, d


def _parse_description(reply: dict[str, Any]) -> Description:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in reply.items()}
    return Description(**{**fields, "voxel_size": sandbox_child.parse_voxel_size(reply["voxel_size"])})
