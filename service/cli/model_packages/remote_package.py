"""Download a model package: a zip archive, a weights file, a bioimage.io description with its files, or a name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import yaml

from service.cli.model_packages.download import Downloader, ProgressCallback, get_file_name, is_url
from service.core.errors import BadParameter, UnsupportedPackage
from service.core.files.documents import read_document

COLLECTION_URL = "https://uk1s3.embassy.ebi.ac.uk/public-datasets/bioimage.io/collection.json"
# The collection describes several hundred models.
MAX_COLLECTION_BYTES = 2**26
# Weights formats of bioimage.io in the order in which they are imported. Other formats are not downloaded.
WEIGHTS_FORMATS = ("pytorch_state_dict", "onnx", "torchscript")
MAX_FILES = 64
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"(?:doi:)?(10\.\d{4,9}/[\w./-]+)|([a-z]+(?:-[a-z]+)+)")


def is_remote(text: str) -> bool:
    """Return whether a package is a URL, or a name in the collection of bioimage.io that is not a local path."""
    return is_url(text) or (_NAME.fullmatch(text) is not None and not Path(text).exists())


@dataclass(frozen=True)
class RemotePackage:
    """A package that is not on this computer.

    location        URL, or name in the collection of bioimage.io
    sha256          expected SHA-256 of the file at the URL, or None
    collection_url  URL of the collection that contains the names
    """

    location: str
    sha256: str | None = None
    collection_url: str = COLLECTION_URL

    def download(self, folder: Path, downloader: Downloader, progress: ProgressCallback) -> Path:
        """Download the package into an empty folder and return its path. Raises the errors of `Downloader.fetch`."""
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise BadParameter(f"--sha256: expected 64 hexadecimal digits, not {self.sha256!r:.80}.")
        url, sha256 = self.location, self.sha256
        if not is_url(url):
            url, known_sha256 = self._find_in_collection(folder, downloader, progress)
            sha256 = sha256 or known_sha256
        name = get_file_name(url)
        if not name.endswith((".yaml", ".yml")):
            path = folder / name
            downloader.fetch(url, path, sha256, progress)
            return path
        root = folder / "package"
        root.mkdir()
        downloader.fetch(url, root / "rdf.yaml", sha256, progress)
        _download_files(url, root, downloader, progress)
        return root

    def _find_in_collection(
        self, folder: Path, downloader: Downloader, progress: ProgressCallback
    ) -> tuple[str, str | None]:
        """Return the URL of the description of the named model, and its SHA-256 if the collection contains it."""
        path = folder / "collection.json"
        limit = min(downloader.max_bytes, MAX_COLLECTION_BYTES)
        Downloader(limit, downloader.allow_http, downloader.timeout_seconds, downloader.pause_seconds).fetch(
            self.collection_url, path, None, progress
        )
        entries = _read_collection(path)
        wanted = self.location.removeprefix("doi:")
        for entry in entries:
            url = entry.get("rdf_source") or entry.get("source")
            if wanted in _list_names(entry) and isinstance(url, str):
                sha256 = entry.get("rdf_sha256") or entry.get("sha256")
                return urljoin(self.collection_url, url), sha256 if isinstance(sha256, str) else None
        names = sorted({name for entry in entries for name in _list_names(entry)})
        similar = ", ".join(get_close_matches(wanted, names, 3))
        raise BadParameter(
            f"The collection {self.collection_url} has no model {wanted!r}, and there is no local file of this name."
            + (f" Similar names: {similar}." if similar else "")
        )


def _read_collection(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnsupportedPackage(f"The collection is not valid JSON: {error}") from error
    entries = content.get("collection") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise UnsupportedPackage("The collection has no list of models in its key `collection`.")
    return [entry for entry in entries if isinstance(entry, dict) and entry.get("type", "model") == "model"]


def _list_names(entry: dict[str, Any]) -> list[str]:
    keys = ("id", "nickname", "concept_doi", "doi")
    return [entry[key] for key in keys if isinstance(entry.get(key), str)]


def _download_files(url: str, root: Path, downloader: Downloader, progress: ProgressCallback) -> None:
    """Download the files that the import reads. URLs in the description are replaced with the names of these files."""
    try:
        description = read_document(root / "rdf.yaml")
    except (OSError, ValueError) as error:
        raise UnsupportedPackage(f"{url} cannot be read: {error}") from error
    if not isinstance(description, dict):
        raise UnsupportedPackage(f"{url} is not a description of a model.")
    local_names: dict[str, str] = {}
    for holder, key, sha256 in _find_sources(description):
        source = holder[key]
        if source not in local_names:
            if len(local_names) == MAX_FILES:
                raise UnsupportedPackage(f"{url} names more than {MAX_FILES} files.")
            local_names[source] = name = _make_local_name(source, len(local_names))
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # Names are relative to the description, and may contain characters with a meaning in URLs.
            file_url = source if is_url(source) else urljoin(url, quote(source))
            downloader.fetch(file_url, target, sha256, progress)
        holder[key] = local_names[source]
    text = yaml.safe_dump(description, sort_keys=False, allow_unicode=True)
    (root / "rdf.yaml").write_text(text, encoding="utf-8")


def _make_local_name(source: str, number: int) -> str:
    """Return the path of a downloaded file inside the package."""
    if is_url(source):
        return f"{number}-{get_file_name(source)}"
    parts = source.split("/")
    if source.startswith("/") or {"", ".", ".."} & set(parts) or "\\" in source or ":" in source or "\0" in source:
        raise UnsupportedPackage(f"{source!r:.200} is not the name of a file next to the description.")
    if source == "rdf.yaml":
        raise UnsupportedPackage("The description names itself as one of its files.")
    return source


def _find_sources(description: dict[str, Any]) -> Iterator[tuple[Any, Any, str | None]]:
    """Yield the mapping or list, and its key or index, that names each file, and the expected SHA-256."""
    for entry in _list_entries(description):
        if isinstance(entry, dict) and isinstance(entry.get("source"), str):
            sha256 = entry.get("sha256")
            yield entry, "source", sha256 if isinstance(sha256, str) else None
    for side in ("test_inputs", "test_outputs"):
        names = _get_list(description, side)
        yield from ((names, index, None) for index, name in enumerate(names) if isinstance(name, str))


def _list_entries(description: dict[str, Any]) -> list[Any]:
    """Return the test tensors, weights and settings of StackSeg, which are mappings with a source if they are valid."""
    tensors = [*_get_list(description, "inputs"), *_get_list(description, "outputs")]
    entries = [tensor.get("test_tensor") for tensor in tensors if isinstance(tensor, dict)]
    weights = description.get("weights")
    for entry in map((weights if isinstance(weights, dict) else {}).get, WEIGHTS_FORMATS):
        entries += [entry, entry.get("external_data")] if isinstance(entry, dict) else []
    attachments = _get_list(description, "attachments")
    return entries + [a for a in attachments if isinstance(a, dict) and a.get("source") == "stackseg.yaml"]


def _get_list(description: dict[str, Any], key: str) -> list[Any]:
    """Return a list of the description, or an empty list if there is none."""
    value = description.get(key)
    return value if isinstance(value, list) else []
