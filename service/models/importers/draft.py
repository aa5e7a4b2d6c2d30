"""A package as the keys of `model.yaml`, and reading its fields with errors that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from service.core.errors import UnsupportedPackage
from service.core.types import Array
from service.models.documents import read_document

WeightsKind = Literal["state dict", "torchscript", "exported", "onnx"]

MAX_PACKAGE_BYTES = 8 * 2**30
# More channels than a network for stacks has: a description states any number in a few bytes.
MAX_CHANNELS = 4096


class PackageTest(NamedTuple):
    """A test that a package brings: input [1, C, z, y, x], and the expected output [1, K, z, y, x]."""

    name: str
    image: Array
    expected: Array


@dataclass(frozen=True)
class Draft:
    """A package that was read, before it becomes a model folder.

    content   keys of a model file except `format` and `weights`, as far as the package states them
    weights   path of the package's weights file, and `kind` its format
    problems  statements of the package that cannot be honoured, by the key of the model file that would replace them
    notes     sentences for the operator
    missing   keys of the model file about which a format like this says nothing
    what      what the package is, in words
    """

    content: dict[str, Any]
    weights: Path
    kind: WeightsKind
    tests: tuple[PackageTest, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    what: str = "a package"


class Fields:
    """A mapping of a package whose errors name the field. Every method raises UnsupportedPackage."""

    def __init__(self, content: Any, name: str = "") -> None:
        if not isinstance(content, Mapping):
            raise UnsupportedPackage(f"{name or 'The package'}: a mapping of keys is expected.")
        self._content = content
        self._name = name

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def location(self, key: str = "") -> str:
        """Return the path of a key, such as `weights.torchscript.source`."""
        return ".".join(part for part in (self._name, key) if part)

    def as_dict(self) -> dict[str, Any]:
        """Return a copy of the mapping."""
        return dict(self._content)

    def get(self, key: str) -> Any:
        """Return a value, or None."""
        return self._content.get(key)

    def get_text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._content.get(key, default)
        if not isinstance(value, str):
            raise UnsupportedPackage(f"{self.location(key)}: a text is expected, not {value!r:.80}.")
        return value

    def get_mapping(self, key: str) -> Fields:
        """Return a mapping within this one, empty where there is none."""
        return Fields(self._content.get(key) or {}, self.location(key))

    def get_mappings(self, key: str) -> list[Fields]:
        """Return a list of mappings within this one, empty where there is none."""
        items = self._content.get(key) or []
        if not isinstance(items, list):
            raise UnsupportedPackage(f"{self.location(key)}: a list is expected, not {items!r:.80}.")
        return [Fields(item, f"{self.location(key)}[{number}]") for number, item in enumerate(items)]


@contextmanager
def collect_problem(problems: dict[str, str], key: str) -> Iterator[None]:
    """Turn UnsupportedPackage into a problem of `key`, a key of the model file that the operator can state."""
    try:
        yield
    except UnsupportedPackage as error:
        problems[key] = str(error)


def read_mapping(path: Path) -> Fields:
    """Read a JSON or YAML file. Raise UnsupportedPackage."""
    try:
        content = read_document(path)
    except (OSError, ValueError) as error:
        raise UnsupportedPackage(f"{path.name}: cannot be read: {error}") from error
    return Fields(content)


def find_file(root: Path, name: str) -> Path:
    """Return the path of a file that the package names. Raise UnsupportedPackage for one outside of `root`."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise UnsupportedPackage(f"{name}: not a file inside the package; web addresses are not followed.")
    return path


def check_channels(channels: int, where: str) -> int:
    """Return the number of channels that the field `where` states. Raise UnsupportedPackage for none or too many."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise UnsupportedPackage(f"{where}: {channels} channels; 1 to {MAX_CHANNELS} can be honoured.")
    return channels
