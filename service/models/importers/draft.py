"""The content of a package as keys of `model.yaml`, and a reader of package fields whose errors name the field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from service.core.errors import UnsupportedPackage
from service.core.files.documents import read_document
from service.core.types import Array
from service.models.spec import DOI_PATTERN, URL_PATTERN

WeightsKind = Literal["state dict", "torchscript", "exported", "onnx"]

MAX_PACKAGE_BYTES = 8 * 2**30
# Maximum number of channels. It limits the memory that an untrusted description can request.
MAX_CHANNELS = 4096
# Maximum number of authors and of citations, and maximum length of each.
MAX_CREDITS = 100
MAX_CREDIT_LENGTH = 1000


class PackageTest(NamedTuple):
    """A test from a package: the input [1, C, z, y, x] and the expected output [1, K, z, y, x].

    is_normalized  whether the input has already been normalized
    """

    name: str
    image: Array
    expected_output: Array
    is_normalized: bool = False


@dataclass(frozen=True)
class Draft:
    """The content of a package before it becomes a model folder.

    content       keys of a model file that the package specifies, except `format` and `weights`
    weights_path  path of the weights file
    kind          kind of the weights file
    tests         tests that the package contains
    problems      descriptions of unsupported settings of the package, by the model key that can replace the setting
    notes         sentences for the operator
    missing_keys  keys of the model file that the format of the package cannot specify
    description   phrase that describes the package
    picture       PNG file that shows what the model segments; None if there is none
    tensors       tensors of a state dict; None to read them from `weights_path`
    """

    content: dict[str, Any]
    weights_path: Path
    kind: WeightsKind
    tests: tuple[PackageTest, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing_keys: tuple[str, ...] = ()
    description: str = "a package"
    picture: Path | None = None
    tensors: Mapping[str, Tensor] | None = None


class Fields:
    """A mapping in a package. Its methods raise UnsupportedPackage with the path of the invalid field."""

    def __init__(self, content: Any, location: str = "") -> None:
        if not isinstance(content, Mapping):
            raise UnsupportedPackage(f"{location or 'The package'}: expected a mapping of keys.")
        self._content = content
        self._location = location

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def locate(self, key: str = "") -> str:
        """Return the path of a key, such as `weights.torchscript.source`."""
        return ".".join(part for part in (self._location, key) if part)

    def as_dict(self) -> dict[str, Any]:
        """Return a copy of the mapping."""
        return dict(self._content)

    def get(self, key: str) -> Any:
        """Return a value, or None if the key is missing."""
        return self._content.get(key)

    def get_string(self, key: str, default: str | None = None) -> str:
        """Return a string, or `default` if the key is missing."""
        value = self._content.get(key, default)
        if not isinstance(value, str):
            raise UnsupportedPackage(f"{self.locate(key)}: expected a string, not {value!r:.80}.")
        return value

    def get_mapping(self, key: str) -> Fields:
        """Return a nested mapping, which is empty if the key is missing."""
        return Fields(self._content.get(key) or {}, self.locate(key))

    def get_mappings(self, key: str) -> list[Fields]:
        """Return a list of nested mappings, which is empty if the key is missing."""
        items = self._content.get(key) or []
        if not isinstance(items, list):
            raise UnsupportedPackage(f"{self.locate(key)}: expected a list, not {items!r:.80}.")
        return [Fields(item, f"{self.locate(key)}[{index}]") for index, item in enumerate(items)]


def read_credits(authors: Any, citations: Any) -> dict[str, Any]:
    """Return the keys `authors` and `cite` for the lists in a package. Entries without a name or a text are omitted.

    authors    names, or mappings with the key `name`
    citations  texts, or mappings with the keys `text` and optionally `doi` and `url`
    """
    names = [_clean(entry.get("name") if isinstance(entry, Mapping) else entry) for entry in _as_list(authors)]
    references = [entry if isinstance(entry, Mapping) else {"text": entry} for entry in _as_list(citations)]
    cite = [_make_citation(reference) for reference in references]
    content: dict[str, list[Any]] = {
        "authors": list(filter(None, names)),
        "cite": [citation for citation in cite if citation["text"]],
    }
    return {key: entries[:MAX_CREDITS] for key, entries in content.items() if entries}


def _make_citation(reference: Mapping[Any, Any]) -> dict[str, str]:
    """Return an entry of the key `cite`, without a DOI or an address that is not valid."""
    doi = re.sub(r"^https?://(dx\.)?doi\.org/", "", _clean(reference.get("doi")))
    url = _clean(reference.get("url"))
    citation = {"text": _clean(reference.get("text")) or doi or url}
    if re.fullmatch(DOI_PATTERN, doi):
        citation["doi"] = doi
    if re.fullmatch(URL_PATTERN, url):
        citation["url"] = url
    return citation


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _clean(value: Any) -> str:
    """Return the printable text of a value in one line; "" if the value is not a string or a number."""
    if not isinstance(value, str | int | float):
        return ""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\s]+", " ", str(value)).strip()[:MAX_CREDIT_LENGTH]


@contextmanager
def collect_problem(problems: dict[str, str], key: str) -> Iterator[None]:
    """Catch UnsupportedPackage, and record it as a problem with `key`, a model key that the operator can specify."""
    try:
        yield
    except UnsupportedPackage as error:
        problems[key] = str(error)


def read_mapping(path: Path) -> Fields:
    """Read a JSON or YAML file. Raises UnsupportedPackage."""
    try:
        content = read_document(path)
    except (OSError, ValueError) as error:
        raise UnsupportedPackage(f"{path.name} cannot be read: {error}") from error
    return Fields(content)


def find_file(root: Path, name: str) -> Path:
    """Return the path of a file in the package. Raises UnsupportedPackage if it is missing or outside `root`."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise UnsupportedPackage(f"{name} is not a file inside the package. Files are not downloaded from URLs.")
    return path


def check_channel_count(channel_count: int, location: str) -> int:
    """Return `channel_count`. Raises UnsupportedPackage, with `location`, if it is out of range."""
    if not 1 <= channel_count <= MAX_CHANNELS:
        raise UnsupportedPackage(f"{location}: found {channel_count} channels; 1 to {MAX_CHANNELS} are supported.")
    return channel_count
