"""Write the types of the service's answers for the type check of the web UI, from its OpenAPI document.

The modules in `service/api/page` import them by the name `openapi`, see `tsconfig.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.api.app import create_app
from service.core.config import Settings

FILE = Path(__file__).parents[1] / ".cache" / "page" / "openapi.d.ts"
NAMES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}

Schema = dict[str, Any]


def write_types(file: Path) -> None:
    """Write one interface for each JSON document that the service sends or accepts."""
    schemas: dict[str, Schema] = create_app(Settings()).openapi()["components"]["schemas"]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(f"export interface {name} {describe(schema)}" for name, schema in schemas.items()) + "\n")


def describe(schema: Schema) -> str:
    """Return the TypeScript type of values that fit a JSON schema."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema or "oneOf" in schema:
        return " | ".join(describe(choice) for choice in schema.get("anyOf") or schema["oneOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return describe_array(schema)
    if schema.get("type") == "object":
        return describe_object(schema)
    return NAMES.get(schema.get("type", ""), "unknown")


def describe_array(schema: Schema) -> str:
    """Return the type of an array of any length, or of a tuple."""
    if "prefixItems" in schema:
        return f"[{', '.join(describe(item) for item in schema['prefixItems'])}]"
    return f"({describe(schema.get('items', {}))})[]"


def describe_object(schema: Schema) -> str:
    """Return the type of an object with these properties, or with any names."""
    if "properties" not in schema:
        more = schema.get("additionalProperties")
        return f"Record<string, {describe(more) if isinstance(more, dict) else 'unknown'}>"
    properties = [
        f"  {name}{'' if is_present(schema, name) else '?'}: {describe(value)};"
        for name, value in schema["properties"].items()
    ]
    return "\n".join(["{", *properties, "}"])


def is_present(schema: Schema, name: str) -> bool:
    """Return whether answers always have a property: the service also sends default values, null included."""
    value = schema["properties"][name]
    return name in schema.get("required", []) or "default" in value or {"type": "null"} in value.get("anyOf", [])


if __name__ == "__main__":
    write_types(FILE)
