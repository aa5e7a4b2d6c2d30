"""Settings of the service: limits, folders, jobs, trainings on request, the listener and access to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from service.core.sections.computing import Overlap, Section

# Names are shown in logs and metrics.
KEY_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
KeyName = Annotated[str, Field(pattern=rf"^{KEY_NAME}$")]
KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
# The first part of a place such as scans/2026/stack.tif.
RootName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
HostPattern = Annotated[str, Field(pattern=r"^((\*\.)?[A-Za-z0-9_.-]+|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,})$")]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9_.:\[\]-]+)$")]


class Limits(Section):
    """Largest values of a request, and of the work of the service.

    upload_bytes     of a posted file
    decoded_bytes    of the pixels that are read from it
    sw_batch_size    of a request
    overlap          of a request
    windows          of one volume, by its size, overlap and diameter
    cache_bytes      of results kept for equal requests; 0: none
    scratch_bytes    on disk, of uploads, decoded pixels and results until they are taken; at most what is free at start
    waiting          requests that wait for the device, beyond one that runs
    at_once          requests of these in work at the same time: prepared, computed, decoded
    read_seconds     for decoding one file
    request_seconds  for a request as a whole, waiting included
    bytes_per_second   that a client sends of a body, or takes of an answer, at least, averaged over 30 s
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
    read_seconds: PositiveFloat = 60.0
    request_seconds: PositiveFloat = 3600.0
    bytes_per_second: PositiveInt = 4096


class Root(Section):
    """A folder of this host, and the names of the API keys that may use it (none: every caller may)."""

    folder: Path
    keys: tuple[KeyName, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _folder_alone(cls, given: Any) -> Any:
        return {"folder": given} if isinstance(given, str | Path) else given


class Prefix(Section):
    """The URL of stores elsewhere, and the names of the API keys that may use it (none: every caller may)."""

    url: Annotated[str, Field(pattern=r"^(s3|gs|az|https?)://[^@?#]+$")]
    keys: tuple[KeyName, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class References(Section):
    """Folders of this host below which requests may name files instead of sending and receiving them; none: off.

    inputs         name -> folder, or folder and keys, that `input=NAME/...` reads from
    outputs        name -> folder, or folder and keys, that `output_to=NAME/...` writes to
    stores         name -> URL such as s3://BUCKET/FOLDER, or url and keys, below which `input=NAME/...`, or such a URL,
                   reads OME-Zarr that lies elsewhere
    decoded_bytes  of the pixels that are read from such a file; None: limits.decoded_bytes
    """

    inputs: dict[RootName, Root] = Field(default_factory=dict)
    outputs: dict[RootName, Root] = Field(default_factory=dict)
    stores: dict[RootName, Prefix] = Field(default_factory=dict)
    decoded_bytes: PositiveInt | None = None

    @model_validator(mode="after")
    def _names_of_one_kind(self) -> Self:
        if both := sorted(self.inputs.keys() & self.stores.keys()):
            raise ValueError(f"{both[0]} names a folder of inputs and one of stores; give one another name")
        return self


class Jobs(Section):
    """Asynchronous jobs and their files.

    folder       of inputs, states and results; None: in the scratch folder, deleted with the process
    quota_bytes  of inputs and results together; the oldest results of the key that has most make room for new ones
    keep_hours   for which a job and its result are kept after its end, and a stack after it was last used
    attempts     number of starts of a job whose process dies while it runs
    stacks_bytes  of stacks that are kept to be segmented more than once; the least recently used ones of the key that
                 has most make room for new ones
    """

    folder: Path | None = None
    quota_bytes: PositiveInt = 64 * 2**30
    keep_hours: PositiveFloat = 168.0
    attempts: PositiveInt = 3
    stacks_bytes: PositiveInt = 16 * 2**30


class Annotations(Section):
    """Stacks that are kept with corrected labels, to train on.

    folder       None: `annotations` below jobs.folder, without that below the user's own data folder
    quota_bytes  of all annotated stacks of one key; beyond, no other is kept. 0: none are
    """

    folder: Path | None = None
    quota_bytes: NonNegativeInt = 8 * 2**30


class Trainings(Section):
    """Trainings that requests start on annotated stacks; `training` has what they share with `stackseg train`.

    enabled       whether callers may train who are named in access.trainers or access.admins, without keys those on the
                  service's host
    minutes       longest that a request may ask for; twice as long, reading and scoring included, a training is ended
    waiting       that wait, beyond the one that runs; one key has half of these places at most
    models        that have been trained and are kept in models.trained_folder; beyond, no training begins
    memory_bytes  of the process that trains, beyond the libraries that it loads
    niceness      of that process: 0 shares the processor evenly with requests, 19 leaves it to them
    """

    enabled: bool = True
    minutes: PositiveFloat = 120.0
    waiting: PositiveInt = 8
    models: PositiveInt = 200
    memory_bytes: PositiveInt = 8 * 2**30
    niceness: Annotated[int, Field(ge=0, le=19)] = 19


class Server(Section):
    """Address to listen on, and the folder of uploads until they are answered (None: the system's temporary one).

    With `ssl_keyfile` and `ssl_certfile` (PEM) the service speaks HTTPS. Of all `connections`, those that
    wait for their clients are closed for new ones.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    scratch_folder: Path | None = None
    drain_seconds: PositiveFloat = 30.0
    connections: PositiveInt = 1000

    @model_validator(mode="after")
    def _key_with_certificate(self) -> Self:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile belong together")
        return self


class Access(Section):
    """API keys, their limits, and allowed hosts and origins.

    keys                 name of an API key -> its hash, as `stackseg key NAME` prints it; none: no key is asked for
    admins               names of the keys that may reload models and see the status; without keys, whoever is on the
                         service's host may
    trainers             names of further keys that may train models (`trainings.enabled`)
    requests_per_minute  of one key; 0: any number
    requests_at_once     of one key, counting those that bring work (POST); 0: any number
    hosts                that a Host header may name, `*.example.org` for all below one; none: any
    origins              of web pages that may call the service from a browser (CORS), `*` for all
    """

    keys: dict[KeyName, KeyHash] = Field(default_factory=dict)
    admins: tuple[KeyName, ...] = ()
    trainers: tuple[KeyName, ...] = ()
    requests_per_minute: NonNegativeInt = 0
    requests_at_once: NonNegativeInt = 0
    hosts: tuple[HostPattern, ...] = ()
    origins: tuple[Origin, ...] = ()

    @model_validator(mode="after")
    def _names_have_keys(self) -> Self:
        if not self.keys and (self.requests_per_minute or self.requests_at_once):
            raise ValueError("requests_per_minute and requests_at_once are limits of a key, and there are no keys")
        for role in ("admins", "trainers"):
            if unknown := sorted(set(getattr(self, role)) - self.keys.keys()):
                raise ValueError(f"{role} names {unknown[0]}, which is not in keys")
        return self


class Watchdog(Section):
    """Times after which a device counts as stuck and the process ends.

    batch_seconds  longest time for one batch of windows; beyond, the service is not ready
    grace_seconds  further time until the process ends, to be started again
    """

    batch_seconds: PositiveFloat = 300.0
    grace_seconds: PositiveFloat = 60.0


class Logging(Section):
    """Level and format of the log: text for people, or one JSON object per line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
