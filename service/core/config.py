"""What the operator chooses: `configs/*.yaml` + `STACKSEG_SECTION__KEY` -> Settings."""

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

from service.core.errors import ConfigError, fault_message

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
# Batches at the same time, at most: more callers than that take turns at the interpreter.
MOST_STREAMS = 8

DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")]
HostPattern = Annotated[str, Field(pattern=r"^((\*\.)?[A-Za-z0-9_.-]+|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,})$")]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9_.:\[\]-]+)$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Models(_Section):
    """Which models to serve, and which of them are loaded when.

    serve         names of folders; none: every folder
    default       answers requests that name none; it is loaded at start
    load          others that are loaded at start; those that are not are loaded when they are first asked for
    memory_bytes  that loaded models may take on one device; the least recently used one makes room for another
    """

    folder: Path = Path("models")
    serve: tuple[str, ...] = ()
    default: str | None = None
    load: tuple[str, ...] | Literal["all"] = ()
    memory_bytes: PositiveInt = 4 * 2**30


class Device(_Section):
    """Where models run.

    name     auto: the first CUDA GPU, else the CPU
    serve    several devices for one service, each with a worker and models of its own, or all GPUs; none: `name`
    threads  of the network on a CPU; 0: as many as the process may use
    """

    name: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    serve: tuple[DeviceName, ...] | Literal["all"] = ()
    threads: NonNegativeInt = 0

    @model_validator(mode="after")
    def _gpus_once(self) -> Self:
        gpus = [name for name in self.serve if name != "cpu"] if self.serve != "all" else []
        if len(gpus) != len(set(gpus)):
            raise ValueError("serve names a GPU twice; windows of several requests share one anyway")
        return self


class Engine(_Section):
    """How the network runs.

    kind            winograd: convolutions of fewer multiplications, on CPUs in bfloat16 or float32
    kind            auto: the fastest that gives the same labels, found by trying, other keys that are auto included
    precision       auto: BF16 where the hardware computes it, FP16 on older tensor cores, else FP32
    channels_last   memory format channels_last_3d; auto: whichever is faster, or true where the kind is fixed
    compile_mode    auto: reduce-overhead on CUDA, default elsewhere; winograd is compiled only if a mode is asked for
    freeze          CPU only: weights become constants of the compiled graph
    streams         CPU only: batches that are computed at the same time, with a part of the cores each; auto: the
                    fastest number that is found with kind auto, else two
    matmul_precision  CUDA only, of float32 products, as torch calls it; all but highest let convolutions use TF32
    cudnn_benchmark   CUDA only: cuDNN tries its algorithms in the first calls
    tune_seconds    after which nothing new is tried
    tolerance       share of the sample's labels that what is tried may change
    cache_folder    where plans and compiled artefacts are kept between starts
    """

    kind: Literal["auto", "eager", "compiled", "winograd", "cudagraph", "openvino", "tensorrt"] = "auto"
    precision: Precision = "auto"
    channels_last: bool | Literal["auto"] = "auto"
    compile_mode: Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "auto"
    freeze: bool = True
    streams: Annotated[int, Field(ge=1, le=MOST_STREAMS)] | Literal["auto"] = "auto"
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    cudnn_benchmark: bool = True
    tune_seconds: PositiveFloat = 180.0
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.001
    cache_folder: Path | None = None


class Windows(_Section):
    """How the volume is covered.

    sw_batch_size  windows per call of the network; auto: the fastest with engine.kind auto, else what suits the device
    overlap        share of a window that it has in common with the next one
    blending       weight of a voxel inside its window
    sigma          width of the Gaussian, as a share of the window's edge
    skip_below     windows without a voxel above this grey value are not computed; auto: above the stack's background
    """

    sw_batch_size: PositiveInt | Literal["auto"] = "auto"
    overlap: Overlap = 0.25
    blending: Literal["constant", "gaussian"] = "gaussian"
    sigma: PositiveFloat = 0.125
    skip_below: GreyValue | Literal["auto", "none"] = "none"


class Limits(_Section):
    """What a request may ask for, and how much may wait.

    upload_bytes         of a posted file
    decoded_bytes        of the pixels that are read from it
    sw_batch_size        largest that a request may ask for
    overlap              largest that a request may ask for
    windows              that one volume may take, by its size, overlap and diameter
    cache_bytes          of results that are kept for who asks the same again; 0: none
    waiting              requests that may wait for the device, beyond one that runs
    at_once              of these, how many may be worked on at the same time: prepared, computed, decoded
    read_seconds         for decoding one file
    request_seconds      for a request as a whole, waiting included
    """

    upload_bytes: PositiveInt = 4 * 2**30
    decoded_bytes: PositiveInt = 16 * 2**30
    sw_batch_size: PositiveInt = 32
    overlap: Overlap = 0.75
    windows: PositiveInt = 200_000
    cache_bytes: NonNegativeInt = 2**30
    waiting: NonNegativeInt = 16
    at_once: PositiveInt = 16
    read_seconds: PositiveFloat = 60.0
    request_seconds: PositiveFloat = 3600.0


class Root(_Section):
    """A folder of this host, and the names of the API keys that may use it (none: every caller may)."""

    folder: Path
    keys: tuple[KeyName, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _folder_alone(cls, given: Any) -> Any:
        return {"folder": given} if isinstance(given, str | Path) else given


class References(_Section):
    """Folders of this host below which requests may name files instead of sending and receiving them; none: off.

    inputs         name -> folder, or folder and keys, that `input=NAME/...` reads from
    outputs        the same that `output_to=NAME/...` writes to
    decoded_bytes  of the pixels that are read from such a file; None: limits.decoded_bytes
    """

    inputs: dict[RootName, Root] = {}
    outputs: dict[RootName, Root] = {}
    decoded_bytes: PositiveInt | None = None


class Jobs(_Section):
    """Jobs that are answered later, and what is kept of them.

    folder        of their inputs, states and results; None: in the scratch folder, and gone with the process
    quota_bytes   of inputs and results together; the oldest results make room for new ones
    keep_hours    how long a job and its result are kept once it is over
    attempts      how often a job may be begun when the process dies while it runs
    """

    folder: Path | None = None
    quota_bytes: PositiveInt = 64 * 2**30
    keep_hours: PositiveFloat = 168.0
    attempts: PositiveInt = 3


class Server(_Section):
    """Where to listen, and where uploads live until they are answered (None: the system's temporary folder).

    With `ssl_keyfile` and `ssl_certfile` (PEM) the service speaks HTTPS.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    ssl_keyfile: Path | None = None
    ssl_certfile: Path | None = None
    scratch_folder: Path | None = None
    drain_seconds: PositiveFloat = 30.0

    @model_validator(mode="after")
    def _key_with_certificate(self) -> Self:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile belong together")
        return self


class Access(_Section):
    """Who may use the service.

    keys                 name of an API key -> its hash, as `stackseg key NAME` prints it; none: no key is asked for
    requests_per_minute  of one key; 0: any number
    requests_at_once     of one key, counting those that bring work (POST); 0: any number
    hosts                that a Host header may name, `*.example.org` for all below one; none: any
    origins              of web pages that may call the service from a browser (CORS), `*` for all
    """

    keys: dict[KeyName, KeyHash] = {}
    requests_per_minute: NonNegativeInt = 0
    requests_at_once: NonNegativeInt = 0
    hosts: tuple[HostPattern, ...] = ()
    origins: tuple[Origin, ...] = ()

    @model_validator(mode="after")
    def _limits_have_keys(self) -> Self:
        if not self.keys and (self.requests_per_minute or self.requests_at_once):
            raise ValueError("requests_per_minute and requests_at_once are limits of a key, and there are no keys")
        return self


class Watchdog(_Section):
    """When the device counts as stuck, and how long that may last before the process ends.

    batch_seconds  for one batch of windows
    grace_seconds  not ready until then, to be started again after that
    """

    batch_seconds: PositiveFloat = 300.0
    grace_seconds: PositiveFloat = 60.0


class Logging(_Section):
    """`text` is for people, `json` for programs: one object per line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Training(_Section):
    """How `stackseg train` learns; its options go before these keys.

    steps, learning_rate  as many updates of the weights; the rate at its highest
    minutes               after which training ends, whatever steps says; None: no limit
    batch_size, edge      crops per step, cubes of `edge` voxels
    validation            share of every stack that is not trained on
    every, patience       validate every so many steps; stop after so many validations without a lower loss
    clip                  norm above which gradients are scaled down
    pool                  augmented volumes held in memory, from which crops are drawn
    workers               processes that make these volumes; 0: one thread beside the training
    channels_last         memory format channels_last_3d
    compile               torch.compile the network that is trained
    checkpointing         keep the input of every block only and compute the rest again: less memory, more time
    seed                  the same seed gives the same model
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
    """All sections. Read with `read_settings`; the defaults here serve a laptop as well as a GPU host."""

    models: Models = Models()
    device: Device = Device()
    engine: Engine = Engine()
    windows: Windows = Windows()
    limits: Limits = Limits()
    references: References = References()
    jobs: Jobs = Jobs()
    server: Server = Server()
    access: Access = Access()
    watchdog: Watchdog = Watchdog()
    training: Training = Training()
    logging: Logging = Logging()

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
    """Read a configuration file, then let `STACKSEG_SECTION__KEY` variables override single keys.

    Raises ConfigError for an unreadable file, and for every key, variable or value that is not understood, by name.
    """
    values = _read_file(path) if path is not None else {}
    _override(values, os.environ if environment is None else environment)
    return _validated(values)


def overruled(settings: Settings, section: str, values: Mapping[str, Any]) -> Settings:
    """The settings with some keys of one section changed. Raises ConfigError like `read_settings`."""
    every = settings.model_dump()
    return _validated({**every, section: {**every[section], **values}})


def _validated(values: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc'][:2])) or 'settings'}: {fault_message(e)}" for e in error.errors()
        )
        raise ConfigError(f"The configuration is not understood: {faults}") from error


def _read_file(path: Path) -> dict[str, Any]:
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
        if not separator or key not in _keys(section):
            raise ConfigError(f"{variable}: there is no such setting; see configs/default.yaml for all of them.")
        values.setdefault(section, {})[key] = _parse(variable, text)


def _keys(section: str) -> frozenset[str]:
    field = Settings.model_fields.get(section)
    return frozenset(type(field.default).model_fields) if field is not None else frozenset()


def _parse(variable: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{variable}: the value is not valid YAML: {error}") from error
