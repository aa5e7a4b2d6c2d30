"""What was understood of a package, in the words of `model.yaml`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from service.core.errors import UnsupportedPackage
from service.core.volume import Array

Kind = Literal["state dict", "torchscript", "exported", "onnx"]

TEXT_BYTES = 2**22


class Proof(NamedTuple):
    """A test of the package's own: input [1, C, z, y, x], and the expected output [1, K, z, y, x]."""

    name: str
    image: Array
    expected: Array


@dataclass(frozen=True)
class Draft:
    """A package before it is a model folder.

    content   the keys of a model file but `format` and `weights`, as far as the package says them
    weights   a file of the package, and what it is
    problems  what the package says and cannot be honoured, by the key of the model file that would settle it
    notes     what an operator should know
    """

    content: dict[str, Any]
    weights: Path
    kind: Kind
    proofs: tuple[Proof, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Fields:
    """A mapping of a package whose errors name the field. Raises UnsupportedPackage from every method."""

    def __init__(self, content: Any, name: str = "") -> None:
        if not isinstance(content, Mapping):
            raise UnsupportedPackage(f"{name or 'The package'}: a mapping of keys is expected.")
        self._content = content
        self._name = name

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def where(self, key: str = "") -> str:
        """The field as people call it: `weights.torchscript.source`."""
        return ".".join(part for part in (self._name, key) if part)

    def plain(self) -> dict[str, Any]:
        """The mapping itself."""
        return dict(self._content)

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self._content.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._content.get(key, default)
        if not isinstance(value, str):
            raise UnsupportedPackage(f"{self.where(key)}: a text is expected, not {value!r}.")
        return value

    def inner(self, key: str) -> Fields:
        """A mapping below; an empty one where there is none."""
        return Fields(self._content.get(key) or {}, self.where(key))

    def each(self, key: str) -> list[Fields]:
        """A list of mappings below; an empty one where there is none."""
        items = self._content.get(key) or []
        if not isinstance(items, list):
            raise UnsupportedPackage(f"{self.where(key)}: a list is expected, not {items!r}.")
        return [Fields(item, f"{self.where(key)}[{number}]") for number, item in enumerate(items)]


def read_mapping(path: Path) -> Fields:
    """A JSON or YAML file. Raises UnsupportedPackage."""
    try:
        if path.stat().st_size > TEXT_BYTES:
            raise UnsupportedPackage(f"{path.name}: larger than a description of a model can be.")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnsupportedPackage(f"{path.name}: cannot be read: {error}") from error
    return Fields(content)


def member(root: Path, name: str) -> Path:
    """A file that the package names, below its root. Raises UnsupportedPackage for any other place."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise UnsupportedPackage(f"{name}: not a file inside the package; web addresses are not followed.")
    return path
