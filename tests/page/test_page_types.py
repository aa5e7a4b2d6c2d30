"""Tests of the TypeScript types that are used to check the modules of the web UI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.page_types import to_type, write_types


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "number"),
        ({"type": "string", "enum": ["a", "b"]}, '"a" | "b"'),
        ({"anyOf": [{"$ref": "#/components/schemas/Input"}, {"type": "null"}]}, "Input | null"),
        ({"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "(string | null)[]"),
        ({"type": "array", "prefixItems": [{"type": "number"}, {"type": "boolean"}]}, "[number, boolean]"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "Record<string, number>"),
        ({"type": "object", "additionalProperties": True}, "Record<string, unknown>"),
        ({}, "unknown"),
    ],
)
def test_schema_is_converted_to_typescript_type(schema: dict[str, Any], expected: str) -> None:
    assert to_type(schema) == expected


def test_properties_without_value_or_default_are_optional() -> None:
    string, null = {"type": "string"}, {"type": "null"}
    properties = {"a": string, "b": string, "c": string | {"default": ""}, "d": {"anyOf": [string, null]}}
    interface = to_type({"type": "object", "properties": properties, "required": ["a"]})
    assert re.findall(r"(\w\??):", interface) == ["a", "b?", "c", "d"]


def test_every_type_imported_by_the_web_ui_is_written(tmp_path: Path) -> None:
    write_types(file := tmp_path / "page" / "openapi.d.ts")
    written_types = set(re.findall(r"export interface (\w+) \{", file.read_text(encoding="utf-8")))
    modules = Path(__file__).parents[2] / "service" / "api" / "page"
    imported_types = {
        name
        for module in modules.rglob("*.js")
        for name in re.findall(r'import\("openapi"\)\.(\w+)', module.read_text(encoding="utf-8"))
    }
    assert imported_types <= written_types
    assert {"JobReport", "Status", "AnnotationReport"} <= imported_types
