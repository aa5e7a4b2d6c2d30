"""Tests of reading model descriptions, including hostile ones that would exhaust memory or take hours to read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.models.documents import MAX_BYTES, read_document

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
