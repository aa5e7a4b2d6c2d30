"""Read untrusted YAML and JSON files with limits on their size, and YAML settings that people write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

# Maximum size of a file.
MAX_BYTES = 2**20
# Maximum total length of all values. Each repetition through an alias is counted.
MAX_CHARACTERS = 2**22
# Maximum length of a single value. Very long numbers are slow to parse.
MAX_SCALAR_CHARACTERS = 2**16
# Values of YAML 1.2 by the characters that they begin with. PyYAML follows YAML 1.1, in which `off` is false, `0100` is
# 64, `1:30` is 90, and `1e9` is text.
_PLAIN_VALUES = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


def read_document(path: Path) -> Any:
    """Read a file as JSON if its suffix is `.json`, otherwise as YAML.

    Raises OSError if the file cannot be opened, or ValueError if it is invalid or exceeds a limit.
    """
    if path.exists() and not path.is_file():
        raise ValueError("the path is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"the file is larger than the limit of {MAX_BYTES} bytes")
    text = content.decode("utf-8")
    try:
        return json.loads(text) if path.suffix == ".json" else _read_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("the content is nested too deeply") from error


class _DocumentLoader(yaml.SafeLoader):
    """A loader of plain values, which reads Python's tuples as lists. Training programs often write tuples."""

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:python/tuple": yaml.SafeLoader.construct_yaml_seq,
    }


class _SettingsLoader(yaml.SafeLoader):
    """A loader of the plain values of YAML 1.2."""


_SettingsLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first_characters in _PLAIN_VALUES:
    _SettingsLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first_characters)
    )


def parse_yaml(text: str) -> Any:
    """Parse trusted YAML. Raises ValueError if it is invalid or contains a key twice."""
    loader = None
    try:
        loader = _SettingsLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_unique_keys(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("the content is nested too deeply") from error
    finally:
        if loader is not None:
            loader.dispose()


def _read_yaml(text: str) -> Any:
    loader = _DocumentLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        _check_unique_keys(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: yaml.Node) -> None:
    """Raise ValueError if the values are too large after aliases are expanded. Nested aliases could exhaust memory."""
    nodes, num_characters = [node], 0
    while nodes:
        node = nodes.pop()
        # Count the characters of a string, or the entries of a list or mapping, which may contain itself through an
        # alias.
        num_characters += 1 + len(node.value)
        if num_characters > MAX_CHARACTERS:
            raise ValueError(f"the content expands to more than {MAX_CHARACTERS} characters")
        if isinstance(node, yaml.ScalarNode):
            if len(node.value) > MAX_SCALAR_CHARACTERS:
                raise ValueError(f"the file contains a value of more than {MAX_SCALAR_CHARACTERS} characters")
        elif isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            nodes.extend(item for pair in node.value for item in pair)


def _check_unique_keys(root: yaml.Node) -> None:
    """Raise `yaml.YAMLError` if a mapping contains a key twice. PyYAML would ignore all values except the last."""
    nodes, visited = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in visited or not isinstance(node, yaml.CollectionNode):
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)
            continue
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            nodes += (key, value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"found the key {key.value!r} twice in one mapping; merge the two entries",
                    problem_mark=key.start_mark,
                )
            keys.add((key.tag, key.value))
