"""Tests of reading model descriptions, including hostile ones that would exhaust memory or take hours to read."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from service.core.files.documents import MAX_BYTES, parse_yaml, read_document

LAUGHS = "\n".join(["a0: &a0 [lol, lol]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}*a{n - 1}]" for n in range(1, 12))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}*a{n - 1}]}}" for n in range(1, 12))])
HOSTILE_DOCUMENTS = {
    "aliases.yaml": (LAUGHS, "expands to more than"),
    "merges.yaml": (MERGES, "expands to more than"),
    "circular.yaml": ("a: &a [*a]", "expands to more than"),
    "many_circular.yaml": ("&a [" + "*a," * 200_000 + "]", "expands to more than"),
    "long.yaml": ("text: &t " + "x" * 60_000 + "\nlist: [" + "*t, " * 1000 + "]", "expands to more than"),
    "sexagesimal.yaml": ("number: " + "1:" * 100_000 + "1", "more than 65536 characters"),
    "deep.yaml": ("[" * 100_000, "nested too deeply"),
    "deep.json": ("[" * 100_000, "nested too deeply"),
    "large.yaml": (" " * (MAX_BYTES + 1), "larger than"),
    "large.json": (" " * (MAX_BYTES + 1), "larger than"),
    "digits.json": ("9" * 10_000, "Exceeds the limit"),
    "date.yaml": ("a: 2001-99-99", "month must be"),
    "object.yaml": ("!!python/object/apply:os.system ['false']", "could not determine a constructor"),
    "binary.yaml": ("a: \udcff", "can't decode"),
}


@pytest.mark.parametrize("name", HOSTILE_DOCUMENTS)
def test_hostile_documents_are_rejected_quickly(name: str, tmp_path: Path) -> None:
    text, reason = HOSTILE_DOCUMENTS[name]
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=reason):
        read_document(tmp_path / name)


def test_named_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.yaml")
    with pytest.raises(ValueError, match="not a regular file"):
        read_document(tmp_path / "model.yaml")


def test_common_yaml_features_are_supported(tmp_path: Path) -> None:
    path = tmp_path / "rdf.yaml"
    path.write_text("a: &a {x: 1, y: [2, three]}\nb: *a\nc: {<<: *a, x: 0}\nd: 2001-01-01\n")
    content = read_document(path)
    assert content["b"] == content["a"] == {"x": 1, "y": [2, "three"]}
    assert content["c"] == {"x": 0, "y": [2, "three"]}
    (tmp_path / "empty.yaml").write_text("")
    assert read_document(tmp_path / "empty.yaml") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("True", True),
        ("", None),
        ("~", None),
        ("0", 0),
        ("-12", -12),
        ("0100", "0100"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("2024-01-01", "2024-01-01"),
        ("1e9", 1e9),
        ("1.", 1.0),
        ("-.5E-3", -0.0005),
        ("-.inf", -math.inf),
        ("{<<: {a: 1}, b: 2}", {"a": 1, "b": 2}),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_yaml(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "found the key 'a' twice"),
        ("a:\n- {b: 1, b: 2}\n", "found the key 'b' twice"),
        ("[" * 5000, "nested too deeply"),
        ("9" * 5000, "digits"),
        ("a: [", "expected the node content"),
    ],
)
def test_invalid_text_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_yaml(text)


def test_model_file_with_a_repeated_key_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("name: a\nname: b\n")
    with pytest.raises(ValueError, match="found the key 'name' twice"):
        read_document(tmp_path / "model.yaml")
