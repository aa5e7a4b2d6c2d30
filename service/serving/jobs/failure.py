"""The error that ended a job, as shown to its owner and as stored in the job database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from service.core import errors
from service.core.errors import StackSegError
from service.core.hardware.devices import translate_error

UNEXPECTED_FAILURE = "An internal error occurred while the job was running. See the log of the service."


def to_public_error(error: BaseException) -> StackSegError:
    """Return the error as shown to the job's owner. The text of unexpected errors may contain secrets, so omit it."""
    translated = translate_error(error)
    return translated if isinstance(translated, StackSegError) else errors.InternalError(UNEXPECTED_FAILURE)


def encode_failure(error: BaseException) -> str:
    """Encode an error as JSON for the column `failure`."""
    public_error = to_public_error(error)
    members = {
        "slug": public_error.slug,
        "message": str(public_error),
        "needed_bytes": public_error.needed_bytes if isinstance(public_error, errors.OutOfMemory) else None,
        "parameter": public_error.parameter,
        "suggested": public_error.suggested,
    }
    return json.dumps(members)


def decode_failure(text: str | None) -> StackSegError | None:
    """Decode an error with its class, so that the API reports it like the error of a synchronous request."""
    if text is None:
        return None
    failure: Mapping[str, Any] = json.loads(text)
    classes = (kind for kind in _subclasses(StackSegError) if kind.slug == failure["slug"])
    kind = next(classes, errors.InternalError)
    if issubclass(kind, errors.OutOfMemory):
        return kind(failure["message"], failure["needed_bytes"])
    if issubclass(kind, errors.QueueFull | errors.NotReady | errors.RateLimited):
        return kind(failure["message"], 5)
    # Rows of earlier versions lack these members.
    return kind(failure["message"], parameter=failure.get("parameter"), suggested=failure.get("suggested"))


def _subclasses(kind: type[StackSegError]) -> Iterator[type[StackSegError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)
