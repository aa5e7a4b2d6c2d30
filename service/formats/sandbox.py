"""Reading TIFFs that strangers sent, in processes that may run out of memory or time, or crash, without harm.

A `Reader` keeps a few child processes warm. A child parses and decodes; what comes back through its pipe is JSON, and
pixels come back as a place in a file, which this process maps. A child that dies or takes too long is replaced.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import numpy as np

import service
from service.core.buffers import LARGE_BYTES
from service.core.errors import (
    AmbiguousAxes,
    BadFile,
    BadParameter,
    NotReady,
    StackSegError,
    TooLarge,
    UnsupportedMedia,
)
from service.core.volume import Description, Selection, Volume, VoxelSize
from service.formats import sandbox_child
from service.formats.parse_cache import ParseCache, Part
from service.formats.pixels import Placement, mapped

STARTUP_SECONDS = 60.0

# Decoding a file beyond this takes so long that one process is left for others meanwhile.
LARGE_FILE_BYTES = 2**25

# What Python and its libraries may need; passwords and tokens of the service stay with the service.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")

_ERRORS = {error.slug: error for error in (AmbiguousAxes, BadFile, BadParameter, TooLarge, UnsupportedMedia)}
_log = logging.getLogger(__name__)


# A file, or all that would be in it.
Source = Path | bytearray


class _Extract(NamedTuple):
    """Where pixels are: in the file itself, or decoded in another one, by its name."""

    file: str | None
    placement: Placement
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]


class Reader:
    """Reads TIFFs in child processes; safe to use from several threads.

    Args:
        memory_bytes: what a child may use for one file, beyond what it takes when idle
        seconds: how long it may take for one file
        decoded_bytes: largest selection that is read from an upload
        shared_bytes: largest selection that is read from a shared file; None: the same
        processes: how many files are read at the same time; further callers wait
        large_bytes: files beyond this are never decoded by all of the processes at once
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
        most = max(self._decoded_bytes, self._shared_bytes)
        self._children = [_Child(memory_bytes, most, seconds) for _ in range(processes)]
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for process in self._children:
            self._idle.put(process)
        self._large_bytes, self._large = large_bytes, threading.Semaphore(max(processes - 1, 1))
        self._described: ParseCache[Description] = ParseCache()
        self._extracted: ParseCache[_Extract] = ParseCache()
        self._closed = False

    def inspect(
        self, source: Source, selection: Selection, *, shared: bool = False, owner: str | None = None
    ) -> Description:
        """Inspect a file as `tiff_reader.inspect` does, with its errors; a crash is BadFile, out of time TooLarge."""
        content, limit = self._content(source, shared=shared), self._limit(shared=shared)

        def ask() -> tuple[Description, Sequence[Part] | None]:
            with _lent(source) as path:
                result, read_log = self._ask("inspect", path, selection, limit)
            return _description(result), read_log

        return self._described.answer((selection, limit, owner), content, ask)

    def read(
        self, source: Source, selection: Selection, scratch: Path, *, shared: bool = False, owner: str | None = None
    ) -> Volume:
        """As `service.formats.tiff_reader.read`, with its errors; a crash is BadFile, running out of time TooLarge.

        Decoded pixels go to a file in the folder `scratch`, which may be left behind unfinished after a crash.
        The volume maps that file, or the uploaded one, or shares its memory. A `shared` file may be changed by others
        at any time, and is read instead of mapped: a mapped file that becomes shorter ends the process that looks at
        it. Of any other it is remembered what decided, for files of the same `owner` that differ in pixels alone.
        """
        content, limit = self._content(source, shared=shared), self._limit(shared=shared)

        def ask() -> tuple[_Extract, Sequence[Part] | None]:
            with _lent(source) as path, self._large if _size(path) > self._large_bytes else nullcontext():
                result, read_log = self._ask("extract", path, selection, limit, scratch)
            extract = _extract(result, limit)
            return extract, read_log if extract.file is None else None

        found = self._extracted.answer((selection, limit, owner), content, ask)
        try:
            return _volume(found, source, content, scratch)
        except ValueError as error:
            raise BadFile("The file is damaged: its pixels lie outside of it.") from error

    @property
    def opens(self) -> bool:
        """Whether the processes can open what has no name but /proc/PID/fd/NUMBER; False until one has started."""
        return any(process.opens for process in self._children)

    def close(self) -> None:
        """End the child processes; callers that still wait for an answer get NotReady."""
        self._closed = True
        for process in self._children:
            process.retire()
        for process in [self._idle.get() for _ in self._children]:
            process.end()
            self._idle.put(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _limit(self, *, shared: bool) -> int:
        return self._shared_bytes if shared else self._decoded_bytes

    def _content(self, source: Source, *, shared: bool) -> mmap.mmap | bytearray | None:
        """The whole file, where it can be compared: not what is empty, nor what others may change."""
        if shared or self._closed:
            return None
        if isinstance(source, bytearray):
            return source
        try:
            return mapped(source)
        except ValueError:
            return None

    def _ask(
        self, call: str, path: Path, selection: Selection, limit_bytes: int, scratch: Path | None = None
    ) -> tuple[dict[str, Any], Sequence[Part] | None]:
        process = self._idle.get()
        try:
            reply = process.ask(
                {
                    "call": call,
                    # Links are not followed here: a path may stand for an open file, whose name leads elsewhere by now.
                    "path": os.fspath(path.absolute()),
                    "selection": asdict(selection),
                    "limit_bytes": limit_bytes,
                    "scratch": None if scratch is None else os.fspath(scratch.absolute()),
                }
            )
        finally:
            self._idle.put(process)
        if "errno" in reply:
            raise OSError(reply["errno"], reply["message"], os.fspath(path))
        if "error" in reply:
            raise _ERRORS.get(reply["error"], BadFile)(str(reply["message"]))
        read_log = reply["evidence"]
        if read_log is not None:
            read_log = [Part(int(begin), int(end), bool(text)) for begin, end, text in read_log]
        return reply["result"], read_log


class _Child:
    """One child process, started at once and again whenever it is gone; used by one thread at a time."""

    def __init__(self, memory_bytes: int, decoded_bytes: int, seconds: float) -> None:
        self._arguments = [str(memory_bytes), str(decoded_bytes), str(seconds)]
        self._seconds = seconds
        self._retired = False
        # Whether it can open a file that this process has open; known once it has started.
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
            return self._exchange(request)
        except (EOFError, BrokenPipeError):
            raise self._died() from None

    def retire(self) -> None:
        """Kill the process for good; whoever waits for its answer hears of it."""
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
            self._report()
            raise NotReady("The process that reads TIFFs does not start; the operator finds more in the log.") from None
        self._ready = True
        if not self.opens:
            _tell_of_closed()

    def _start(self) -> subprocess.Popen[bytes]:
        root = os.fspath(Path(service.__file__).parents[1])
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
        }
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        return subprocess.Popen(  # noqa: S603 - this interpreter, with the module beside this one
            [
                sys.executable,
                "-m",
                sandbox_child.__name__,
                *self._arguments,
                os.fspath(held(self._complaints.fileno())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
            env=environment,
        )

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        cast("IO[bytes]", self._process.stdin).write(json.dumps(request).encode() + b"\n")
        try:
            return self._receive(self._seconds)
        except TimeoutError:
            self.end()
            raise TooLarge(
                f"Reading the file took more than {self._seconds:g} seconds. Crop it, or save it uncompressed."
            ) from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next line from the child; EOFError where it has ended, TimeoutError where it is silent."""
        descriptor = cast("IO[bytes]", self._process.stdout).fileno()
        deadline = time.monotonic() + seconds
        # Not select.select, which knows no descriptor beyond 1023, and a busy server has more.
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise EOFError
            line += chunk
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _died(self) -> StackSegError:
        if self._retired:
            return NotReady("The service is stopping.")
        self._report()
        return BadFile("The file is damaged: the program that decodes it crashed. Export it again, uncompressed.")

    def _report(self) -> None:
        status = self._process.wait()
        self._complaints.seek(0)
        complaints = self._complaints.read()[-2000:].decode(errors="replace")
        _log.warning("A process that reads TIFFs ended with status %d. %s", status, complaints)


def held(descriptor: int) -> Path:
    """A path to a file that this process has open, for the processes that read TIFFs; so not /proc/self."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@contextmanager
def _lent(source: Source) -> Iterator[Path]:
    """Where a child finds the file, for as long as the block takes."""
    if isinstance(source, Path):
        yield source
        return
    with _nameless() as file:
        file.write(source)
        file.flush()
        yield held(file.fileno())


def _nameless() -> IO[bytes]:
    """A file in memory, or at least without a name."""
    try:
        return os.fdopen(os.memfd_create("upload"), "wb")
    except (OSError, AttributeError):
        return tempfile.TemporaryFile()


@cache
def _tell_of_closed() -> None:
    """Once."""
    _log.warning("The processes that read TIFFs cannot open files of this process; small uploads go to the disk, too.")


def _size(path: Path) -> int:
    """Bytes of the file; 0 where that cannot be told, which reading it then says."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _extract(reply: dict[str, Any], limit_bytes: int) -> _Extract:
    placement = Placement(reply["dtype"], int(reply["offset"]), _four(reply["shape"]), _four(reply["strides"]))
    if np.dtype(placement.dtype).kind not in "uif" or placement.nbytes > limit_bytes:
        raise BadFile("The file is damaged: what was read of it makes no sense.")
    file = None if reply["file"] is None else Path(reply["file"]).name
    return _Extract(file, placement, sandbox_child.voxel_size(reply["voxel_size"]), tuple(reply["channels"]))


def _volume(found: _Extract, source: Source, content: mmap.mmap | bytearray | None, scratch: Path) -> Volume:
    """Of the file, whose `content` is not known where others may change it, or of the decoded one in `scratch`.

    Raises ValueError where that ends before the pixels do.
    """
    placement, told = found.placement, (found.voxel_size, found.channels)
    file = source if found.file is None else scratch / found.file
    if isinstance(file, bytearray):
        return placement.volume(file, *told)
    # What is large would otherwise fill memory with pages of the file, which looks like use.
    if placement.nbytes >= LARGE_BYTES or (content is None and found.file is None):
        return placement.stream(file, *told)
    return placement.volume(mapped(file) if content is None or found.file else content, *told)


def _four(values: list[Any]) -> tuple[int, int, int, int]:
    a, b, c, d = (int(value) for value in values)
    return a, b, c, d


def _description(reply: dict[str, Any]) -> Description:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in reply.items()}
    return Description(**{**fields, "voxel_size": sandbox_child.voxel_size(reply["voxel_size"])})
