"""The error of a failed job, as shown to the owner of the job and as stored in the job database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from service.core import errors
from service.core.errors import StackSegError
from service.core.hardware.devices import translate_error

UNEXPECTED_FAILURE_MESSAGE = "An internal error occurred while the job was running. See the log of the service."


def to_public_error(error: BaseException) -> StackSegError:
    """Return the error as shown to the owner of the job. Hide unexpected errors, whose messages may contain secrets."""
    translated_error = translate_error(error)
    return (
        translated_error
        if isinstance(translated_error, StackSegError)
        else errors.InternalError(UNEXPECTED_FAILURE_MESSAGE)
    )


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


def decode_failure(encoded_failure: str | None) -> StackSegError | None:
    """Restore an error with its original class, so that the API reports it like the error of a synchronous request."""
    if encoded_failure is None:
        return None
    failure: Mapping[str, Any] = json.loads(encoded_failure)
    classes = (error_class for error_class in _iterate_subclasses(StackSegError) if error_class.slug == failure["slug"])
    error_class = next(classes, errors.InternalError)
    if issubclass(error_class, errors.OutOfMemory):
        return error_class(failure["message"], failure["needed_bytes"])
    if issubclass(error_class, errors.QueueFull | errors.NotReady | errors.RateLimited):
        return error_class(failure["message"], 5)
    # Failures stored by earlier versions lack these members.
    return error_class(failure["message"], parameter=failure.get("parameter"), suggested=failure.get("suggested"))


def _iterate_subclasses(error_class: type[StackSegError]) -> Iterator[type[StackSegError]]:
    yield error_class
    for subclass in error_class.__subclasses__():
        yield from _iterate_subclasses(subclass)
