"""All exceptions that StackSeg defines.

StackSegError
|-- RequestError             client error: the client must change the request
|   |-- BadFile              the file is unreadable, truncated or inconsistent
|   |-- AmbiguousAxes        the file does not specify the meaning of its axes
|   |-- BadParameter         a parameter is invalid, or does not match the file or the model
|   |-- LowConfidenceResult  the confidence in the labels is low, and the request has `strict=true`
|   |-- UnsupportedMedia     the format of the file is not supported
|   |-- TooLarge             the file or its decoded pixels exceed a limit
|   |-- TooSlow              the client sends its request too slowly
|   |-- OutputExists         the output file already exists
|   |-- UnknownModel         no model has this name
|   |-- Unauthorized         the API key is missing, is unknown, or does not have the required permission
|   |-- MisdirectedRequest   the Host header names a host that this service does not serve
|   |-- CrossSiteRequest     a web page from another origin sends a state-changing request
|   |-- UnknownJob           no job has this id, or the job belongs to another key
|   |-- UnknownStack         no uploaded stack has this id, or the stack belongs to another key
|   |-- UnknownAnnotation    no annotated stack has this id, or the stack belongs to another key
|   |-- UnknownTraining      no training run has this id, or the run belongs to another key
|   |-- UnknownProject       no project has this id, or the project belongs to another key
|   |-- FeatureDisabled      the feature is disabled by the operator, or its dependency is not installed
|   |-- ModelNotDeletable    the model cannot be deleted
|   |-- JobNotFinished       the job has no result yet
|   `-- ResultUnavailable    the job was canceled, or its result was deleted
|-- CapacityError            temporary error: the same request may succeed later
|   |-- QueueFull            too many requests are waiting
|   |-- RateLimited          the API key exceeds its rate limit
|   |-- NotReady             a model is being loaded, or the service is starting or stopping
|   |-- StorageUnavailable   the job folder, its database, the scratch folder or a remote store is unavailable
|   |-- DeviceLost           the device failed permanently; a new process may be able to use it
|   |-- TimedOut             the request exceeds the time limit
|   |-- OutOfStorage         the disk, or the quota for uploads or jobs, is full
|   |-- OutOfMemory          there is not enough memory, even with all fallbacks
|   |-- ReaderKilled         the process that was reading the file was killed, usually because memory ran out
|   `-- JobInterrupted       the process died too many times while it was running this job
|-- ModelError               error for the operator: the model must be fixed
|   |-- BrokenModel          the model folder is inconsistent, or its weights do not match the architecture
|   |-- NonFiniteScores      the network returned NaN or infinity
|   `-- UnsupportedPackage   a model package cannot be imported; raised only by the command line
|       `-- MissingKeys      a model package lacks some of the required information
|-- InternalError            a job failed because of a bug in the service
|-- ConfigError              a setting is unknown or invalid; raised only at startup
`-- Cancelled                the client disconnected; logged, but never sent as a response

Each message states the problem and a remedy in one or two sentences, for the user or operator who can apply it.
`slug` is the last part of the problem type (RFC 9457) in error responses. It is stable, so clients may rely on it.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class StackSegError(Exception):
    """Base class of all StackSeg errors; never raised directly.

    parameter  name of the first request parameter that caused the error; None if no parameter did
    suggested  values to try, as strings, by parameter name.
    """

    slug: ClassVar[str] = "error"

    def __init__(
        self, message: str, *, parameter: str | None = None, suggested: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.parameter, self.suggested = parameter, dict(suggested or {})


class RequestError(StackSegError):
    """Client error: the client can correct the request."""

    slug = "bad-request"

    @classmethod
    def for_parameter(cls, parameter: str, problem: str, suggested: Mapping[str, str] | None = None) -> Self:
        """Return an error about a request parameter. The message begins with the name of the parameter."""
        return cls(f"{parameter}: {problem}", parameter=parameter, suggested=suggested)


class BadFile(RequestError):
    """The file cannot be read, is truncated, or is inconsistent."""

    slug = "bad-file"


class AmbiguousAxes(RequestError):
    """The file does not specify the meaning of its axes, and the service does not guess their meaning."""

    slug = "ambiguous-axes"


class BadParameter(RequestError):
    """A parameter is malformed, out of range, or does not match the file or the model."""

    slug = "bad-parameter"


class LowConfidenceResult(RequestError):
    """The confidence in the labels is low, and the client requested `strict=true`."""

    slug = "doubtful-result"


class UnsupportedMedia(RequestError):
    """The service does not support the format of the file in the body."""

    slug = "unsupported-media"


class TooLarge(RequestError):
    """The upload or the decoded volume exceeds a limit of the service."""

    slug = "too-large"


class TooSlow(RequestError):
    """The client sends the headers or the body of the request more slowly than the service allows."""

    slug = "too-slow"


class OutputExists(RequestError):
    """The output file exists, and the request does not allow the service to replace it."""

    slug = "output-exists"


class UnknownModel(RequestError):
    """The service has no model of this name."""

    slug = "unknown-model"


class Unauthorized(RequestError):
    """The API key is missing, is unknown, or does not have the required permission."""

    slug = "unauthorized"


class MisdirectedRequest(RequestError):
    """The Host header names a host that this service does not serve."""

    slug = "misdirected"


class CrossSiteRequest(RequestError):
    """A web page from an origin that is not allowed sent a state-changing request."""

    slug = "cross-site"


class UnknownJob(RequestError):
    """No job has this id, or the job belongs to another API key."""

    slug = "unknown-job"


class UnknownStack(RequestError):
    """No uploaded stack has this id, or the stack belongs to another API key."""

    slug = "unknown-stack"


class UnknownAnnotation(RequestError):
    """No annotated stack has this id, or the stack belongs to another API key."""

    slug = "unknown-annotation"


class UnknownTraining(RequestError):
    """No training run has this id, or the run belongs to another API key."""

    slug = "unknown-training"


class UnknownProject(RequestError):
    """No project has this id, or the project belongs to another API key."""

    slug = "unknown-project"


class FeatureDisabled(RequestError):
    """The operator has disabled this feature, or its dependency is not installed."""

    slug = "switched-off"


class ModelNotDeletable(RequestError):
    """The model cannot be deleted: it is in use, it is the default model, or it was not created by a training run."""

    slug = "model-kept"


class JobNotFinished(RequestError):
    """The job is waiting or running; its result is available once its state is `done`."""

    slug = "not-finished"


class ResultUnavailable(RequestError):
    """The job was canceled, or its result was deleted to free space for newer results."""

    slug = "result-gone"


class CapacityError(StackSegError):
    """Temporary error: the service cannot process the request now; `retry_after` is a time in seconds, if known."""

    slug = "capacity"
    retry_after: int | None = None

    def __init__(self, message: str, retry_after: int | None = None, **members: Any) -> None:
        super().__init__(message, **members)
        self.retry_after = retry_after or self.retry_after


class QueueFull(CapacityError):
    """Too many requests are waiting; try again after `retry_after` seconds."""

    slug = "queue-full"


class RateLimited(CapacityError):
    """The API key exceeds its rate limit; try again after `retry_after` seconds."""

    slug = "rate-limited"


class NotReady(CapacityError):
    """A model is being loaded, or the service is starting or stopping; try again after `retry_after` seconds."""

    slug = "not-ready"
    retry_after = 5


class StorageUnavailable(CapacityError):
    """A folder, the job database or a remote store is unavailable; try again after `retry_after` seconds."""

    slug = "storage-unavailable"
    retry_after = 5


class DeviceLost(CapacityError):
    """The device failed; try again after `retry_after` seconds, when the service has restarted."""

    slug = "device-lost"
    retry_after = 60


class TimedOut(CapacityError):
    """The request took longer than the service allows, including the time in the queue."""

    slug = "timed-out"


class OutOfStorage(CapacityError):
    """The disk for uploads, decoded pixels and jobs is full, or the quota for uploads or jobs is exhausted."""

    slug = "out-of-storage"


class OutOfMemory(CapacityError):
    """There is not enough memory, even with all fallbacks; `needed_bytes` of memory would suffice (None: unknown)."""

    slug = "out-of-memory"

    def __init__(self, message: str, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class ReaderKilled(CapacityError):
    """The process that was reading the file was killed twice, usually because memory ran out."""

    slug = "reader-killed"


class JobInterrupted(CapacityError):
    """The process died more times than allowed while it was running this job, usually because memory ran out."""

    slug = "interrupted"


class ModelError(StackSegError):
    """Error for the operator: the model must be fixed."""

    slug = "model-error"


class BrokenModel(ModelError):
    """The model folder is incomplete or inconsistent, or its weights do not match its architecture."""

    slug = "broken-model"


class NonFiniteScores(ModelError):
    """The network returned NaN or infinity for this volume."""

    slug = "non-finite-scores"


class UnsupportedPackage(ModelError):
    """A model package is damaged, or uses an unsupported feature; the message describes the problem."""

    slug = "unsupported-package"


class MissingKeys(UnsupportedPackage):
    """A model package lacks keys of `model.yaml`; `problems` has the reason for each, or None if it is only absent."""

    slug = "missing-keys"

    def __init__(self, package: str, problems: Mapping[str, str | None]) -> None:
        reasons = "; ".join(key if problem is None else f"{key}: {problem}" for key, problem in problems.items())
        super().__init__(f"The package lacks required information. Set these keys of model.yaml: {reasons}")
        self.package, self.problems = package, problems


class InternalError(StackSegError):
    """The job failed because of a bug in the service; the log contains the details."""

    slug = "internal-error"


class ConfigError(StackSegError):
    """A setting in the configuration file or an environment variable is unknown or invalid."""

    slug = "configuration"


class Cancelled(StackSegError):
    """The work was canceled because the client disconnected."""

    slug = "cancelled"


def remove_host_details(message: str) -> str:
    """Remove the folders of absolute paths and the addresses of objects, so that clients do not learn them."""
    # URLs and relative paths remain.
    return re.sub(r"(?<![\w.:/~-])/(?:[^\s/'\"]+/)+| (?:object )?at 0x[0-9a-fA-F]+", "", message)


def get_validation_message(error: Mapping[str, Any]) -> str:
    """Return the message of an entry of pydantic's `ValidationError.errors()`, without the prefix for ValueErrors."""
    return str(error["msg"]).removeprefix("Value error, ")
