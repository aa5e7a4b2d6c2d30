"""Files of this host that requests name instead of sending and receiving them: `NAME/path/to/file.tif`.

NAME is a folder that the operator has listed. The path is opened from there folder by folder, without following links:
the file that was checked is the one that is used, whoever renames or links meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from service.core.errors import BadParameter, ConfigError, OutOfStorage
from service.core.files.whole_file import descriptor_path, open_below, open_root
from service.core.sections.serving import References, Root
from service.core.types import Cancelling, never
from service.formats.sandbox.remote_store import RemoteStore, check_url, is_url
from service.formats.zarr.store import is_store_name, is_zarr_folder
from service.serving.storage import delivery
from service.serving.storage.delivery import Target
from service.serving.storage.host_folder import list_files
from service.serving.storage.result_folder import ResultFolder, hold_results


class Source(NamedTuple):
    """An open file or folder and its name. `path` is valid in this process and its children, also if it is renamed."""

    path: Path
    name: str


class RemoteSource(NamedTuple):
    """A store elsewhere, and its name."""

    path: RemoteStore
    name: str


class HostFiles:
    """The listed folders and stores and their callers. Raises ConfigError for one that cannot be used.

    Methods take places as requests write them, and the caller's name. They raise BadParameter for a place that does not
    exist or is not for this caller, with a message that has no path but the caller's own.
    """

    def __init__(self, settings: References) -> None:
        self._inputs, self._outputs = settings.inputs, settings.outputs
        self._stores = settings.stores
        for name, store in self._stores.items():
            try:
                RemoteStore(store.url).close()
            except BadParameter as error:
                raise ConfigError(f"references.stores: {name}: {error}") from error
        _check_roots("inputs", self._inputs, os.R_OK | os.X_OK)
        _check_roots("outputs", self._outputs, os.W_OK | os.X_OK)

    def check(
        self,
        place: str | None,
        output: str | None,
        caller: str | None,
        *,
        overwrite: bool = False,
        as_zarr: bool = False,
    ) -> None:
        """Check that a request can begin, whose output is a file, or a store of Zarr.

        Raises BadParameter, OutputExists for an output that exists, and OutOfStorage where nothing can be written.
        """
        if place is not None:
            with self.open_input(place, caller):
                pass
        if output is not None:
            if as_zarr and not is_store_name(output.rpartition("/")[2]):
                raise BadParameter.about("output_to", f"{output} is no name for a store of Zarr; choose another name.")
            with self._open_target(output, caller, overwrite=overwrite) as target:
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=target.folder):
                    raise BadParameter.about("output_to", f"the service lacks permission to write {output}.")
                check = delivery.check_store if as_zarr else delivery.check_file
                check(target)
                if os.fstatvfs(target.folder).f_bavail == 0:
                    raise _disk_full(output)

    @contextmanager
    def open_input(self, place: str, caller: str | None) -> Iterator[Source | RemoteSource]:
        """Open the regular file, folder of OME-Zarr, or store elsewhere at `place` until the end of the block."""
        if (url := self._find_url(place, caller)) is None:
            with self._open_file(place, caller) as source:
                yield source
            return
        with RemoteStore(url) as store:
            yield RemoteSource(store, store.name)

    def _find_url(self, place: str, caller: str | None) -> str | None:
        """Return the URL of a store that a place names, None for other places. Raises BadParameter."""
        allowed = self._list_urls(caller)
        if is_url(place):
            url = next((url for url in allowed.values() if place.startswith(f"{url}/")), None)
            if url is None:
                names = f" They are {', '.join(allowed.values())}." if allowed else ""
                raise BadParameter.about(
                    "input", f"only stores below those may be named that the operator has listed.{names}"
                )
            check_url(place)
            rest = unquote(place[len(url) :])
        else:
            name, slash, rest = place.partition("/")
            if name not in allowed:
                return None
            url, rest = allowed[name], slash + rest
        rest = rest.rstrip("/")
        if not rest or not all(map(_is_file_name, rest.split("/")[1:])):
            raise BadParameter.about(
                "input", f"the way from {url} to the store must be names with single slashes in between."
            )
        return url + quote(rest)

    def _list_urls(self, caller: str | None) -> dict[str, str]:
        """Return the URLs of the stores that a caller may use, by name."""
        return {name: store.url.rstrip("/") for name, store in self._stores.items() if _may(caller, store.keys)}

    @contextmanager
    def _open_file(self, place: str, caller: str | None) -> Iterator[Source]:
        root, parts = _parse_place("input", place, self._inputs, caller)
        with _open_below("input", root, parts[:-1], place) as folder:
            # O_PATH first: opening a pipe or a device for reading has side effects.
            with _translate_os_errors("input", place):
                handle = os.open(parts[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                mode = os.fstat(handle).st_mode
                if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and is_zarr_folder(descriptor_path(handle))):
                    raise BadParameter.about(
                        "input",
                        f"{place} is a folder, a link or a device, not a file; of folders, images of OME-Zarr"
                        " are read, and POST /jobs takes folders of stacks.",
                    )
                with _translate_os_errors("input", place):
                    file = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(handle)
        try:
            yield Source(descriptor_path(file), parts[-1])
        finally:
            os.close(file)

    def is_folder(self, place: str, caller: str | None) -> bool:
        """Return whether there is a folder at `place` that is no image of OME-Zarr."""
        with suppress(BadParameter), self.open_folder(place, caller) as folder:
            return not is_zarr_folder(folder.path)
        return False

    @contextmanager
    def open_folder(self, place: str, caller: str | None) -> Iterator[Source]:
        """Open the folder at `place`, which may be a listed one, to look names up in it until the end of the block."""
        root, parts = _parse_place("input", place.removesuffix("/"), self._inputs, caller, folder=True)
        with _open_below("input", root, parts, place) as folder:
            yield Source(descriptor_path(folder), (parts or [place.removesuffix("/")])[-1])

    @contextmanager
    def open_results(self, place: str, caller: str | None) -> Iterator[ResultFolder]:
        """Use the folder at `place` for results until the end of the block; it is made in one that is there."""
        root, parts = _parse_place("output_to", place.removesuffix("/"), self._outputs, caller, folder=True)
        with _open_below("output_to", root, parts[:-1], place) as parent, ExitStack() as stack:
            with _translate_os_errors("output_to", place):
                folder = stack.enter_context(open_below(parent, parts[-1:], make=True))
                results = stack.enter_context(hold_results(folder))
            yield results

    def list_stacks(self, place: str, output: str, caller: str | None, glob: str | None) -> list[str]:
        """Return the files of a folder that match a pattern, those in the folder of the results left out.

        Raises BadParameter also where both are one folder.
        """
        root, parts = _parse_place("output_to", output.removesuffix("/"), self._outputs, caller, folder=True)
        own: os.stat_result | None = None
        with suppress(BadParameter), _open_below("output_to", root, parts, output) as results:
            own = os.fstat(results)
        with self.open_folder(place, caller) as folder:
            if own is not None and os.path.samestat(folder.path.stat(), own):
                raise BadParameter.about(
                    "output_to", f"{output} is the folder of the stacks; name another for the results."
                )
            with _translate_os_errors("input", place):
                return list_files(folder.path, glob or "*", own)

    def put(self, file: Path, place: str, caller: str | None, ticket: str, *, overwrite: bool = False) -> None:
        """Copy a finished file to `place`, where it appears whole and after it is on disk.

        A second call with the same `ticket`, as after a crash, recognises its own file until `settle`. Raises OSError,
        OutOfStorage, and OutputExists for a file of others unless `overwrite`.
        """
        opening = self._open_target(place, caller, ticket, overwrite=overwrite)
        with opening as target, _translate_os_errors("output_to", place):
            delivery.put_file(file, target)

    def is_zarr(self, place: str, caller: str | None) -> bool:
        """Return whether a result at `place` is OME-Zarr, by its name or as one of the labels of an image."""
        return place.lower().endswith(".zarr") or self.find_image(place, caller) is not None

    def find_image(self, place: str, caller: str | None) -> Literal[2, 3] | None:
        """Return the format of Zarr of the image whose labels `place` is among, None for other places."""
        root, parts = _parse_place("output_to", place, self._outputs, caller)
        if parts[-2:-1] != ["labels"]:
            return None
        with suppress(BadParameter), _open_below("output_to", root, parts[:-2], place) as image:
            path = descriptor_path(image)
            if is_zarr_folder(path):
                return 3 if (path / "zarr.json").is_file() else 2
        return None

    def put_zarr(  # noqa: PLR0913
        self,
        store: Path,
        place: str,
        caller: str | None,
        ticket: str,
        *,
        overwrite: bool = False,
        cancelled: Cancelling = never,
    ) -> None:
        """Copy a finished store of Zarr to `place`, as `put` does; only another store is overwritten.

        Among the labels of an image it is listed there: `store` then lies in a group that lists it. Raises also
        Cancelled, and BadFile for an image whose metadata make no sense.
        """
        in_image = self.find_image(place, caller) is not None
        opening = self._open_target(place, caller, ticket, overwrite=overwrite)
        with opening as target, _translate_os_errors("output_to", place):
            delivery.put_store(store, target, cancelled)
            try:
                if in_image:
                    delivery.list_labels(store.parent, target.folder, cancelled)
            except BaseException:
                # What has replaced another is kept: there is nothing else.
                if not overwrite:
                    delivery.take_back(target)
                raise

    def settle(self, place: str, caller: str | None, ticket: str) -> None:
        """Forget the ticket of a result that is on record."""
        with self._open_target(place, caller, ticket) as target:
            delivery.settle(target)

    @contextmanager
    def _open_target(
        self, place: str, caller: str | None, ticket: str = "", *, overwrite: bool = False
    ) -> Iterator[Target]:
        root, parts = _parse_place("output_to", place, self._outputs, caller)
        if self.find_image(place, caller) is not None:
            with _open_below("output_to", root, parts[:-2], place) as image, suppress(FileExistsError):
                os.mkdir("labels", dir_fd=image)
        with _open_below("output_to", root, parts[:-1], place) as folder:
            yield Target(folder, parts[-1], place, ticket, overwrite)


def _check_roots(kind: str, roots: Mapping[str, Root], mode: int) -> None:
    for name, root in roots.items():
        if not root.folder.is_dir() or not os.access(root.folder, mode):
            may = "write to" if mode & os.W_OK else "read"
            raise ConfigError(f"references.{kind}: {name}: {root.folder} is not a folder that this process may {may}.")


def _parse_place(
    parameter: str, place: str, roots: Mapping[str, Root], caller: str | None, *, folder: bool = False
) -> tuple[Root, list[str]]:
    """Return the root of a place, and the names from there to the file or the `folder`. Raises BadParameter."""
    allowed = {name: root for name, root in roots.items() if _may(caller, root.keys)}
    if not allowed:
        instead = "post the stack itself" if parameter == "input" else "the result comes back in the answer without it"
        raise BadParameter.about(parameter, f"no folders of this service's host may be named; {instead}.")
    name, *parts = place.split("/")
    if name not in allowed or not (parts or folder):
        raise BadParameter.about(
            parameter, f"a place begins with one of {', '.join(allowed)}, as in {next(iter(allowed))}/2026/stack.tif."
        )
    if not all(map(_is_file_name, parts)):
        raise BadParameter.about(
            parameter, f"the way from {name} to the file must be names with single slashes in between."
        )
    return allowed[name], parts


def _may(caller: str | None, keys: tuple[str, ...]) -> bool:
    """Return whether a caller is among the keys, or all are."""
    return not keys or caller in keys


def _is_file_name(part: str) -> bool:
    """Return whether a part of a place is the name of a file or a folder."""
    encoded = part.encode(errors="replace")
    return part not in {"", ".", ".."} and "\0" not in part and len(encoded) <= 255 and encoded.decode() == part


@contextmanager
def _open_below(parameter: str, root: Root, parts: Sequence[str], place: str) -> Iterator[int]:
    """Open the folder that the names lead to."""
    with ExitStack() as stack:
        # The operator may have listed a link.
        with _translate_os_errors(parameter, place), open_root(root.folder) as top:
            folder = stack.enter_context(open_below(top, parts))
        yield folder


@contextmanager
def _translate_os_errors(parameter: str, place: str) -> Iterator[None]:
    """Raise BadParameter or OutOfStorage for OSError, without the system's message, which may tell of paths."""
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
            case errno.EISDIR | errno.ENOTEMPTY | errno.EROFS | errno.ENAMETOOLONG | errno.EBUSY | errno.ETXTBSY:
                problem = f"cannot be used: {os.strerror(error.errno)}"
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                raise _disk_full(place) from error
            case _:
                raise
        raise BadParameter.about(parameter, f"{place} {problem}.") from None


def _disk_full(place: str) -> OutOfStorage:
    return OutOfStorage(
        f"output_to: the disk that {place} lies on is full; try again later, or choose another folder.",
        parameter="output_to",
    )
