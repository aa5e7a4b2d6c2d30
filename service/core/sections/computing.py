"""Settings for models, devices, engines, windows and training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

Precision = Literal["auto", "bf16", "fp16", "fp32"]
MatmulPrecision = Literal["highest", "high", "medium"]
Overlap = Annotated[float, Field(ge=0, lt=1)]
GrayValue = Annotated[float, Field(allow_inf_nan=False)]
DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")]
# Longest durations, about 30 and 100 years. The system refuses to wait longer, and dates end with the year 9999.
Seconds = Annotated[float, Field(gt=0, le=10**9)]
Hours = Annotated[float, Field(gt=0, le=10**6)]
# Largest number in the settings. Larger ones do not fit in the integers of the operating system and of SQLite.
MAX_NUMBER = 2**63 - 1
# Maximum number of concurrent batches. Each runs in its own thread, and further threads would only wait for the GIL.
MAX_STREAMS = 8


class Section(BaseModel):
    """Base class of all sections. Sections are immutable and reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Expand `~` in paths as a shell does. Raises ValueError for truth values, which pydantic reads as 0 and 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        types = (annotation, *get_args(annotation))
        if isinstance(value, bool) and bool not in types:
            raise ValueError(f"Input should not be {str(value).lower()}")
        if isinstance(value, int | float) and value > MAX_NUMBER:
            raise ValueError(f"Input should be less than or equal to {MAX_NUMBER}")
        if isinstance(value, str) and value.startswith("~") and Path in types:
            return _expand_home(value)
        return value


def _expand_home(path: str) -> str:
    """Return a path that begins with `~` as an absolute path. Raises ValueError if the user has no home directory."""
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        home = path.partition("/")[0]
        raise ValueError(f"{home} is not the home directory of a user; specify an absolute path") from None


class Models(Section):
    """Models to serve, and when to load them.

    folder          folder with one subfolder per model; None: the bundled models
    trained_folder  folder of the models that `POST /trainings` creates, which are served as well; None:
                    the subfolder `trained-models` of `jobs.folder` if that is set, else of the user's data folder
    serve           names of the model folders to serve; empty: all
    default         model for requests that do not specify one; loaded at startup
    load            further models to load at startup; other models are loaded on their first request
    memory_bytes    memory limit for the models loaded on one device; if it is exceeded, the least recently used model
                    is unloaded
    """

    folder: Path | None = None
    trained_folder: Path | None = None
    serve: tuple[str, ...] = ()
    default: str | None = None
    load: tuple[str, ...] | Literal["all"] = ()
    memory_bytes: PositiveInt = 4 * 2**30


class Device(Section):
    """Devices on which models run.

    name     device to use; auto: the first CUDA GPU, or the CPU if there is none
    serve    several devices for one service, each with its own queue and loaded models; all: every GPU; empty: `name`
    threads  number of CPU threads for the network; 0: one per usable core
    """

    name: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    serve: tuple[DeviceName, ...] | Literal["all"] = ()
    threads: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check_unique_gpus(self) -> Self:
        gpus = [name for name in self.serve if name != "cpu"] if self.serve != "all" else []
        if len(gpus) != len(set(gpus)):
            raise ValueError("serve must not list a GPU twice; several requests share the batches of one GPU anyway")
        return self


class Cluster(Section):
    """Devices on other hosts, used through actors of a Ray cluster. Requires `stackseg[ray]` on all hosts.

    address          address of the cluster as HOST:PORT; auto: the cluster of this host; None: no cluster
    workers          maximum number of workers; workers that do not fit into the cluster wait for resources
    least_workers    minimum number of workers, requested even if there is no work; None: the same as `workers`
    backlog_seconds  one worker is requested for every `backlog_seconds` of waiting and running work
    idle_seconds     time after which a worker that is not needed is released
    gpus, cpus       number of GPUs and CPUs of each worker
    shared_folder    folder that all hosts mount at the same path; pixels and labels are exchanged through it
    """

    address: str | None = None
    workers: PositiveInt = 1
    least_workers: NonNegativeInt | None = None
    backlog_seconds: Seconds = 60.0
    idle_seconds: Seconds = 300.0
    gpus: NonNegativeFloat = 1.0
    cpus: NonNegativeFloat = 1.0
    shared_folder: Path | None = None

    @model_validator(mode="after")
    def _check_shared_folder(self) -> Self:
        if self.address is not None and self.shared_folder is None:
            raise ValueError("address requires shared_folder, a folder that all hosts mount at the same path")
        return self

    @model_validator(mode="after")
    def _check_worker_limits(self) -> Self:
        if self.min_workers > self.workers:
            raise ValueError("least_workers must not exceed workers, the maximum number of workers")
        return self

    @property
    def min_workers(self) -> int:
        """Minimum number of workers: `least_workers`, or `workers` if that is not set."""
        return self.workers if self.least_workers is None else self.least_workers


class Engine(Section):
    """Engine that executes the network.

    kind              engine to use; winograd: convolutions with fewer multiplications, on CPUs in bfloat16 or float32;
                      auto: the tuned engine, or else the engine that is usually fastest and gives the same labels
    precision         auto: BF16 if the hardware supports it, FP16 on GPUs with older tensor cores, else FP32
    channels_last     use the memory format channels_last_3d; auto: the tuned setting, or true
    compile_mode      mode of torch.compile; auto: reduce-overhead on CUDA, default elsewhere. The engines winograd and
                      cudagraph are compiled only if a mode is set
    freeze            CPU only: turn weights into constants of the compiled graph
    streams           CPU only: number of concurrent batches, each on a share of the cores; auto: the tuned number, or 2
    matmul_precision  precision of float32 products, as named by torch: high and medium allow TF32 on CUDA devices, and
                      Winograd tiles with similar rounding errors on CPUs
    cudnn_benchmark   CUDA only: let cuDNN benchmark its algorithms in the first calls
    tune              when to compare all possible engines if kind is auto: never, or when `stackseg serve` first starts
    tune_seconds      time limit for tuning, after which no further candidate is measured
    tolerance         maximum fraction of the sample's voxels whose labels may differ from those of the FP32 network
    cache_folder      folder for tuning results and compiled artifacts, which are reused by later starts
    """

    kind: Literal["auto", "eager", "compiled", "winograd", "cudagraph", "openvino"] = "auto"
    precision: Precision = "auto"
    channels_last: bool | Literal["auto"] = "auto"
    compile_mode: Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "auto"
    freeze: bool = True
    streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)] | Literal["auto"] = "auto"
    matmul_precision: MatmulPrecision = "high"
    cudnn_benchmark: bool = True
    tune: Literal["never", "first-start"] = "never"
    tune_seconds: Seconds = 180.0
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.001
    cache_folder: Path | None = None


class Windows(Section):
    """Settings for sliding-window inference.

    sw_batch_size  number of windows per batch; auto: the tuned number, or a default for the device
    overlap        fraction of overlap between adjacent windows
    blending       how the scores of overlapping windows are weighted
    sigma          standard deviation of the Gaussian weights, as a fraction of the window's edge length
    skip_below     skip windows in which no voxel is above this gray value; auto: the background level of the stack
    inferer        own: StackSeg's implementation; monai: `monai.inferers.sliding_window_inference`, to which the
                   following keys apply
    padding_mode   padding of axes that are shorter than the window
    cval           value for padding_mode constant
    sw_device      device of the windows; None: the device of the network
    device         device of the scores of the volume; None: the device of the network
    """

    inferer: Literal["own", "monai"] = "own"
    sw_batch_size: PositiveInt | Literal["auto"] = "auto"
    overlap: Overlap = 0.25
    blending: Literal["constant", "gaussian"] = "gaussian"
    sigma: PositiveFloat = 0.125
    skip_below: GrayValue | Literal["auto", "none"] = "none"
    padding_mode: Literal["constant", "reflect", "replicate", "circular"] = "constant"
    cval: GrayValue = 0.0
    sw_device: DeviceName | None = None
    device: DeviceName | None = None

    @model_validator(mode="after")
    def _check_inferer_keys(self) -> Self:
        if self.inferer == "monai" and self.skip_below != "none":
            raise ValueError("skip_below requires `inferer: own`; MONAI's inferer runs the network on every window")
        for name in ("padding_mode", "cval", "sw_device", "device"):
            if self.inferer == "own" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} requires `inferer: monai`")
        return self


class Training(Section):
    """Defaults for the options of `stackseg train`.

    steps          number of weight updates
    learning_rate  maximum learning rate; None: 0.001, or 0.003 without a base model
    weight_decay   weight decay of the optimizer
    minutes        time limit for training; None: no limit
    batch_size     number of crops per step
    edge           edge length of the cubic crops in voxels
    validation     fraction of each stack that is held out for validation
    every          number of steps between validations
    patience       number of validations without improvement after which training stops
    clip           maximum gradient norm; larger gradients are scaled down
    pool           number of augmented volumes in memory from which crops are drawn
    workers        number of processes that augment volumes; 0: one thread of the training process
    channels_last  use the memory format channels_last_3d
    compile        compile the network with torch.compile
    checkpointing  store only the inputs of blocks and recompute activations, which saves memory but takes longer
    seed           seed for all random numbers
    """

    steps: PositiveInt = 600
    learning_rate: PositiveFloat | None = None
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
    def _check_memory_options(self) -> Self:
        if self.compile and self.checkpointing:
            raise ValueError(
                "compile and checkpointing cannot be combined; torch.compile decides what a network recomputes"
            )
        return self
