"""Generate TypeScript types from the OpenAPI schema of the service, for type checking the web UI.

The modules in `service/api/page` import these types under the name `openapi` (see `tsconfig.json`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.api.app import create_app
from service.core.config import Settings

OUTPUT_FILE = Path(__file__).parents[1] / ".cache" / "page" / "openapi.d.ts"
PRIMITIVE_TYPES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}

Schema = dict[str, Any]


def write_types(file: Path) -> None:
    """Write one interface for each JSON schema of the requests and responses."""
    schemas: dict[str, Schema] = create_app(Settings()).openapi()["components"]["schemas"]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(f"export interface {name} {to_type(schema)}" for name, schema in schemas.items()) + "\n")


def to_type(schema: Schema) -> str:
    """Return the TypeScript type of a JSON schema."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema or "oneOf" in schema:
        return " | ".join(to_type(choice) for choice in schema.get("anyOf") or schema["oneOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return array_to_type(schema)
    if schema.get("type") == "object":
        return object_to_type(schema)
    return PRIMITIVE_TYPES.get(schema.get("type", ""), "unknown")


def array_to_type(schema: Schema) -> str:
    """Return the TypeScript type of an array schema: a tuple if it has `prefixItems`, otherwise an array."""
    if "prefixItems" in schema:
        return f"[{', '.join(to_type(item) for item in schema['prefixItems'])}]"
    return f"({to_type(schema.get('items', {}))})[]"


def object_to_type(schema: Schema) -> str:
    """Return the TypeScript type of an object schema: a `Record` if it declares no properties."""
    if "properties" not in schema:
        values = schema.get("additionalProperties")
        return f"Record<string, {to_type(values) if isinstance(values, dict) else 'unknown'}>"
    properties = [
        f"  {name}{'' if is_present(schema, name) else '?'}: {to_type(value)};"
        for name, value in schema["properties"].items()
    ]
    return "\n".join(["{", *properties, "}"])


def is_present(schema: Schema, name: str) -> bool:
    """Return whether a property is present in all responses. The service includes defaults and nulls."""
    value = schema["properties"][name]
    return name in schema.get("required", []) or "default" in value or {"type": "null"} in value.get("anyOf", [])


if __name__ == "__main__":
    write_types(OUTPUT_FILE)
