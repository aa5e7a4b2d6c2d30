"""Validate the manifests that `kubectl kustomize` renders from docker/kubernetes, for each combination of components.

`make manifests` runs this script. The arguments are files with CustomResourceDefinitions, such as KubeRay's
ray.io_rayclusters.yaml. Custom resources without a definition are listed, but not validated.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

MANIFESTS = Path(__file__).resolve().parents[1] / "docker" / "kubernetes"
COMPONENT_SETS = ([], ["gpu"], ["monitoring"], ["gpu", "monitoring"], ["ray"], ["ray", "monitoring"])
KUBERNETES_VERSION = "1.37"


def main() -> int:
    """Validate all combinations of components; return 1 if a resource is invalid, otherwise 0."""
    schemas = dict(read_schemas(Path(name) for name in sys.argv[1:]))
    failures = [has_invalid_resource(components, schemas) for components in COMPONENT_SETS]
    return int(any(failures))


def read_schemas(files: Iterator[Path]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield `((apiVersion, kind), schema)` for each version in files of CustomResourceDefinitions."""
    for file in files:
        spec = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            schema = forbid_unknown_fields(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {}
            yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), schema


def forbid_unknown_fields(schema: Any) -> Any:
    """Return a copy of a schema that rejects unknown fields, like `kubectl apply --validate=strict`."""
    if isinstance(schema, list):
        return [forbid_unknown_fields(item) for item in schema]
    if not isinstance(schema, dict) or schema.get("x-kubernetes-int-or-string"):
        return {} if isinstance(schema, dict) else schema
    strict = {key: forbid_unknown_fields(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def has_invalid_resource(components: list[str], schemas: dict[tuple[str, str], Any]) -> bool:
    """Validate the resources of these components, print the result, and return whether one of them is invalid."""
    is_invalid, unchecked, documents = False, [], list(render(components))
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        key = document["apiVersion"], document["kind"]
        try:
            if key in schemas:
                jsonschema.Draft7Validator(schemas[key]).validate(document)
            else:
                kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unchecked.append(name)
        except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
            is_invalid = True
            sys.stderr.write(f"{components}: {name}: {'.'.join(map(str, error.path))}: {error.message}\n")
    note = f", not validated: {', '.join(unchecked)}" if unchecked else ""
    sys.stdout.write(f"{'+'.join(['base', *components])}: {len(documents)} resources{note}\n")
    return is_invalid


def render(components: list[str]) -> Iterator[Any]:
    """Yield the resources that `kubectl kustomize` renders with these components."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(MANIFESTS, Path(folder) / "kubernetes")
        kustomization = copy / "kustomization.yaml"
        kustomization.write_text(yaml.safe_dump(yaml.safe_load(kustomization.read_text()) | {"components": components}))
        command = ["kubectl", "kustomize", copy]
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - fixed command
    yield from yaml.safe_load_all(process.stdout)


if __name__ == "__main__":
    sys.exit(main())
