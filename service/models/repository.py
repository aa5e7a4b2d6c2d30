"""The model repository: `models/<name>/model.yaml` -> ModelSpec. Data only, nothing in a folder is executed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from service.core.errors import BrokenModel, UnknownModel, fault_message

FILE_NAME = "model.yaml"

# Answers where nothing else is said: models that are added beside it must not take its place by their name.
USUAL = "nuclei"

T = TypeVar("T")

PositiveTriple = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Architecture(_Frozen):
    """A network that `service.models.loader` knows by name, and its keyword arguments."""

    name: str
    arguments: dict[str, Any] = {}


class Weights(_Frozen):
    """A file inside the model folder: tensors for the architecture, or a program or graph that brings its own."""

    kind: Literal["safetensors", "torchscript", "exported", "onnx"] = "safetensors"
    file: str = "weights.safetensors"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class PercentileNormalisation(_Frozen):
    """(x - p_low) / (p_high - p_low), percentiles over the whole volume of one channel; not clipped unless `clip`."""

    kind: Literal["percentile"]
    low: Annotated[float, Field(ge=0, le=100)] = 1.0
    high: Annotated[float, Field(ge=0, le=100)] = 99.8
    clip: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self


class ZScoreNormalisation(_Frozen):
    """(x - mean) / standard deviation, over the whole volume of one channel."""

    kind: Literal["zscore"]


class RangeNormalisation(_Frozen):
    """(x - low) / (high - low) with fixed intensities; not clipped unless `clip`."""

    kind: Literal["range"]
    low: float
    high: float
    clip: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.low == self.high:
            raise ValueError("low and high must differ")
        return self


Normalisation = Annotated[
    PercentileNormalisation | ZScoreNormalisation | RangeNormalisation, Field(discriminator="kind")
]


class Input(_Frozen):
    """What the network takes.

    channels    number of channels, in the order of `channel_names` where given
    voxel_size  (z, y, x) in um to which a volume is resampled; None: used as it is sampled
    diameter    width of objects in voxels at which the model works best; None: a request cannot state theirs
    estimate_diameter  whether theirs is estimated where a request does not say what to do
    roi_size    the window (z, y, x) in voxels, the one shape the network is ever called with
    """

    channels: PositiveInt = 1
    channel_names: tuple[str, ...] = ()
    voxel_size: PositiveTriple | None = None
    diameter: PositiveFloat | None = None
    estimate_diameter: bool = False
    normalisation: Normalisation
    roi_size: tuple[PositiveInt, PositiveInt, PositiveInt]


class Instances(_Frozen):
    """Instances from two output channels, by ascent to the maxima of the distance inside the foreground.

    foreground     name of the output that holds the foreground logit
    distance       name of the output that holds the distance to the object's outline, in voxels or normalised
    threshold      foreground probability above which a voxel belongs to an object
    persistence    a maximum shallower than this, in units of the distance, joins its higher neighbour
    minimum_size   objects of fewer voxels are dropped
    smoothing      how often the distance is averaged over neighbours, with weights 1, 2, 1 along each axis
    border         what becomes of objects that touch a face of the volume
    holes          what becomes of background that one object encloses
    """

    kind: Literal["instances"]
    foreground: str = "foreground"
    distance: str = "distance"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    persistence: Annotated[float, Field(ge=0)] = 0.1
    minimum_size: Annotated[int, Field(ge=0)] = 16
    smoothing: Annotated[int, Field(ge=0, le=16)] = 0
    border: Literal["keep", "drop"] = "keep"
    holes: Literal["keep", "fill"] = "keep"


class Classes(_Frozen):
    """One class per voxel: the output with the highest score; the first output is the background."""

    kind: Literal["classes"]


class Sample(_Frozen):
    """A small input of the model's own and what the model makes of it in FP32 eager mode."""

    input: str = "sample.tif"
    expected: str = "expected.tif"


class ModelSpec(_Frozen):
    """Everything that is true of a model, wherever it runs. `folder` is where it was read from."""

    format: Literal[1] = 1
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]
    version: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
    summary: str
    licence: str
    training_data: str
    architecture: Architecture | None = None
    weights: Weights
    input: Input
    outputs: Annotated[tuple[str, ...], Field(min_length=1)]
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    decoding: Annotated[Instances | Classes, Field(discriminator="kind")]
    sample: Sample | None = None
    folder: Path = Field(exclude=True)

    @property
    def identifier(self) -> str:
        """Name and version as clients see them, `nuclei/1`."""
        return f"{self.name}/{self.version}"

    @property
    def weights_path(self) -> Path:
        return self.folder / self.weights.file

    @property
    def network(self) -> str:
        """The architecture's name; for a network of the file's own the kind of that file."""
        return self.architecture.name if self.architecture is not None else self.weights.kind

    @model_validator(mode="after")
    def _one_network(self) -> Self:
        if (self.architecture is None) == (self.weights.kind == "safetensors"):
            raise ValueError("architecture: safetensors need one, and other kinds of weights bring their own")
        return self

    @model_validator(mode="after")
    def _outputs_named(self) -> Self:
        if len(set(self.outputs)) != len(self.outputs):
            raise ValueError("outputs: every output needs a name of its own")
        if isinstance(self.decoding, Instances):
            for role in (self.decoding.foreground, self.decoding.distance):
                if role not in self.outputs:
                    raise ValueError(f"decoding: there is no output named {role!r}")
        return self

    @model_validator(mode="after")
    def _consistent_input(self) -> Self:
        if self.input.estimate_diameter and (self.input.diameter is None or not isinstance(self.decoding, Instances)):
            raise ValueError(
                "input.estimate_diameter: only objects (decoding.kind instances) have one, and input.diameter is needed"
            )
        if self.input.channel_names and len(self.input.channel_names) != self.input.channels:
            raise ValueError("input.channel_names: one name per channel is needed")
        return self

    @model_validator(mode="after")
    def _files_inside(self) -> Self:
        for file in (self.weights.file, *((self.sample.input, self.sample.expected) if self.sample else ())):
            if Path(file).name != file or file in {"", ".."}:
                raise ValueError(f"{file!r} must be a plain file name inside the model folder")
        return self


def read_spec(folder: Path) -> ModelSpec:
    """Read and check one model folder; weights are compared with their SHA-256. Raises BrokenModel."""
    path = folder / FILE_NAME
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BrokenModel(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"{path}: a mapping of keys is expected at the top level")
    try:
        spec = ModelSpec.model_validate({**content, "folder": folder})
    except ValidationError as error:
        raise BrokenModel(f"{path}: {describe(error)}") from error
    _check_weights(spec)
    return spec


def model_folders(root: Path, names: tuple[str, ...] = ()) -> list[Path]:
    """The folders below `root` that hold a model file, or those of `names`, unread. Raises BrokenModel for none."""
    if not root.is_dir():
        where = "" if root.is_absolute() else " of the working directory"
        raise BrokenModel(f"The model repository {root} is not a folder{where}; set models.folder to the one to serve.")
    folders = [root / name for name in names] or sorted(file.parent for file in root.glob(f"*/{FILE_NAME}"))
    if not folders:
        raise BrokenModel(f"The model repository {root} holds no */{FILE_NAME}.")
    return folders


def read_repository(root: Path, names: tuple[str, ...] = ()) -> dict[str, ModelSpec]:
    """Read every model folder below `root` (or only `names`), by model name. Raises BrokenModel."""
    specs: dict[str, ModelSpec] = {}
    for folder in model_folders(root, names):
        spec = read_spec(folder)
        if spec.name in specs:
            raise BrokenModel(f"{folder}: the name {spec.name!r} is taken by {specs[spec.name].folder}")
        specs[spec.name] = spec
    return specs


def usual(models: Iterable[str]) -> str | None:
    """Of the names of models, which answers who names none and where no default is configured; None without any."""
    names = list(models)
    return USUAL if USUAL in names else next(iter(names), None)


def choose(models: Mapping[str, T], name: str | None, default: str | None) -> T:
    """The model called `name`; None: the `default`, without one the `usual` one. Raises UnknownModel."""
    wanted = name or default or usual(models)
    if wanted is None:
        raise UnknownModel("No model is served. The service's operator finds the reason in GET /health.")
    if wanted not in models:
        raise UnknownModel(f"There is no model {wanted!r}; served are: {', '.join(models) or 'none'}.")
    return models[wanted]


def describe(error: ValidationError) -> str:
    """One line per fault, each with the key it concerns."""
    faults = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        said = fault_message(fault)
        faults.append(f"{key}: {said}" if key else said)
    return "; ".join(faults)


def _check_weights(spec: ModelSpec) -> None:
    try:
        with spec.weights_path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BrokenModel(f"{spec.weights_path}: the weights cannot be read: {error.strerror}") from error
    if digest != spec.weights.sha256:
        raise BrokenModel(
            f"{spec.weights_path}: the SHA-256 of the weights is {digest}, "
            f"but {FILE_NAME} says {spec.weights.sha256}; restore the weights or correct the model file."
        )
