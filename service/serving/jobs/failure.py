"""The error that ended a job, as its owner sees it and as the job store keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from service.core import errors
from service.core.errors import StackSegError
from service.core.hardware.devices import translate_error

UNEXPECTED_FAILURE = "Something went wrong in the service while the job ran; its log tells more."


def as_failure(error: BaseException) -> StackSegError:
    """Return the error as the job's owner sees it. The text of an unexpected one is left out: it may tell secrets."""
    known = translate_error(error)
    return known if isinstance(known, StackSegError) else errors.InternalError(UNEXPECTED_FAILURE)


def encode_failure(error: BaseException) -> str:
    """Encode for the column `failure`."""
    known = as_failure(error)
    facts = {
        "slug": known.slug,
        "message": str(known),
        "needed_bytes": known.needed_bytes if isinstance(known, errors.OutOfMemory) else None,
        "parameter": known.parameter,
        "suggested": known.suggested,
    }
    return json.dumps(facts)


def decode_failure(text: str | None) -> StackSegError | None:
    """Return the error with its class, so that it is answered like that of a request that waited."""
    if text is None:
        return None
    failure: Mapping[str, Any] = json.loads(text)
    classes = (kind for kind in _subclasses(StackSegError) if kind.slug == failure["slug"])
    kind = next(classes, errors.InternalError)
    if issubclass(kind, errors.OutOfMemory):
        return kind(failure["message"], failure["needed_bytes"])
    if issubclass(kind, errors.QueueFull | errors.NotReady | errors.RateLimited):
        return kind(failure["message"], 5)
    # Earlier versions have not kept these.
    return kind(failure["message"], parameter=failure.get("parameter"), suggested=failure.get("suggested"))


def _subclasses(kind: type[StackSegError]) -> Iterator[type[StackSegError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)
