"""Settings of the operator: a YAML file, overridden by environment variables `STACKSEG_SECTION__KEY`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from service.core.errors import ConfigError, validation_message
from service.core.files.bundled import bundled_folder

PREFIX = "STACKSEG_"

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Overlap = Annotated[float, Field(ge=0, lt=1)]
GreyValue = Annotated[float, Field(allow_inf_nan=False)]
# Names are shown in logs and metrics.
KEY_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
KeyName = Annotated[str, Field(pattern=rf"^{KEY_NAME}$")]
KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
# The first part of a place such as scans/2026/stack.tif.
RootName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
# Largest number of batches at the same time: further callers would only wait for the GIL.
MAX_STREAMS = 8

DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")]
HostPattern = Annotated[str, Field(pattern=r"^((\*\.)?[A-Za-z0-9_.-]+|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,})$")]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9_.:\[\]-]+)$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Models(_Section):
    """Models to serve, and when they are loaded.

    folder        one subfolder per model; None: the bundled models
    trained_folder  of models that `POST /trainings` makes, served beside the others; None: `trained-models` below
                  jobs.folder, without that below the user's own data folder
    serve         names of folders; none: every folder
    default       model for requests that name none, loaded at start
    load          further models loaded at start; the rest are loaded by their first request
    memory_bytes  limit for the loaded models of one device; the least recently used one makes room for another
    """

    folder: Path | None = None
    trained_folder: Path | None = None
    serve: tuple[str, ...] = ()
    default: str | None = None
    load: tuple[str, ...] | Literal["all"] = ()
    memory_bytes: PositiveInt = 4 * 2**30


class Device(_Section):
    """Devices that models run on.

    name     auto: the first CUDA GPU, else the CPU
    serve    several devices for one service, each with a worker and models of its own, or all GPUs; none: `name`
    threads  CPU threads of the network; 0: one for each usable core
    """

    name: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    serve: tuple[DeviceName, ...] | Literal["all"] = ()
    threads: NonNegativeInt = 0

    @model_validator(mode="after")
    def _gpus_once(self) -> Self:
        gpus = [name for name in self.serve if name != "cpu"] if self.serve != "all" else []
        if len(gpus) != len(set(gpus)):
            raise ValueError("serve names a GPU twice; windows of several requests share one anyway")
        return self


class Cluster(_Section):
    """Devices of other hosts: actors of a Ray cluster, which needs `stackseg[ray]` on all of them.

    address        of the cluster, HOST:PORT, or auto for the one that this host belongs to; None: no other hosts
    workers          number of actors at most; those that the cluster has no place for wait for one
    least_workers    so many are always asked for; None: all
    backlog_seconds  of work that waits and runs, for each of which a worker is asked for
    idle_seconds     after which a worker that was not needed meanwhile is given back
    gpus, cpus       that each of them takes
    shared_folder    that all hosts mount under this path, through which pixels and labels go
    """

    address: str | None = None
    workers: PositiveInt = 1
    least_workers: NonNegativeInt | None = None
    backlog_seconds: PositiveFloat = 60.0
    idle_seconds: PositiveFloat = 300.0
    gpus: NonNegativeFloat = 1.0
    cpus: NonNegativeFloat = 1.0
    shared_folder: Path | None = None

    @model_validator(mode="after")
    def _has_folder(self) -> Self:
        if self.address is not None and self.shared_folder is None:
            raise ValueError("address needs shared_folder, a folder that all hosts mount under the same path")
        return self

    @model_validator(mode="after")
    def _at_most(self) -> Self:
        if self.least > self.workers:
            raise ValueError("least_workers is more than workers, which is the most that are asked for")
        return self

    @property
    def least(self) -> int:
        """The number of workers that are always asked for."""
        return self.workers if self.least_workers is None else self.least_workers


class Engine(_Section):
    """Execution of the network.

    kind            winograd: convolutions of fewer multiplications, on CPUs in bfloat16 or float32;
                    auto: the fastest known for the hardware that gives the same labels, or what tuning found
    precision       auto: BF16 where the hardware computes it, FP16 on older tensor cores, else FP32
    channels_last   memory format channels_last_3d; auto: true, or what tuning found
    compile_mode    auto: reduce-overhead on CUDA, default elsewhere; winograd and cudagraph are compiled only if a mode
                    is asked for
    freeze          CPU only: weights become constants of the compiled graph
    streams         CPU only: batches computed at the same time, each on a share of the cores; auto: two, or what
                    tuning found
    matmul_precision  CUDA only: torch's name for the precision of float32 products; all but highest allow TF32
    cudnn_benchmark   CUDA only: cuDNN tries its algorithms in the first calls
    tune            whether all that is possible races with kind auto: never, or at the first start of `serve`
    tune_seconds    of a race, after which no further candidate is tried
    tolerance       share of the sample's labels that a candidate may change
    cache_folder    plans and compiled artefacts, kept between starts
    """

    kind: Literal["auto", "eager", "compiled", "winograd", "cudagraph", "openvino"] = "auto"
    precision: Precision = "auto"
    channels_last: bool | Literal["auto"] = "auto"
    compile_mode: Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "auto"
    freeze: bool = True
    streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)] | Literal["auto"] = "auto"
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    cudnn_benchmark: bool = True
    tune: Literal["never", "first-start"] = "never"
    tune_seconds: PositiveFloat = 180.0
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.001
    cache_folder: Path | None = None


class Windows(_Section):
    """Sliding windows over the volume.

    sw_batch_size  windows per call of the network; auto: what suits the device, or what tuning found
    overlap        share of a window that it has in common with the next one
    blending       weight of a voxel inside its window
    sigma          width of the Gaussian, as a share of the window's edge
    skip_below     windows without a voxel above this grey value are not computed; auto: above the stack's background
    inferer        own, or monai: `monai.inferers.sliding_window_inference`, whose arguments the following keys are
    padding_mode   of an axis that is shorter than the window
    cval           value that padding_mode constant pads with
    sw_device      of windows; None: that of the network
    device         of the scores of the whole volume; None: that of the network
    """

    inferer: Literal["own", "monai"] = "own"
    sw_batch_size: PositiveInt | Literal["auto"] = "auto"
    overlap: Overlap = 0.25
    blending: Literal["constant", "gaussian"] = "gaussian"
    sigma: PositiveFloat = 0.125
    skip_below: GreyValue | Literal["auto", "none"] = "none"
    padding_mode: Literal["constant", "reflect", "replicate", "circular"] = "constant"
    cval: GreyValue = 0.0
    sw_device: DeviceName | None = None
    device: DeviceName | None = None

    @model_validator(mode="after")
    def _keys_of_one_inferer(self) -> Self:
        if self.inferer == "monai" and self.skip_below != "none":
            raise ValueError("skip_below needs inferer own, as MONAI computes every window")
        for name in ("padding_mode", "cval", "sw_device", "device"):
            if self.inferer == "own" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs inferer monai")
        return self


class Limits(_Section):
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


class Root(_Section):
    """A folder of this host, and the names of the API keys that may use it (none: every caller may)."""

    folder: Path
    keys: tuple[KeyName, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _folder_alone(cls, given: Any) -> Any:
        return {"folder": given} if isinstance(given, str | Path) else given


class Prefix(_Section):
    """The URL of stores elsewhere, and the names of the API keys that may use it (none: every caller may)."""

    url: Annotated[str, Field(pattern=r"^(s3|gs|az|https?)://[^@?#]+$")]
    keys: tuple[KeyName, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, given: Any) -> Any:
        return {"url": given} if isinstance(given, str) else given


class References(_Section):
    """Folders of this host below which requests may name files instead of sending and receiving them; none: off.

    inputs         name -> folder, or folder and keys, that `input=NAME/...` reads from
    outputs        name -> folder, or folder and keys, that `output_to=NAME/...` writes to
    stores         name -> URL such as s3://BUCKET/FOLDER, or url and keys, below which `input=NAME/...`, or such a URL,
                   reads OME-Zarr that lies elsewhere
    decoded_bytes  of the pixels that are read from such a file; None: limits.decoded_bytes
    """

    inputs: dict[RootName, Root] = {}
    outputs: dict[RootName, Root] = {}
    stores: dict[RootName, Prefix] = {}
    decoded_bytes: PositiveInt | None = None

    @model_validator(mode="after")
    def _names_of_one_kind(self) -> Self:
        if both := sorted(self.inputs.keys() & self.stores.keys()):
            raise ValueError(f"{both[0]} names a folder of inputs and one of stores; give one another name")
        return self


class Jobs(_Section):
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


class Annotations(_Section):
    """Stacks that are kept with corrected labels, to train on.

    folder       None: `annotations` below jobs.folder, without that below the user's own data folder
    quota_bytes  of all annotated stacks of one key; beyond, no other is kept. 0: none are
    """

    folder: Path | None = None
    quota_bytes: NonNegativeInt = 8 * 2**30


class Trainings(_Section):
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


class Server(_Section):
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


class Access(_Section):
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

    keys: dict[KeyName, KeyHash] = {}
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


class Watchdog(_Section):
    """Times after which a device counts as stuck and the process ends.

    batch_seconds  longest time for one batch of windows; beyond, the service is not ready
    grace_seconds  further time until the process ends, to be started again
    """

    batch_seconds: PositiveFloat = 300.0
    grace_seconds: PositiveFloat = 60.0


class Logging(_Section):
    """Level and format of the log: text for people, or one JSON object per line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Training(_Section):
    """Training by `stackseg train`, whose options take precedence over these keys.

    steps, learning_rate  number of updates of the weights; highest rate
    minutes               after which training ends before all steps are done; None: no limit
    batch_size, edge      crops per step, cubes of `edge` voxels
    validation            share of every stack that is held out
    every, patience       steps between validations; validations without a lower loss until training stops
    clip                  norm above which gradients are scaled down
    pool                  augmented volumes in memory, from which crops are drawn
    workers               processes that augment volumes; 0: one thread beside the training
    channels_last         memory format channels_last_3d
    compile               run the network through torch.compile
    checkpointing         keep only the input of every block and recompute the rest: less memory, more time
    seed                  of all random numbers
    """

    steps: PositiveInt = 600
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 1e-2
    minutes: PositiveFloat | None = None
    batch_size: PositiveInt = 4
    edge: PositiveInt = 48
    validation: Annotated[float, Field(ge=0.05, le=0.5)] = 0.2
    every: PositiveInt = 25
    patience: PositiveInt = 8
    clip: PositiveFloat = 2.0
    pool: PositiveInt = 16
    workers: NonNegativeInt = 0
    channels_last: bool = True
    compile: bool = False
    checkpointing: bool = False
    seed: NonNegativeInt = 1

    @model_validator(mode="after")
    def _one_way_to_save_memory(self) -> Self:
        if self.compile and self.checkpointing:
            raise ValueError("compile and checkpointing exclude each other: a compiled network recomputes by itself")
        return self


class Settings(_Section):
    """All sections of settings, with defaults for a laptop as well as a GPU host."""

    models: Models = Models()
    device: Device = Device()
    cluster: Cluster = Cluster()
    engine: Engine = Engine()
    windows: Windows = Windows()
    limits: Limits = Limits()
    references: References = References()
    jobs: Jobs = Jobs()
    annotations: Annotations = Annotations()
    trainings: Trainings = Trainings()
    server: Server = Server()
    access: Access = Access()
    watchdog: Watchdog = Watchdog()
    training: Training = Training()
    logging: Logging = Logging()

    @property
    def annotations_folder(self) -> Path:
        """The folder of annotated stacks."""
        return self.annotations.folder or self._data_folder("annotations")

    @property
    def trained_folder(self) -> Path:
        """The folder of models that requests have trained."""
        return self.models.trained_folder or self._data_folder("trained-models")

    def _data_folder(self, name: str) -> Path:
        if self.jobs.folder is not None:
            return self.jobs.folder / name
        data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111 - without a home, too
        return Path(data) / "stackseg" / name

    @model_validator(mode="after")
    def _within_own_limits(self) -> Self:
        chosen = self.windows.sw_batch_size
        if chosen != "auto" and chosen > self.limits.sw_batch_size:
            raise ValueError("windows.sw_batch_size exceeds limits.sw_batch_size")
        if self.windows.overlap > self.limits.overlap:
            raise ValueError("windows.overlap exceeds limits.overlap")
        return self

    @model_validator(mode="after")
    def _roots_have_known_keys(self) -> Self:
        for roots in (self.references.inputs, self.references.outputs):
            for name, root in roots.items():
                if unknown := sorted(set(root.keys) - self.access.keys.keys()):
                    raise ValueError(f"references: {name} is for the key {unknown[0]}, which is not in access.keys")
        return self


def read_settings(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Read a configuration file or bundled preset, and override single keys by `STACKSEG_SECTION__KEY` variables.

    Raises ConfigError for a file that cannot be read, and for an unknown or invalid key, variable or value, by name.
    """
    values = _read_file(path) if path is not None else {}
    _override(values, os.environ if environment is None else environment)
    return _validate(values)


def override_settings(settings: Settings, section: str, values: Mapping[str, Any]) -> Settings:
    """Return settings with some keys of one section changed. Raises ConfigError for an unknown key or value."""
    sections = settings.model_dump()
    return _validate({**sections, section: {**sections[section], **values}})


def _validate(values: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'][:2])) or 'settings'}: {validation_message(fault)}"
            for fault in error.errors()
        )
        raise ConfigError(f"The configuration is not understood: {faults}") from error


def _find_file(path: Path) -> Path:
    """Return the file itself where there is one, else the bundled preset of that name. Raises ConfigError."""
    presets = {file.stem: file for file in sorted(bundled_folder("configs").glob("*.yaml"))}
    if path.exists() and not path.is_dir():
        return path
    if str(path) not in presets:
        raise ConfigError(f"{path}: there is no such file, and no bundled preset of that name: {', '.join(presets)}.")
    return presets[str(path)]


def _read_file(path: Path) -> dict[str, Any]:
    path = _find_file(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(section, dict | None) for section in content.values()):
        raise ConfigError(f"{path}: expected sections with keys below them")
    return {name: dict(section or {}) for name, section in content.items()}


def _override(values: dict[str, Any], environment: Mapping[str, str]) -> None:
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        section, separator, key = variable.removeprefix(PREFIX).lower().partition("__")
        field = Settings.model_fields.get(section)
        if not separator or field is None or key not in type(field.default).model_fields:
            all_of_them = bundled_folder("configs") / "default.yaml"
            raise ConfigError(f"{variable}: there is no such setting; see {all_of_them} for all of them.")
        try:
            values.setdefault(section, {})[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{variable}: the value is not valid YAML: {error}") from error
