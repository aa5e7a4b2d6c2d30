"""Keys of `model.yaml` inside an exported file, from which an import restores the model.

Neither bioimage.io's descriptions nor ONNX and torch.export files can describe how labels are computed from scores.
Therefore, the keys are stored in the field `config.stackseg` of a description, in the metadata property `stackseg` of
an ONNX file, or in the extra file `stackseg.json` of a torch.export file.
"""

from __future__ import annotations

import json
from typing import Any

from service.core.errors import UnsupportedPackage
from service.core.files.documents import MAX_BYTES
from service.models.spec import ModelSpec

NAME = "stackseg"
FILE_NAME = f"{NAME}.json"
KEYS = ("name", "version", "summary", "licence", "training_data", "input", "outputs", "activation", "decoding")
OPTIONAL_KEYS = ("authors", "cite", "confidence")


def make_model_keys(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of a model file that describe how the network is used, as plain values for JSON or YAML."""
    keys = spec.model_dump(mode="json", include={*KEYS, *OPTIONAL_KEYS}, exclude_none=True)
    return {"format": spec.format, **{key: value for key, value in keys.items() if key in KEYS or value}}


def read_model_keys(content: Any, location: str) -> dict[str, Any]:
    """Return the stored keys without `format`. Their values are not checked.

    `location` is the name of the field for errors. Raises UnsupportedPackage if a key is missing or unknown.
    """
    if not isinstance(content, dict) or content.get("format") != 1:
        raise UnsupportedPackage(f"{location}.format: expected the keys of a model in format 1.")
    keys = {key: value for key, value in content.items() if key != "format"}
    for key in keys:
        if key not in {*KEYS, *OPTIONAL_KEYS}:
            raise UnsupportedPackage(f"{location}.{key}: this key cannot be specified in an exported model.")
    for key in KEYS:
        if key not in keys:
            raise UnsupportedPackage(f"{location}.{key}: the key is missing.")
    if not isinstance(keys["input"], dict):
        raise UnsupportedPackage(f"{location}.input: expected a mapping of keys.")
    return keys


def parse_model_keys(text: str | bytes, location: str) -> dict[str, Any]:
    """Return the keys that are stored as JSON. Raises UnsupportedPackage."""
    if len(text) > MAX_BYTES:
        raise UnsupportedPackage(f"{location}: the text is larger than the limit of {MAX_BYTES} bytes.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedPackage(f"{location}: the text cannot be read as JSON: {error}") from error
    return read_model_keys(content, location)
