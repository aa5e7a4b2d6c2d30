"""The provenance that is written to result files: model, parameters, software and source."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from service.core.files.bundled import get_software_version

if TYPE_CHECKING:
    from service.inference.types import Result
    from service.serving.parameters import Query


def describe_provenance(query: Query, result: Result, source: str, digest: str | None) -> dict[str, str]:
    """Return the provenance of a result as a mapping of names to values. Unknown values are omitted.

    Args:
        query: the parameters of the request
        result: the result of the segmentation, including the model and the engine
        source: name of the segmented file
        digest: BLAKE3 hash of the file in hexadecimal; None if the file was not read completely
    """
    parameters = query.model_dump(exclude={"model"}, exclude_none=True)
    fields = {
        "software": _get_software_name(),
        "model": result.model,
        "engine": result.engine,
        "parameters": json.dumps(parameters) if parameters else "",
        "diameter": result.diameter_text,
        "skipped": None if result.skipped is None else str(result.skipped),
        "confidence": None if result.confidence is None else f"{result.confidence:.2f}",
        "doubt": result.quality_warning and result.quality_warning.detail,
        "notes": " ".join(result.notes),
        "source": source,
        "source_blake3": digest,
    }
    return {name: value for name, value in fields.items() if value}


def hash_file(path: Path) -> str | None:
    """Return the BLAKE3 hash of a file in hexadecimal, as `b3sum` prints it, or None for a folder."""
    if path.is_dir():
        return None
    # Do not memory-map the file, because truncation of a mapped file would kill this process.
    with path.open("rb") as file:
        return hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]


@cache
def _get_software_name() -> str:
    return f"StackSeg {get_software_version()}"
