"""Input and output files on the host of the service, which requests refer to as `NAME/path/to/file.tif`.

NAME is the name of a folder in the configuration. The path below it is opened folder by folder, without following
links. Concurrent renames and links therefore cannot redirect a request to a different file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from service.core.errors import BadParameter, ConfigError
from service.core.files.atomic_files import make_descriptor_path, open_folder_by_path, open_subfolder
from service.core.sections.serving import ReferenceFolder, References
from service.core.types import CancellationCheck, never_cancelled
from service.formats.sandbox.remote_store import RemoteStore, check_url, is_url
from service.formats.zarr.store import FolderStore, copy_metadata, is_store_name, is_zarr_folder, open_file
from service.serving.storage import delivery
from service.serving.storage.delivery import DeliveryTarget
from service.serving.storage.disk import make_disk_full_error, translate_host_errors
from service.serving.storage.host_folder import list_files, would_replace
from service.serving.storage.result_folder import ResultFolder, lock_results


class Source(NamedTuple):
    """An open file or folder and its name. `path` is valid even after a rename, including in child processes."""

    path: Path
    name: str


class RemoteSource(NamedTuple):
    """A remote store and its name."""

    path: RemoteStore
    name: str


class HostFiles:
    """The folders and remote stores in the configuration, and the callers that may use them.

    Methods accept a location as written in the request, and the caller's name. They raise BadParameter if the location
    does not exist or the caller may not use it. Messages contain no path except the one in the request. The constructor
    raises ConfigError if a folder or store cannot be used.
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

    def list_roots(self, caller: str | None) -> tuple[list[str], list[str]]:
        """Return the names of the folders that a caller may read, and of those in which it may store results."""
        inputs, outputs = (
            [name for name, root in roots.items() if _is_allowed(caller, root.keys)]
            for roots in (self._inputs, self._outputs)
        )
        return inputs, outputs

    def check_locations(
        self,
        location: str | None,
        output: str | None,
        caller: str | None,
        *,
        overwrite: bool = False,
        is_zarr: bool = False,
    ) -> None:
        """Check the locations of a request. If `is_zarr` is set, the output is a Zarr store, not a file.

        Raises BadParameter, OutputExists if the output must not be overwritten, and OutOfStorage if the disk is full.
        """
        with ExitStack() as stack:
            source = None if location is None else stack.enter_context(self.open_input(location, caller))
            if output is None:
                return
            if is_zarr and not is_store_name(output.rpartition("/")[2]):
                raise BadParameter.for_parameter(
                    "output_to", f"{output} is not a valid name for a Zarr store. Choose another name."
                )
            with self._open_target(output, caller, overwrite=overwrite) as target:
                if isinstance(source, Source) and would_replace(target.folder_fd, target.name, source.path):
                    problem = f"{output} would replace the input. Choose another name."
                    raise BadParameter.for_parameter("output_to", problem)
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=target.folder_fd):
                    raise BadParameter.for_parameter("output_to", f"the service has no permission to write {output}.")
                check_target = delivery.check_store if is_zarr else delivery.check_file
                check_target(target)
                if os.fstatvfs(target.folder_fd).f_bavail == 0:
                    raise make_disk_full_error(output)

    @contextmanager
    def open_input(self, location: str, caller: str | None) -> Iterator[Source | RemoteSource]:
        """Context manager that opens the regular file, OME-Zarr folder or remote store at a location."""
        if (url := self._find_url(location, caller)) is None:
            with self._open_file(location, caller) as source:
                yield source
            return
        with RemoteStore(url) as store:
            yield RemoteSource(store, store.name)

    def _find_url(self, location: str, caller: str | None) -> str | None:
        """Return the URL if a location refers to a remote store, else None. Raises BadParameter."""
        allowed_urls = self._list_urls(caller)
        if is_url(location):
            url = next((url for url in allowed_urls.values() if location.startswith(f"{url}/")), None)
            if url is None:
                advice = f" Allowed URLs: {', '.join(allowed_urls.values())}." if allowed_urls else ""
                raise BadParameter.for_parameter(
                    "input", f"the URL does not begin with the URL of a configured store.{advice}"
                )
            check_url(location)
            subpath = unquote(location[len(url) :])
        else:
            name, slash, subpath = location.partition("/")
            if name not in allowed_urls:
                return None
            url, subpath = allowed_urls[name], slash + subpath
        subpath = subpath.rstrip("/")
        # Some servers treat a backslash like a slash.
        if not subpath or "\\" in subpath or not all(map(_is_file_name, subpath.split("/")[1:])):
            raise BadParameter.for_parameter(
                "input", f"the path from {url} to the store must consist of names separated by single slashes."
            )
        return url + quote(subpath)

    def _list_urls(self, caller: str | None) -> dict[str, str]:
        """Return the URLs of the stores that a caller may use, by name."""
        return {name: store.url.rstrip("/") for name, store in self._stores.items() if _is_allowed(caller, store.keys)}

    @contextmanager
    def _open_file(self, location: str, caller: str | None) -> Iterator[Source]:
        root, parts = _parse_location("input", location, self._inputs, caller)
        with _open_below_root("input", root, parts[:-1], location) as folder_fd:
            # Open with O_PATH first, because opening a pipe or a device for reading has side effects.
            with translate_host_errors("input", location):
                path_fd = os.open(parts[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            try:
                mode = os.fstat(path_fd).st_mode
                if not stat.S_ISREG(mode) and not (
                    stat.S_ISDIR(mode) and is_zarr_folder(make_descriptor_path(path_fd))
                ):
                    raise BadParameter.for_parameter(
                        "input",
                        f"{location} is a folder, a link or a device, not a file. A folder must be an OME-Zarr image."
                        " Use POST /jobs for a folder of stacks.",
                    )
                with translate_host_errors("input", location):
                    file_fd = os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(path_fd)
        try:
            yield Source(make_descriptor_path(file_fd), parts[-1])
        finally:
            os.close(file_fd)

    def is_folder(self, location: str, caller: str | None) -> bool:
        """Return whether the location is a folder other than an OME-Zarr image."""
        with suppress(BadParameter), self.open_folder(location, caller) as folder:
            return not is_zarr_folder(folder.path)
        return False

    @contextmanager
    def open_folder(self, location: str, caller: str | None) -> Iterator[Source]:
        """Context manager that opens the folder at a location. The location may be a configured folder itself."""
        root, parts = _parse_location("input", location.removesuffix("/"), self._inputs, caller, allow_root=True)
        with _open_below_root("input", root, parts, location) as folder_fd:
            yield Source(make_descriptor_path(folder_fd), (parts or [location.removesuffix("/")])[-1])

    @contextmanager
    def open_results(self, location: str, caller: str | None) -> Iterator[ResultFolder]:
        """Context manager that opens and locks a results folder. If only its parent exists, the folder is created."""
        root, parts = _parse_location("output_to", location.removesuffix("/"), self._outputs, caller, allow_root=True)
        with _open_below_root("output_to", root, parts[:-1], location) as parent_fd, ExitStack() as stack:
            with translate_host_errors("output_to", location):
                folder_fd = stack.enter_context(open_subfolder(parent_fd, parts[-1:], create_missing=True))
                results = stack.enter_context(lock_results(folder_fd))
            yield results

    def list_stacks(
        self,
        location: str,
        output: str,
        caller: str | None,
        glob: str | None,
        cancelled: CancellationCheck = never_cancelled,
    ) -> list[str]:
        """Return the files and OME-Zarr folders that match a pattern, except for those in the results folder `output`.

        Also raises Cancelled, and BadParameter if `output` is the input folder.
        """
        root, parts = _parse_location("output_to", output.removesuffix("/"), self._outputs, caller, allow_root=True)
        results_status: os.stat_result | None = None
        with suppress(BadParameter), _open_below_root("output_to", root, parts, output) as results_fd:
            results_status = os.fstat(results_fd)
        with self.open_folder(location, caller) as folder:
            if results_status is not None and os.path.samestat(folder.path.stat(), results_status):
                raise BadParameter.for_parameter(
                    "output_to", f"{output} is the input folder. Choose another folder for the results."
                )
            with translate_host_errors("input", location):
                return list_files(folder.path, glob or "*", results_status, cancelled)

    def put(self, file: Path, location: str, caller: str | None, ticket: str, *, overwrite: bool = False) -> None:
        """Copy a finished file to a location. The file appears there after it has been written to disk.

        Until `confirm_delivery`, a second call with the same `ticket`, for example after a crash, recognizes the
        delivered file. Raises OSError, OutOfStorage, and OutputExists if another file exists and `overwrite` is False.
        """
        target_context = self._open_target(location, caller, ticket, overwrite=overwrite)
        with target_context as target, translate_host_errors("output_to", location):
            delivery.put_file(file, target)

    def is_zarr(self, location: str, caller: str | None) -> bool:
        """Return whether the result at a location is OME-Zarr: the location ends with `.zarr` or is in an image."""
        return location.lower().endswith(".zarr") or self.find_image_format(location, caller) is not None

    def find_image_format(self, location: str, caller: str | None) -> Literal[2, 3] | None:
        """Return the Zarr format of the OME-Zarr image whose labels group contains a location, or None."""
        root, parts = _parse_location("output_to", location, self._outputs, caller)
        if parts[-2:-1] != ["labels"]:
            return None
        with suppress(BadParameter), _open_below_root("output_to", root, parts[:-2], location) as image_fd:
            path = make_descriptor_path(image_fd)
            if is_zarr_folder(path):
                return 3 if (path / "zarr.json").is_file() else 2
        return None

    def copy_image_metadata(self, location: str, caller: str | None, folder: Path) -> None:
        """Copy the metadata of the OME-Zarr image whose labels group contains a location to an empty folder.

        Raises BadFile if the metadata is invalid.
        """
        root, parts = _parse_location("output_to", location, self._outputs, caller)
        with _open_below_root("output_to", root, parts[:-2], location) as image_fd:
            copy_metadata(FolderStore(partial(open_file, image_fd)), folder)

    def put_zarr(  # noqa: PLR0913
        self,
        store: Path,
        location: str,
        caller: str | None,
        ticket: str,
        *,
        overwrite: bool = False,
        cancelled: CancellationCheck = never_cancelled,
    ) -> None:
        """Copy a finished Zarr store to a location, like `put`. Only another Zarr store can be overwritten.

        In the labels group of an image, the store is also added to the metadata of the group. In this case, the parent
        folder of `store` must be a group that lists the store. Also raises Cancelled, and BadFile if the metadata of
        the image is invalid.
        """
        is_in_image = self.find_image_format(location, caller) is not None
        target_context = self._open_target(location, caller, ticket, overwrite=overwrite)
        with target_context as target, translate_host_errors("output_to", location):
            delivery.put_store(store, target, cancelled)
            try:
                if is_in_image:
                    delivery.register_labels(store.parent, target.folder_fd, cancelled)
            except BaseException:
                # Retain a store that has replaced another one, because the previous store no longer exists.
                if not overwrite:
                    delivery.undo_delivery(target)
                raise

    def confirm_delivery(self, location: str, caller: str | None, ticket: str) -> None:
        """Delete the marker of a delivered result. Call this after the result has been recorded."""
        with self._open_target(location, caller, ticket) as target:
            delivery.confirm_delivery(target)

    @contextmanager
    def _open_target(
        self, location: str, caller: str | None, ticket: str = "", *, overwrite: bool = False
    ) -> Iterator[DeliveryTarget]:
        root, parts = _parse_location("output_to", location, self._outputs, caller)
        if self.find_image_format(location, caller) is not None:
            with _open_below_root("output_to", root, parts[:-2], location) as image_fd, suppress(FileExistsError):
                os.mkdir("labels", dir_fd=image_fd)
        with _open_below_root("output_to", root, parts[:-1], location) as folder_fd:
            yield DeliveryTarget(folder_fd, parts[-1], location, ticket, overwrite)


def _check_roots(kind: str, roots: Mapping[str, ReferenceFolder], mode: int) -> None:
    for name, root in roots.items():
        if not root.folder.is_dir() or not os.access(root.folder, mode):
            access = "write to" if mode & os.W_OK else "read"
            raise ConfigError(
                f"references.{kind}: {name}: {root.folder} is not a folder that this process can {access}."
            )


def _parse_location(
    parameter: str, location: str, roots: Mapping[str, ReferenceFolder], caller: str | None, *, allow_root: bool = False
) -> tuple[ReferenceFolder, list[str]]:
    """Return the root folder of a location, and the path components below it. Raises BadParameter.

    With `allow_root`, the location may be the root folder itself.
    """
    usable_roots = {name: root for name, root in roots.items() if _is_allowed(caller, root.keys)}
    if not usable_roots:
        advice = (
            "Upload the stack" if parameter == "input" else "Omit the parameter to receive the result in the response"
        )
        raise BadParameter.for_parameter(parameter, f"you may not use any folder on the host. {advice}.")
    name, *parts = location.split("/")
    if name not in usable_roots or not (parts or allow_root):
        raise BadParameter.for_parameter(
            parameter,
            f"the path must begin with one of {', '.join(usable_roots)}, such as"
            f" {next(iter(usable_roots))}/2026/stack.tif.",
        )
    if not all(map(_is_file_name, parts)):
        raise BadParameter.for_parameter(
            parameter, f"the path from {name} to the file must consist of names separated by single slashes."
        )
    return usable_roots[name], parts


def _is_allowed(caller: str | None, keys: tuple[str, ...]) -> bool:
    """Return whether a caller is in a list of key names. An empty list allows all callers."""
    return not keys or caller in keys


def _is_file_name(name: str) -> bool:
    """Return whether a component of a location is a valid name of a file or folder."""
    name_bytes = name.encode(errors="replace")
    return name not in {"", ".", ".."} and "\0" not in name and len(name_bytes) <= 255 and name_bytes.decode() == name


@contextmanager
def _open_below_root(parameter: str, root: ReferenceFolder, parts: Sequence[str], location: str) -> Iterator[int]:
    """Context manager that opens the folder with the path components `parts` below a root folder."""
    with ExitStack() as stack:
        # The root folder itself may be a link.
        with translate_host_errors(parameter, location), open_folder_by_path(root.folder) as root_fd:
            folder_fd = stack.enter_context(open_subfolder(root_fd, parts))
        yield folder_fd
