"""Read untrusted YAML and JSON files with limits on their size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import yaml

# Maximum size of a file.
MAX_BYTES = 2**20
# Maximum total length of all values. Each repetition through an alias is counted.
MAX_CHARACTERS = 2**22
# Maximum length of a single value. Very long numbers are slow to parse.
MAX_SCALAR_CHARACTERS = 2**16


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


class _Loader(yaml.SafeLoader):
    """A loader of plain values, which reads Python's tuples as lists. Training programs often write tuples."""

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:python/tuple": yaml.SafeLoader.construct_yaml_seq,
    }


def _read_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
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
