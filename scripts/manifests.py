"""Check what `kubectl kustomize` makes of docker/kubernetes, with every choice of components.

Run by `make manifests`. Arguments are files of CustomResourceDefinitions, such as KubeRay's ray.io_rayclusters.yaml,
for resources that Kubernetes itself does not know; those without one are named, and not checked.
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
CHOICES = ([], ["gpu"], ["monitoring"], ["gpu", "monitoring"], ["ray"], ["ray", "monitoring"])
VERSION = "1.37"


def main() -> int:
    """Check all choices; return 1 if a resource is not valid."""
    schemas = dict(read_schemas(Path(name) for name in sys.argv[1:]))
    faulty = [check(choice, schemas) for choice in CHOICES]
    return int(any(faulty))


def read_schemas(files: Iterator[Path]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the schema of each version of each kind, by its API version and kind."""
    for file in files:
        spec = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            schema = refuse_unknown(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {}
            yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), schema


def refuse_unknown(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [refuse_unknown(each) for each in schema]
    if not isinstance(schema, dict) or schema.get("x-kubernetes-int-or-string"):
        return {} if isinstance(schema, dict) else schema
    strict = {key: refuse_unknown(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def check(components: list[str], schemas: dict[tuple[str, str], Any]) -> bool:
    """Return whether a resource of these components is not valid, after saying so."""
    faulty, unknown, documents = False, [], list(build(components))
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        key = document["apiVersion"], document["kind"]
        try:
            if key in schemas:
                jsonschema.Draft7Validator(schemas[key]).validate(document)
            else:
                kubernetes_validate.validate(document, VERSION, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.append(name)
        except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
            faulty = True
            sys.stderr.write(f"{components}: {name}: {'.'.join(map(str, error.path))}: {error.message}\n")
    told = f", not checked: {', '.join(unknown)}" if unknown else ""
    sys.stdout.write(f"{'+'.join(['base', *components])}: {len(documents)} resources{told}\n")
    return faulty


def build(components: list[str]) -> Iterator[Any]:
    """Yield the resources."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(MANIFESTS, Path(folder) / "kubernetes")
        top = copy / "kustomization.yaml"
        top.write_text(yaml.safe_dump(yaml.safe_load(top.read_text()) | {"components": components}))
        command = ["kubectl", "kustomize", copy]
        made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
    yield from yaml.safe_load_all(made.stdout)


if __name__ == "__main__":
    sys.exit(main())
