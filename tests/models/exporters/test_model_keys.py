"""Tests of the model keys inside exported files. These files are untrusted when they are imported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.core.errors import UnsupportedPackage
from service.core.files.documents import MAX_BYTES
from service.models.exporters.model_keys import make_model_keys, parse_model_keys
from service.models.spec import ModelSpec


def test_keys_are_restored_from_json(random_nuclei: ModelSpec) -> None:
    keys = make_model_keys(random_nuclei)
    restored_keys = parse_model_keys(json.dumps(keys), "file")
    entry = {"weights": random_nuclei.weights, "architecture": random_nuclei.architecture}
    spec = ModelSpec.model_validate({**restored_keys, **entry, "folder": random_nuclei.folder})
    assert spec == random_nuclei


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, r"file\.format"),
        ({"weights": {"kind": "torchscript", "trusted": True}}, r"file\.weights: this key cannot be specified"),
        ({"architecture": {"name": "UNet"}}, r"file\.architecture"),
        ({"folder": "/etc"}, r"file\.folder"),
        ({"input": [1]}, r"file\.input: expected a mapping"),
    ],
)
def test_invalid_keys_are_rejected(random_nuclei: ModelSpec, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedPackage, match=message):
        parse_model_keys(json.dumps(make_model_keys(random_nuclei) | change), "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", r"file\.format"),
        ('{"format": 1, "input": {}}', r"file\.name: the key is missing"),
        (" " * (MAX_BYTES + 1), "larger than the limit"),
    ],
)
def test_damaged_text_is_rejected(text: str, message: str) -> None:
    with pytest.raises(UnsupportedPackage, match=message):
        parse_model_keys(text, "file")
