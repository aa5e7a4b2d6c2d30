"""Settings of models, devices, engines, windows and training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Overlap = Annotated[float, Field(ge=0, lt=1)]
GreyValue = Annotated[float, Field(allow_inf_nan=False)]
DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")]
# Largest number of batches at the same time: further callers would only wait for the GIL.
MAX_STREAMS = 8


class Section(BaseModel):
    """Keys of one section, checked and fixed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Models(Section):
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


class Device(Section):
    """Devices that models run on.

    name     auto: the first CUDA GPU, else the CPU
    serve    several devices for one service, each with a queue and models of its own, or all GPUs; none: `name`
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


class Cluster(Section):
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


class Engine(Section):
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


class Windows(Section):
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


class Training(Section):
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
