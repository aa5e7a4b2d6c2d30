"""Provenance of a result: model, parameters, software and source, as it is written into the file of the result."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from service.core.files.bundled import software_version

if TYPE_CHECKING:
    from service.inference.types import Result
    from service.serving.parameters import Query


def describe_origin(query: Query, result: Result, source: str, digest: str | None) -> dict[str, str]:
    """Return facts about a result by name, without those that are not known.

    Args:
        query: the parameters that were given
        result: the segmentation, with the model and the engine that made it
        source: name of the file that was segmented
        digest: BLAKE3 of that file in hexadecimal, None where it was not read as a whole
    """
    given = query.model_dump(exclude={"model"}, exclude_none=True)
    facts = {
        "software": _software(),
        "model": result.model,
        "engine": result.engine,
        "parameters": json.dumps(given) if given else "",
        "diameter": result.width,
        "skipped": None if result.skipped is None else str(result.skipped),
        "confidence": None if result.confidence is None else f"{result.confidence:.2f}",
        "doubt": result.doubt and result.doubt.detail,
        "notes": " ".join(result.notes),
        "source": source,
        "source_blake3": digest,
    }
    return {name: fact for name, fact in facts.items() if fact}


def hash_file(path: Path) -> str | None:
    """Return BLAKE3 of a file in hexadecimal, as `b3sum` prints it; None for a folder."""
    if path.is_dir():
        return None
    # Not mapped: whoever cuts a file short meanwhile would end this process.
    with path.open("rb") as file:
        return hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]


@cache
def _software() -> str:
    return f"StackSeg {software_version()}"
