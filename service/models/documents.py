"""YAML and JSON of others -> plain values, whose size is known before they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 2**20
# Characters of all values, those that aliases repeat included.
MAX_CHARACTERS = 2**22
# A longer number takes long to read.
MAX_SCALAR = 2**16


def read_document(path: Path) -> Any:
    """Read a JSON or YAML file, by its suffix. Raise OSError or ValueError, saying why it cannot be read."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes, which no description of a model is")
    text = data.decode("utf-8")
    try:
        return json.loads(text) if path.suffix == ".json" else _read_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _read_yaml(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: yaml.Node) -> None:
    """Raise ValueError where values are too large, aliases written out: a few nested ones would fill any memory."""
    nodes, characters = [node], 0
    while nodes:
        node = nodes.pop()
        # Characters of a text, or entries of a list or mapping, which may be one of its own entries.
        characters += 1 + len(node.value)
        if characters > MAX_CHARACTERS:
            raise ValueError(f"its aliases repeat more than {MAX_CHARACTERS} characters")
        if isinstance(node, yaml.ScalarNode):
            if len(node.value) > MAX_SCALAR:
                raise ValueError(f"a value has more than {MAX_SCALAR} characters")
        elif isinstance(node, yaml.SequenceNode):
            nodes.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            nodes.extend(each for pair in node.value for each in pair)
