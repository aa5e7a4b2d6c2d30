"""Files of this host that requests name instead of sending and receiving them: `NAME/way/to/file.tif`.

NAME is a folder that the operator has listed. The way is walked from there, folder by folder, each opened from the one
before without following links: what was looked at is what is used, whoever renames or links meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from service.core import config
from service.core.config import Root
from service.core.errors import BadParameter, ConfigError, OutputExists
from service.formats.sandbox import held

COPY_BYTES = 2**26
# A folder that is opened for nothing but finding what is in it.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# File systems without hard links say one of these.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})


class Source(NamedTuple):
    """An open file. `path` leads to it, whatever becomes of its name, in this process and its children; `name`."""

    path: Path
    name: str


class HostFiles:
    """What may be named, by whom. Folders are looked at once here; raises ConfigError for those that cannot be used.

    Methods take places as they stand in requests, and the caller's name. They raise BadParameter for what is not
    there or not for this caller, and name no path but the caller's own.
    """

    def __init__(self, settings: config.References) -> None:
        self._inputs, self._outputs = settings.inputs, settings.outputs
        _check_roots("inputs", self._inputs, os.R_OK | os.X_OK)
        _check_roots("outputs", self._outputs, os.W_OK | os.X_OK)

    def check(self, place: str | None, output: str | None, caller: str | None, *, overwrite: bool = False) -> None:
        """Whether a request can begin. Raises OutputExists for a file that is there already."""
        if place is not None:
            with self.open_input(place, caller):
                pass
        if output is not None:
            with self._output_folder(output, caller) as (folder, name):
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
                    raise BadParameter(f"output_to: the service lacks permission to write {output}.")
                if not overwrite:
                    _check_absent(folder, name, output)

    @contextmanager
    def open_input(self, place: str, caller: str | None) -> Iterator[Source]:
        """The regular file at `place`, open for reading until the end of the block."""
        root, way = _allowed("input", place, self._inputs, caller)
        with _walked("input", root, way, place) as folder:
            # Looked at before it is opened: opening a pipe or a device does things.
            with _explained("input", place):
                found = os.open(way[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(found).st_mode):
                    raise BadParameter(f"input: {place} is a folder, a link or a device, not a file.")
                with _explained("input", place):
                    file = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(found)
        try:
            yield Source(held(file), way[-1])
        finally:
            os.close(file)

    def put(self, file: Path, place: str, caller: str | None, ticket: str, *, overwrite: bool = False) -> None:
        """Copy a finished file to `place`, where it appears at once and whole, after it is on disk.

        Called again with the same `ticket`, as after a crash, it knows what it has put there itself, until `settle`.
        Raises OutputExists for a file that is there already, unless it may be overwritten, and OSError.
        """
        with self._output_folder(place, caller) as (folder, name):
            partial = _partial(ticket)
            if _same(folder, partial, name):
                return
            with suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=folder)
            try:
                with _explained("output_to", place):
                    _copy(file, partial, folder)
                if overwrite:
                    os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
                else:
                    _link(folder, partial, name, place)
                os.fsync(folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(partial, dir_fd=folder)
                raise

    def settle(self, place: str, caller: str | None, ticket: str) -> None:
        """The result at `place` is on record: forget whose it is."""
        with self._output_folder(place, caller) as (folder, _), suppress(FileNotFoundError):
            os.unlink(_partial(ticket), dir_fd=folder)

    @contextmanager
    def _output_folder(self, place: str, caller: str | None) -> Iterator[tuple[int, str]]:
        root, way = _allowed("output_to", place, self._outputs, caller)
        with _walked("output_to", root, way, place) as folder:
            yield folder, way[-1]


def _partial(ticket: str) -> str:
    return f".stackseg-{ticket}.part"


def _check_roots(kind: str, roots: Mapping[str, Root], mode: int) -> None:
    for name, root in roots.items():
        if not root.folder.is_dir() or not os.access(root.folder, mode):
            may = "write to" if mode & os.W_OK else "read"
            raise ConfigError(f"references.{kind}: {name}: {root.folder} is not a folder that this process may {may}.")


def _allowed(parameter: str, place: str, roots: Mapping[str, Root], caller: str | None) -> tuple[Root, list[str]]:
    """The root of a place, and the names from there to the file."""
    mine = {name: root for name, root in roots.items() if not root.keys or caller in root.keys}
    if not mine:
        instead = "post the stack itself" if parameter == "input" else "the result comes back in the answer without it"
        raise BadParameter(f"{parameter}: no folders of this service's host may be named; {instead}.")
    name, *way = place.split("/")
    if name not in mine or not way:
        raise BadParameter(
            f"{parameter}: a place begins with one of {', '.join(mine)}, as in {next(iter(mine))}/2026/stack.tif."
        )
    if not all(_plain(part) for part in way):
        raise BadParameter(
            f"{parameter}: the way from {name} to the file must be names with single slashes in between."
        )
    return mine[name], way


def _plain(part: str) -> bool:
    """Whether a part of a way is the name of a file or a folder."""
    written = part.encode(errors="replace")
    return part not in {"", ".", ".."} and "\0" not in part and len(written) <= 255 and written.decode() == part


@contextmanager
def _walked(parameter: str, root: Root, way: list[str], place: str) -> Iterator[int]:
    """The folder that holds the last of the names, open."""
    with _explained(parameter, place):
        # The root itself is the operator's, who may well use a link.
        folder = os.open(root.folder, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for part in way[:-1]:
            with _explained(parameter, place):
                inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _explained(parameter: str, place: str) -> Iterator[None]:
    """OSError -> BadParameter; what the system says may tell of paths, and is left out."""
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ELOOP | errno.ENOTDIR:
                problem = "leads over a link or a file; only folders below the named one are walked"
            case errno.ENOENT:
                problem = (
                    "is not there" if parameter == "input" else "lies in a folder that is not there; make it first"
                )
            case errno.EACCES | errno.EPERM:
                problem = "cannot be opened: the service lacks permission"
            case _:
                raise
        raise BadParameter(f"{parameter}: {place} {problem}.") from None


def _same(folder: int, one: str, other: str) -> bool:
    try:
        first, second = (os.stat(name, dir_fd=folder, follow_symlinks=False) for name in (one, other))
    except FileNotFoundError:
        return False
    return os.path.samestat(first, second)


def _check_absent(folder: int, name: str, place: str) -> None:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        raise OutputExists(f"output_to: {place} is there already; choose another name, or say overwrite=true.")


def _copy(file: Path, name: str, folder: int) -> None:
    """Into a new file that is on disk at the end."""
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        with file.open("rb") as source:
            while block := source.read(COPY_BYTES):
                view = memoryview(block)
                while view:
                    view = view[os.write(target, view) :]
        os.fsync(target)
    finally:
        os.close(target)


def _link(folder: int, partial: str, name: str, place: str) -> None:
    """Give a finished file its name, unless there is one of that name."""
    try:
        os.link(partial, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        _check_absent(folder, name, place)
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Another file may appear between these two; without hard links that cannot be helped.
        _check_absent(folder, name, place)
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
