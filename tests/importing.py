"""Importing packages as `stackseg models import` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.inference.preprocessing.resample import prepare_tensor
from service.models.importers import import_model as importer
from service.models.importers.import_model import Imported


def import_model(
    path: Path, models: Path, stated: Mapping[str, Any], name: str | None = None, *, trust: bool = False
) -> Imported:
    keys = {**stated, **({} if name is None else {"name": name})}
    return importer.import_model(path, models, keys, prepare=prepare_tensor, trust=trust)
