"""Every error that StackSeg raises on purpose.

StackSegError
|-- RequestError            the caller's fault: change the request
|   |-- BadFile             unreadable, truncated or inconsistent file
|   |-- AmbiguousAxes       the file does not say which axis is which
|   |-- BadParameter        a parameter out of range, or at odds with the file or the model
|   |-- DoubtfulResult      labels that the model is not sure of, where the caller asked to refuse them
|   |-- UnsupportedMedia    not a TIFF at all
|   |-- TooLarge            more bytes than the operator allows, encoded or decoded
|   |-- TooSlow             a body that comes too slowly
|   |-- OutputExists        a file that was named for the result is there already
|   |-- UnknownModel        no model of that name
|   |-- Unauthorized        no API key, one that is not known, or one that may not do this
|   |-- Misdirected         meant for a host that this service is not
|   |-- UnknownJob          no job of that id, or not this caller's
|   |-- UnknownStack        no kept stack of that id, or not this caller's
|   |-- UnknownAnnotation   no annotated stack of that id, or not this caller's
|   |-- UnknownTraining     no training of that id, or not this caller's
|   |-- SwitchedOff         something that the operator has switched off, or not installed
|   |-- ModelKept           a model that is in use and cannot be deleted now, or that no training has made
|   |-- NotFinished         the result of a job that still waits or runs
|   `-- ResultGone          the result of a job that was cancelled, or whose result had to make room
|-- CapacityError           nobody's fault: the same request may succeed later
|   |-- QueueFull           too many requests are waiting
|   |-- RateLimited         the caller's key has been used too often, or for too much at a time
|   |-- NotReady            a model is still being loaded or warmed up, or the service is stopping
|   |-- StorageUnavailable  the folder of jobs, its database, the scratch folder or a store elsewhere cannot be used
|   |-- DeviceLost          the device has failed for good; a new process may find it well
|   |-- TimedOut            not finished within the time that the operator allows for a request
|   |-- OutOfStorage        the folder for uploads or jobs is full
|   |-- OutOfMemory         the volume does not fit after every fallback
|   |-- ReaderKilled        the process that read the file was killed, mostly for lack of memory
|   `-- Interrupted         the process died too often while a job ran
|-- ModelError              the operator's fault
|   |-- BrokenModel         model folder incomplete, inconsistent, or weights that do not match
|   |-- NonFiniteScores     the network returned NaN or infinity
|   `-- UnsupportedPackage  a model from elsewhere that cannot be imported as it is; raised at the command line only
|       `-- MissingKeys     one that does not say all that a model file needs
|-- InternalError           a fault of the service itself that ended a job
|-- ConfigError             a configuration key or value that is not understood; raised at start-up only
`-- Cancelled               the caller went away; never answered, only logged

A message is one or two sentences for the person who can act on it: what was found, and what to do.
`slug` is the stable last part of the problem type that clients may match on.
HTTP status codes are not known here; `service.api.messages.problems` has the one table.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class StackSegError(Exception):
    """Root of the tree, never raised itself.

    parameter  name of the request parameter that the error is about, the first of several; None if it is about none
    suggested  values to try, by parameter, in the form in which a request states them.
    """

    slug: ClassVar[str] = "error"

    def __init__(
        self, message: str, *, parameter: str | None = None, suggested: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.parameter, self.suggested = parameter, dict(suggested or {})


class RequestError(StackSegError):
    """The caller can correct the request."""

    slug = "bad-request"

    @classmethod
    def about(cls, parameter: str, problem: str, suggested: Mapping[str, str] | None = None) -> Self:
        """Return an error about a request parameter, whose name its message begins with."""
        return cls(f"{parameter}: {problem}", parameter=parameter, suggested=suggested)


class BadFile(RequestError):
    """The file cannot be read, is cut short, or contradicts itself."""

    slug = "bad-file"


class AmbiguousAxes(RequestError):
    """The meaning of the file's axes is not stated and is not guessed."""

    slug = "ambiguous-axes"


class BadParameter(RequestError):
    """A parameter is malformed, out of its limits, or does not fit the file or the model."""

    slug = "bad-parameter"


class DoubtfulResult(RequestError):
    """The labels look wrong, and the caller asked to have no doubtful ones."""

    slug = "doubtful-result"


class UnsupportedMedia(RequestError):
    """The body is not a kind of file that this service reads."""

    slug = "unsupported-media"


class TooLarge(RequestError):
    """The upload or the decoded volume exceeds what the operator allows."""

    slug = "too-large"


class TooSlow(RequestError):
    """The head or the body of the request comes more slowly than the operator allows."""

    slug = "too-slow"


class OutputExists(RequestError):
    """The file that was named for the result exists, and the request does not say that it may be replaced."""

    slug = "output-exists"


class UnknownModel(RequestError):
    """No model of that name is served."""

    slug = "unknown-model"


class Unauthorized(RequestError):
    """The request shows no API key that is known here and may do this."""

    slug = "unauthorized"


class Misdirected(RequestError):
    """The Host header names a host that this service does not answer for."""

    slug = "misdirected"


class UnknownJob(RequestError):
    """No job of that id, or it is somebody else's."""

    slug = "unknown-job"


class UnknownStack(RequestError):
    """No stack of that id is kept, or it is somebody else's."""

    slug = "unknown-stack"


class UnknownAnnotation(RequestError):
    """No annotated stack of that id is kept, or it is somebody else's."""

    slug = "unknown-annotation"


class UnknownTraining(RequestError):
    """No training of that id, or it is somebody else's."""

    slug = "unknown-training"


class SwitchedOff(RequestError):
    """The operator has switched this off, or has not installed what it needs."""

    slug = "switched-off"


class ModelKept(RequestError):
    """The model cannot be deleted: a job or a training needs it, it is the default one, or no training has made it."""

    slug = "model-kept"


class NotFinished(RequestError):
    """The job still waits or runs; its result can be had once its state is done."""

    slug = "not-finished"


class ResultGone(RequestError):
    """The job was cancelled, or its result was deleted to make room for newer ones."""

    slug = "result-gone"


class CapacityError(StackSegError):
    """The service cannot answer the request now."""

    slug = "capacity"


class QueueFull(CapacityError):
    """More requests wait than the operator allows; try again after `retry_after` seconds."""

    slug = "queue-full"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(CapacityError):
    """The API key has been used as much as the operator allows; try again after `retry_after` seconds."""

    slug = "rate-limited"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotReady(CapacityError):
    """The service is starting or stopping; try again after `retry_after` seconds."""

    slug = "not-ready"

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageUnavailable(CapacityError):
    """A folder of the service, the database of jobs or a store elsewhere cannot be used now.

    Try again after `retry_after` seconds.
    """

    slug = "storage-unavailable"
    retry_after = 5


class DeviceLost(CapacityError):
    """The device has failed; try again after `retry_after` seconds, when the service has been started anew."""

    slug = "device-lost"
    retry_after = 60


class TimedOut(CapacityError):
    """The request took longer than the operator allows, waiting included."""

    slug = "timed-out"


class OutOfStorage(CapacityError):
    """The disk that holds uploads, decoded pixels and jobs is full, or the jobs' share of it."""

    slug = "out-of-storage"


class OutOfMemory(CapacityError):
    """Not enough memory, with every fallback tried; `needed_bytes` would have been enough, None: not known."""

    slug = "out-of-memory"

    def __init__(self, message: str, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class ReaderKilled(CapacityError):
    """The process that read the file was killed, and so was the one that tried again; memory is the likely reason."""

    slug = "reader-killed"


class Interrupted(CapacityError):
    """The process died more often than the operator allows while this job ran; memory is the likely reason."""

    slug = "interrupted"


class ModelError(StackSegError):
    """The operator must look at the model."""

    slug = "model-error"


class BrokenModel(ModelError):
    """The model folder is incomplete or contradicts itself, or its weights do not match."""

    slug = "broken-model"


class NonFiniteScores(ModelError):
    """The network returned NaN or infinity for this volume."""

    slug = "non-finite-scores"


class UnsupportedPackage(ModelError):
    """A model package asks for what cannot be honoured, or is damaged; the message names the field."""

    slug = "unsupported-package"


class MissingKeys(UnsupportedPackage):
    """A package does not say everything that a model file needs.

    what      what the package is, in words
    problems  for every key of the model file that the operator has to state, why.
    """

    slug = "missing-keys"

    def __init__(self, what: str, problems: Mapping[str, str]) -> None:
        reasons = "; ".join(f"{key}: {problem}" for key, problem in problems.items())
        super().__init__(f"The package cannot be honoured as it is. State these keys of model.yaml: {reasons}")
        self.what, self.problems = what, problems


class InternalError(StackSegError):
    """A fault of the service ended the job; the log tells more."""

    slug = "internal-error"


class ConfigError(StackSegError):
    """A configuration file or environment variable is not understood."""

    slug = "configuration"


class Cancelled(StackSegError):
    """The work was given up because nobody waits for its result."""

    slug = "cancelled"


# Folders of an absolute path, up to its last name; none in an address or in a relative path.
_FOLDERS = re.compile(r"(?<![\w.:/~-])/(?:[^\s/'\"]+/)+")


def without_folders(message: str) -> str:
    """Return a message for callers: absolute paths of this host, which tell how it is set up, become file names."""
    return _FOLDERS.sub("", message)


def validation_message(fault: Mapping[str, Any]) -> str:
    """Return the message of one of the `errors()` of pydantic's ValidationError, without a Python exception's name."""
    return str(fault["msg"]).removeprefix("Value error, ")
