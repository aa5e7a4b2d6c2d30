"""Specs of new models, as training drafts them."""

from __future__ import annotations

from typing import Any

from service.models.spec import ModelSpec
from service.training.model_folder import NEW_MODEL_CONTENT


def make_new_spec(**keys: Any) -> ModelSpec:
    """Return the spec of a new model with other values of these keys. Keys of `input` are merged."""
    content: dict[str, Any] = {
        **NEW_MODEL_CONTENT,
        "name": "mine",
        "version": "1",
        "summary": "",
        "training_data": "",
        "weights": {"sha256": "0" * 64},
        "folder": ".",
    }
    content |= keys | {"input": content["input"] | keys.get("input", {})}
    return ModelSpec.model_validate(content)
