"""The keys of a model file, `model.yaml`, checked against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from service.core.errors import BadParameter

# Nothing that a terminal, a header or OME-XML would take for more than text.
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$")]
PositiveTriple = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Architecture(_FrozenModel):
    """Name of a network in `service.models.architectures`, and its keyword arguments."""

    name: str
    arguments: dict[str, Any] = {}


class Weights(_FrozenModel):
    """A file inside the model folder: tensors for `architecture`, or a program or graph that needs none.

    trusted  whether a program (`torchscript`) may be loaded, which can do whatever the process can
    """

    kind: Literal["safetensors", "torchscript", "exported", "onnx"] = "safetensors"
    file: str = "weights.safetensors"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    trusted: bool = False


class PercentileNormalisation(_FrozenModel):
    """(x - p_low) / (p_high - p_low), percentiles over the whole volume of one channel; not clipped unless `clip`."""

    kind: Literal["percentile"]
    low: Annotated[float, Field(ge=0, le=100)] = 1.0
    high: Annotated[float, Field(ge=0, le=100)] = 99.8
    clip: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self


class ZScoreNormalisation(_FrozenModel):
    """(x - mean) / standard deviation, over the whole volume of one channel."""

    kind: Literal["zscore"]


class RangeNormalisation(_FrozenModel):
    """(x - low) / (high - low) with fixed intensities; not clipped unless `clip`."""

    kind: Literal["range"]
    low: float
    high: float
    clip: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.low == self.high:
            raise ValueError("low and high must differ")
        return self


Normalisation = Annotated[
    PercentileNormalisation | ZScoreNormalisation | RangeNormalisation, Field(discriminator="kind")
]


class Input(_FrozenModel):
    """Input of the network.

    channels    number of channels, in the order of `channel_names` where given
    voxel_size  (z, y, x) in um to which a volume is resampled; None: not resampled
    diameter    width in voxels of the objects that the model works best for; None: a request cannot state a diameter
    estimate_diameter  whether the diameter is estimated where a request states none
    roi_size    window (z, y, x) in voxels, the only spatial shape that the network is called with
    roi_multiple  numbers (z, y, x) whose multiples are windows that a request may ask for instead, where the network is
                fully convolutional; None: no others
    """

    channels: PositiveInt = 1
    channel_names: tuple[Line, ...] = ()
    voxel_size: PositiveTriple | None = None
    diameter: PositiveFloat | None = None
    estimate_diameter: bool = False
    normalisation: Normalisation
    roi_size: tuple[PositiveInt, PositiveInt, PositiveInt]
    roi_multiple: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None

    @model_validator(mode="after")
    def _check_multiple(self) -> Self:
        steps = self.roi_multiple or (1, 1, 1)
        if any(edge % step for edge, step in zip(self.roi_size, steps, strict=True)):
            raise ValueError("roi_size must be a multiple of roi_multiple")
        return self


class Instances(_FrozenModel):
    """Instances from two output channels: every foreground voxel ascends to a maximum of the distance.

    foreground     name of the output that holds the foreground logit
    distance       name of the output that holds the distance to the object's outline, in voxels or normalised
    threshold      foreground probability above which a voxel belongs to an object
    persistence    a maximum shallower than this, in units of the distance, joins its higher neighbour
    minimum_size   objects of fewer voxels are dropped
    minimum_fraction  so are those of less than this part of a ball of `input.diameter`, or of a typical object of the
                   stack where that is smaller
    min_confidence objects whose voxels have a lower mean probability of foreground are dropped
    min_relative_odds  so are those whose odds p / (1 - p), of that probability p, are below this part of the odds of a
                   typical object of the stack, unless p is 0.9 or more
    smoothing      how often the distance is averaged over neighbours, with weights 1, 2, 1 along each axis
    border         keep or drop objects that touch a face of the volume
    holes          keep or fill background that one object encloses
    """

    kind: Literal["instances"]
    foreground: str = "foreground"
    distance: str = "distance"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    persistence: Annotated[float, Field(ge=0)] = 0.1
    minimum_size: Annotated[int, Field(ge=0)] = 16
    minimum_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_relative_odds: Annotated[float, Field(ge=0, lt=1)] = 0.0
    smoothing: Annotated[int, Field(ge=0, le=16)] = 0
    border: Literal["keep", "drop"] = "keep"
    holes: Literal["keep", "fill"] = "keep"


class Classes(_FrozenModel):
    """One class per voxel: the output with the highest score; the first output is the background."""

    kind: Literal["classes"]


class Calibration(_FrozenModel):
    """Logistic regression that tells how far a result can be believed, fitted to good and bad results of the model.

    intercept, certainty, peak, size, giants  of `service.inference.diameter.confidence.Features`
    threshold  results with less confidence are doubtful
    sheets     name of the model beside this one to try on stacks of membranes or shells
    blobs      name of the one to try on stacks of anything else
    """

    intercept: float
    certainty: float
    peak: float
    size: float
    giants: float
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    sheets: Line | None = None
    blobs: Line | None = None


class Sample(_FrozenModel):
    """A small input, and the labels that the model gives for it in FP32 eager mode."""

    input: str = "sample.tif"
    expected: str = "expected.tif"


class Lineage(_FrozenModel):
    """Origin of a model that was trained on annotated stacks, with its scores before and after.

    parent       name and version of the model that it went on from
    annotations  number of annotated stacks
    before       F1 at an intersection over union of 0.5 of the parent, on what was held out
    after        of this model
    better       whether this model is better
    remark       what was scored, in a sentence
    """

    parent: Line
    annotations: PositiveInt
    before: float
    after: float
    better: bool
    remark: Line


class ModelSpec(_FrozenModel):
    """A model file. `folder` is the model folder that it was read from."""

    format: Literal[1] = 1
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]
    version: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
    summary: Text
    licence: Text
    training_data: Text
    architecture: Architecture | None = None
    weights: Weights
    input: Input
    outputs: Annotated[tuple[Line, ...], Field(min_length=1)]
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    decoding: Annotated[Instances | Classes, Field(discriminator="kind")]
    confidence: Calibration | None = None
    sample: Sample | None = None
    lineage: Lineage | None = None
    folder: Path = Field(exclude=True)

    @property
    def identifier(self) -> str:
        """Return name and version as clients see them, `nuclei/1`."""
        return f"{self.name}/{self.version}"

    @property
    def weights_path(self) -> Path:
        """Return the path of the weights file."""
        return self.folder / self.weights.file

    @property
    def network(self) -> str:
        """Return the architecture's name, or the kind of weights file that brings its own network."""
        return self.architecture.name if self.architecture is not None else self.weights.kind

    @model_validator(mode="after")
    def _check_architecture(self) -> Self:
        if (self.architecture is None) == (self.weights.kind == "safetensors"):
            raise ValueError("architecture: safetensors need one, and other kinds of weights bring their own")
        return self

    @model_validator(mode="after")
    def _check_outputs(self) -> Self:
        if len(set(self.outputs)) != len(self.outputs):
            raise ValueError("outputs: every output needs a name of its own")
        if isinstance(self.decoding, Instances):
            for role in (self.decoding.foreground, self.decoding.distance):
                if role not in self.outputs:
                    raise ValueError(f"decoding: there is no output named {role!r}")
        return self

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.input.estimate_diameter and (self.input.diameter is None or not isinstance(self.decoding, Instances)):
            raise ValueError(
                "input.estimate_diameter: only objects (decoding.kind instances) have one, and input.diameter is needed"
            )
        if self.confidence is not None and (self.input.diameter is None or not isinstance(self.decoding, Instances)):
            raise ValueError("confidence: only objects (decoding.kind instances) of a width (input.diameter) have one")
        if self.input.channel_names and len(self.input.channel_names) != self.input.channels:
            raise ValueError("input.channel_names: one name per channel is needed")
        return self

    @model_validator(mode="after")
    def _check_file_names(self) -> Self:
        for file in (self.weights.file, *((self.sample.input, self.sample.expected) if self.sample else ())):
            if Path(file).name != file or file in {"", ".."} or "\0" in file:
                raise ValueError(f"{file!r} must be a plain file name inside the model folder")
        return self


def check_trainable(spec: ModelSpec) -> None:
    """Raise BadParameter for a model that `service.training` has no targets for."""
    decoding = spec.decoding
    roles = (decoding.foreground, decoding.distance) if isinstance(decoding, Instances) else ()
    if spec.outputs != roles or spec.activation != "sigmoid" or spec.input.channels != 1 or spec.architecture is None:
        raise BadParameter(
            f"{spec.name}: only models of one channel with the sigmoid outputs foreground and distance can be trained."
        )
    if spec.architecture.arguments.get("deep_supervision"):
        raise BadParameter(f"{spec.name}: deep_supervision has no targets here; only its last output can be trained.")
    if spec.input.voxel_size is not None:
        raise BadParameter(f"{spec.name}: works at a voxel size of its own, to which training does not resample yet.")
