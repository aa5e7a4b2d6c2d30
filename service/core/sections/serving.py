"""Settings for the service: limits, folders, jobs, training runs, the HTTP server, access and logging."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from service.core.sections.computing import Hours, Overlap, Seconds, Section

# Pattern for the names of API keys, which appear in logs and metrics.
KEY_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
KeyName = Annotated[str, Field(pattern=rf"^{KEY_NAME_PATTERN}$")]
KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
# Name of a folder or store in `references`, used as the first component of paths such as scans/2026/stack.tif.
RootName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
HostPattern = Annotated[str, Field(pattern=r"^((\*\.)?[A-Za-z0-9_.-]+|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,})$")]
# Pattern for a path below which a proxy serves the service. It excludes empty segments, because browsers interpret a
# path that begins with // as the URL of another host.
PATH_PREFIX_PATTERN = r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*){1,16}"
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9_.:\[\]-]+)$")]


class Limits(Section):
    """Limits for requests and for the resources of the service.

    upload_bytes      maximum size of an uploaded file
    decoded_bytes     maximum size of the pixels that are decoded from a file
    sw_batch_size     maximum `sw_batch_size` of a request
    overlap           maximum `overlap` of a request
    windows           maximum number of windows per volume; the number depends on the volume size, overlap and diameter
    cache_bytes       maximum size of the result cache; 0: no cache
    scratch_bytes     disk space for uploads, decoded pixels, and results that have not been sent yet; at most the free
                      space at startup
    waiting           maximum number of requests in the queue of a device, in addition to the running one
    at_once           maximum number of requests that are prepared, run or decoded concurrently on a device
    read_seconds      time limit for decoding one file
    request_seconds   time limit for a request, including the time in the queue
    bytes_per_second  minimum rate at which a client sends a request or receives a response, averaged over 30 s
    """

    upload_bytes: PositiveInt = 4 * 2**30
    decoded_bytes: PositiveInt = 16 * 2**30
    sw_batch_size: PositiveInt = 32
    overlap: Overlap = 0.75
    windows: PositiveInt = 200_000
    cache_bytes: NonNegativeInt = 2**30
    scratch_bytes: PositiveInt = 64 * 2**30
    waiting: NonNegativeInt = 16
    at_once: PositiveInt = 16
    read_seconds: Seconds = 60.0
    request_seconds: Seconds = 3600.0
    bytes_per_second: PositiveInt = 4096


class ReferenceFolder(Section):
    """A folder on this host, and the names of the API keys that may use it (empty: all clients)."""

    folder: Path
    keys: tuple[KeyName, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _wrap_folder(cls, value: Any) -> Any:
        return {"folder": value} if isinstance(value, str | Path) else value


class ReferenceStore(Section):
    """A URL prefix of remote stores, and the names of the API keys that may use it (empty: all clients)."""

    url: Annotated[str, Field(pattern=r"^(s3|gs|az|https?)://[^@?#]+$")]
    keys: tuple[KeyName, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _wrap_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


class References(Section):
    """Folders on this host and remote stores that requests may use instead of uploads and downloads; empty: disabled.

    inputs         name -> folder, or folder and keys, from which `input=NAME/...` reads
    outputs        name -> folder, or folder and keys, to which `output_to=NAME/...` writes
    stores         name -> URL such as s3://BUCKET/FOLDER, or url and keys, from which `input=NAME/...` reads remote
                   OME-Zarr; `input` may also be a URL that begins with this one
    decoded_bytes  maximum size of the pixels that are decoded from one of these files; None: `limits.decoded_bytes`
    """

    inputs: dict[RootName, ReferenceFolder] = Field(default_factory=dict)
    outputs: dict[RootName, ReferenceFolder] = Field(default_factory=dict)
    stores: dict[RootName, ReferenceStore] = Field(default_factory=dict)
    decoded_bytes: PositiveInt | None = None

    @model_validator(mode="after")
    def _check_unique_names(self) -> Self:
        if shared_names := sorted(self.inputs.keys() & self.stores.keys()):
            raise ValueError(f"inputs and stores both contain the name {shared_names[0]}; rename one of them")
        return self


class Jobs(Section):
    """Asynchronous jobs and uploaded stacks.

    folder        folder for inputs, job states and results; None: `stackseg/jobs` in the user's state folder, or a
                  temporary folder if that cannot be used; temporary: a folder in the scratch folder, deleted at exit
    quota_bytes   disk quota for inputs and results; if it is exceeded, the oldest results of the API key with the
                  largest usage are deleted
    keep_hours    how long a job and its result are stored after the job has finished, and a stack after its last use
    attempts      maximum number of times that a job is started if the process dies while the job is running
    stacks_bytes  disk quota for uploaded stacks (`POST /stacks`); if it is exceeded, the least recently used stacks of
                  the API key with the largest usage are deleted
    """

    folder: Path | Literal["temporary"] | None = None
    quota_bytes: PositiveInt = 64 * 2**30
    keep_hours: Hours = 168.0
    attempts: PositiveInt = 3
    stacks_bytes: PositiveInt = 16 * 2**30


class Annotations(Section):
    """Annotated stacks: stacks with corrected labels, which are stored for training.

    folder       folder for the stacks; None: the subfolder `annotations` of `jobs.folder` if that is set, else of the
                 user's data folder
    quota_bytes  disk quota for the annotated stacks of one API key; 0: no stack can be stored
    """

    folder: Path | None = None
    quota_bytes: NonNegativeInt = 8 * 2**30


class Trainings(Section):
    """Training runs that clients start on annotated stacks. The section `training` contains the hyperparameters.

    enabled       whether clients may train models: the API keys in `access.trainers` and `access.admins`, or all
                  clients on this host if there are no keys
    minutes       maximum training time that a request may specify; a training run that takes twice as long, including
                  reading and evaluation, is stopped
    waiting       maximum number of training runs in the queue, in addition to the running one; one API key may fill up
                  to half of the queue
    models        maximum number of models in `models.trained_folder`; once it is reached, no training run can start
    memory_bytes  memory limit for the training process, not including the libraries that it loads
    niceness      niceness of the training process; 0: same CPU priority as requests, 19: lowest priority
    keep_worse    whether to keep new models that are not better than their base models
    """

    enabled: bool = True
    minutes: PositiveFloat = 120.0
    waiting: PositiveInt = 8
    models: PositiveInt = 200
    memory_bytes: PositiveInt = 8 * 2**30
    niceness: Annotated[int, Field(ge=0, le=19)] = 19
    keep_worse: bool = False


class Server(Section):
    """Settings for the HTTP server.

    host                address to listen on, or a name, whose IPv4 and IPv6 addresses are all used; 0.0.0.0: all IPv4
                        addresses; `::`: all addresses of both protocols
    port                port to listen on; 0: any free port
    root_path           path below which a reverse proxy serves the service, such as /stackseg; the header
                        X-Forwarded-Prefix of a trusted proxy takes precedence
    ssl_keyfile         private key (PEM); with `ssl_certfile`, the service uses HTTPS
    ssl_certfile        certificate (PEM)
    scratch_folder      folder for uploads and results of requests; None: the system's temporary folder
    drain_seconds       maximum time to wait at shutdown for active requests to finish
    connections         maximum number of connections; if it is reached, connections that wait for data from clients
                        are closed to admit new ones
    keep_alive_seconds  time after which an idle connection is closed. It should be longer than the time for which a
                        proxy keeps idle connections, so that no request is sent on a connection that is being closed
    mcp                 whether AI agents can use the service through `POST /mcp`; requires the `mcp` extra
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    root_path: Annotated[str, Field(pattern=rf"^({PATH_PREFIX_PATTERN})?$")] = ""
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    scratch_folder: Path | None = None
    drain_seconds: Seconds = 30.0
    connections: PositiveInt = 1000
    keep_alive_seconds: Seconds = 75.0
    mcp: bool = False

    @model_validator(mode="after")
    def _check_tls_files(self) -> Self:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile must be set together")
        return self


class Access(Section):
    """API keys, their rate limits, and allowed hosts and origins.

    keys                 name of an API key -> its hash, as printed by `stackseg key NAME`; empty: no key is required
    admins               names of the keys that may reload models and see the status; if `keys` is empty, all clients on
                         this host may do so
    trainers             names of the keys, in addition to `admins`, that may train models if `trainings.enabled` is
                         true
    requests_per_minute  maximum request rate of one key; 0: no limit
    requests_at_once     maximum number of concurrent POST requests of one key; 0: no limit
    hosts                host names that a Host header may contain; `*.example.org` matches all subdomains. If `keys` is
                         empty, localhost and `server.host` are accepted as well; otherwise, an empty list accepts all
                         host names
    origins              origins of web pages that may call the service from a browser (CORS); `*`: all
    """

    keys: dict[KeyName, KeyHash] = Field(default_factory=dict)
    admins: tuple[KeyName, ...] = ()
    trainers: tuple[KeyName, ...] = ()
    requests_per_minute: NonNegativeInt = 0
    requests_at_once: NonNegativeInt = 0
    hosts: tuple[HostPattern, ...] = ()
    origins: tuple[Origin, ...] = ()

    @model_validator(mode="after")
    def _check_key_names(self) -> Self:
        if not self.keys and (self.requests_per_minute or self.requests_at_once):
            raise ValueError("requests_per_minute and requests_at_once apply to API keys, but keys is empty")
        for role in ("admins", "trainers"):
            if unknown_names := sorted(set(getattr(self, role)) - self.keys.keys()):
                raise ValueError(f"{role} lists {unknown_names[0]}, which is not in keys")
        return self


class Watchdog(Section):
    """Settings for the detection of a stuck device.

    batch_seconds  maximum time for one batch of windows; if it takes longer, the service becomes unready
    grace_seconds  additional time after which the process exits, so that its supervisor can restart it
    """

    batch_seconds: Seconds = 300.0
    grace_seconds: Seconds = 60.0


class Logging(Section):
    """Level and format of the log. With the format `json`, each line is a JSON object."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
