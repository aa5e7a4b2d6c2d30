"""The schema of a model file, `model.yaml`, with checks that its keys are consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from service.core.errors import BadParameter
from service.models.input_spec import Input, SingleLineText
from service.models.spec_parts import (
    Boundaries,
    Classes,
    Decoding,
    Flows,
    FrozenModel,
    Instances,
    ObjectCalibration,
    Regions,
    StarConvex,
    Tiling,
)

# Strings of several lines without other control characters.
# Names of models, which are also the names of their folders.
NAME_PATTERN = "^[a-z0-9][a-z0-9_-]{0,63}$"
MultilineText = Annotated[str, Field(pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$")]
# How far scores may lie outside the range from 0 to 1, because of rounding, if they are probabilities.
PROBABILITY_TOLERANCE = 1e-2
URL_PATTERN = r"^https?://[!-~]+$"
DOI_PATTERN = r"^10\.[0-9]{4,}[!-.0-~]*/[!-~]+$"
ActivationName = Literal["none", "sigmoid", "softmax"]
TargetName = Literal["instances", "boundaries", "affinities"]
"""What a network learns: foreground and distance, boundaries, or boundaries and affinities."""


class Architecture(FrozenModel):
    """The name of a network in `service.models.architectures`, and its keyword arguments."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Weights(FrozenModel):
    """The weights file in the model folder: tensors for `architecture`, or a program or graph that defines the network.

    trusted  whether a `torchscript` file may be loaded; such a file is a program that can do everything this process
             can do
    output   name of the output with the scores, for a program or graph with several outputs; None to choose it by its
             shape
    """

    kind: Literal["safetensors", "torchscript", "exported", "onnx"] = "safetensors"
    file: str = "weights.safetensors"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    trusted: bool = False
    output: SingleLineText | None = None


class Calibration(FrozenModel):
    """Logistic regression that separates good from bad results of the model.

    Diameter trials compare scales by it. It is also the confidence in a result if `objects` is not specified.

    intercept                       intercept of the regression
    certainty, peak, size, giants   coefficients of `service.inference.diameter.confidence.Features`
    threshold                       confidence below which other diameters are tried, and a result causes a warning
    objects                         calibrated confidence of objects, whose mean replaces the confidence in a result
    sheets                          name of the model to suggest for stacks of membranes or shells
    blobs                           name of the model to suggest for all other stacks
    """

    intercept: float
    certainty: float
    peak: float
    size: float
    giants: float
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    objects: ObjectCalibration | None = None
    sheets: SingleLineText | None = None
    blobs: SingleLineText | None = None


class Sample(FrozenModel):
    """File names of a small input and of the labels that the model produces for it in eager FP32 mode."""

    input: str = "sample.tif"
    expected: str = "expected.tif"


class Citation(FrozenModel):
    """A publication to cite.

    text  reference or title
    doi   digital object identifier, without the address of a resolver; None if the publication has none
    url   address of the publication; None if it is unknown
    """

    text: Annotated[SingleLineText, Field(min_length=1)]
    doi: Annotated[str, Field(pattern=DOI_PATTERN)] | None = None
    url: Annotated[str, Field(pattern=URL_PATTERN)] | None = None

    @property
    def address(self) -> str | None:
        """Address of the publication; None if it is unknown."""
        return self.url if self.doi is None else f"https://doi.org/{self.doi}"


class Lineage(FrozenModel):
    """The origin of a model that was trained on annotated stacks, and its scores before and after training.

    parent       name and version of the model from which training started
    annotations  number of annotated stacks
    before       F1 score of the parent on the held-out data, at an intersection over union of 0.5
    after        the same score of this model
    better       whether this model is better than its parent
    remark       sentence that describes the data used for the scores
    """

    parent: SingleLineText
    annotations: PositiveInt
    before: float
    after: float
    better: bool
    remark: SingleLineText


class ModelSpec(FrozenModel):
    """The content of a model file.

    activation  function that converts the scores of the network to probabilities and distances: one function for all
                outputs, or a mapping from the name of every output to none or sigmoid. With none, the scores already
                are probabilities or distances.
    folder      model folder that contains the file
    """

    format: Literal[1] = 1
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    version: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
    summary: MultilineText
    licence: MultilineText
    training_data: MultilineText
    authors: tuple[SingleLineText, ...] = ()
    cite: tuple[Citation, ...] = ()
    architecture: Architecture | None = None
    weights: Weights
    input: Input
    outputs: Annotated[tuple[SingleLineText, ...], Field(min_length=1)]
    activation: ActivationName | dict[str, Literal["none", "sigmoid"]] = "none"
    decoding: Decoding
    confidence: Calibration | None = None
    sample: Sample | None = None
    lineage: Lineage | None = None
    folder: Path = Field(exclude=True)

    @property
    def has_objects(self) -> bool:
        """Whether the model separates objects, so that labels can be requested."""
        return not isinstance(self.decoding, Classes | Regions)

    @property
    def identifier(self) -> str:
        """Name and version in the form that clients see, such as `nuclei/1`."""
        return f"{self.name}/{self.version}"

    @property
    def weights_path(self) -> Path:
        """Path of the weights file."""
        return self.folder / self.weights.file

    @property
    def network_name(self) -> str:
        """Name of the architecture, or the kind of weights file if the file includes the network."""
        return self.architecture.name if self.architecture is not None else self.weights.kind

    @property
    def probability_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that a request for probabilities returns."""
        return self.outputs[:1] if isinstance(self.decoding, StarConvex | Flows) else self.outputs

    @property
    def tiling(self) -> Tiling:
        """Positions of the windows, and their scores."""
        if isinstance(self.decoding, Flows):
            return Tiling("cellpose", is_fixed=self.decoding.tiles == "fixed")
        if not isinstance(self.decoding, StarConvex):
            return Tiling(self.input.tiling, is_mirrored=self.input.padding == "mirror")
        return Tiling("stardist", self.input.roi_multiple or self.decoding.grid, self.decoding.grid)

    def get_activation(self, output: str) -> ActivationName:
        """Return the activation of the output with this name."""
        return self.activation[output] if isinstance(self.activation, dict) else self.activation

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes of `output=classes`, from class 0."""
        match self.decoding:
            case Instances(foreground=name) | Boundaries(boundary=name):
                return ("background", name)
            case StarConvex() | Flows():
                return ("background", "object")
            case Regions(classes=classes):
                names = dict(zip(classes, self.outputs, strict=True))
                return ("background", *(names.get(value, f"class {value}") for value in range(1, max(classes) + 1)))
            case _:
                return self.outputs

    @model_validator(mode="after")
    def _check_architecture(self) -> Self:
        if (self.architecture is None) == (self.weights.kind == "safetensors"):
            raise ValueError(
                "architecture: this key is required for safetensors weights and not allowed for other kinds of weights"
            )
        if self.weights.output is not None and self.weights.kind == "safetensors":
            raise ValueError("weights.output: this key is not allowed for safetensors weights")
        return self

    @model_validator(mode="after")
    def _check_outputs(self) -> Self:
        if len(set(self.outputs)) != len(self.outputs):
            raise ValueError("outputs: the names of outputs must be unique")
        names = tuple[str, ...]()
        if isinstance(self.decoding, Instances):
            names = (self.decoding.foreground, self.decoding.distance)
        elif isinstance(self.decoding, Boundaries):
            names = (self.decoding.boundary,)
        elif isinstance(self.decoding, Regions) and len(self.decoding.classes) != len(self.outputs):
            raise ValueError(f"decoding.classes must contain one class for each of the {len(self.outputs)} outputs")
        for output_name in names:
            if output_name not in self.outputs:
                raise ValueError(f"decoding: there is no output named {output_name!r}")
        return self

    @model_validator(mode="after")
    def _check_affinities(self) -> Self:
        if isinstance(self.decoding, Boundaries) and (count := len(self.decoding.affinities)):
            if self.outputs[0] != self.decoding.boundary or len(self.outputs) != 1 + count:
                raise ValueError(
                    f"outputs: {count} decoding.affinities require the output {self.decoding.boundary!r}, followed by"
                    f" {count} affinities"
                )
            if self.activation == "softmax":
                raise ValueError("activation: affinities do not exclude each other, so softmax cannot be used")
        return self

    @model_validator(mode="after")
    def _check_activation(self) -> Self:
        """Reject combinations of activation, outputs and decoding whose result is wrong for every network."""
        if isinstance(self.activation, dict) and self.activation.keys() != set(self.outputs):
            raise ValueError(f"activation: specify one function for each of the outputs {', '.join(self.outputs)}")
        if self.activation == "softmax" and isinstance(self.decoding, Instances):
            raise ValueError(
                "activation: softmax makes the foreground depend on the distance, so it cannot be used with "
                "`decoding.kind: instances`; use sigmoid, or none if the network returns probabilities"
            )
        if self.activation == "softmax" and isinstance(self.decoding, Regions):
            raise ValueError(
                "activation: softmax is for classes that exclude each other, so it cannot be used with "
                "`decoding.kind: regions`; use sigmoid, or none if the network returns probabilities"
            )
        if len(self.outputs) == 1 and (self.activation == "softmax" or isinstance(self.decoding, Classes)):
            raise ValueError(
                "outputs: softmax and `decoding.kind: classes` compare at least two outputs, but there is only one, "
                f"{self.outputs[0]!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_star_convex(self) -> Self:
        decoding = self.decoding
        if not isinstance(decoding, StarConvex):
            return self
        if (self.input.tiling, self.input.padding, self.input.resampling) != ("monai", "zeros", "linear"):
            raise ValueError("input.tiling, padding and resampling do not apply to `decoding.kind: star-convex`")
        count, required_count = len(self.outputs), 1 + decoding.rays.count
        if count != required_count:
            raise ValueError(f"outputs: {decoding.rays.count} rays require {required_count} outputs, not {count}")
        steps = (self.input.roi_multiple or self.input.roi_size, self.input.roi_size)
        if any(n % step for lengths in steps for n, step in zip(lengths, decoding.grid, strict=True)):
            raise ValueError("input.roi_size and input.roi_multiple must be multiples of decoding.grid")
        if any(self.get_activation(name) != "none" for name in self.outputs[1:]):
            raise ValueError("activation: the distances of `decoding.kind: star-convex` need the activation none")
        return self

    @model_validator(mode="after")
    def _check_flows(self) -> Self:
        keys = self.input
        if not isinstance(self.decoding, Flows):
            return self
        names = ("tiling", "padding", "resampling", "voxel_size", "roi_multiple")
        if tuple(getattr(keys, name) for name in names) != ("monai", "zeros", "linear", None, None):
            raise ValueError(f"{', '.join(names)} do not apply to `decoding.kind: flows`")
        activations = [self.get_activation(name) for name in self.outputs]
        if keys.diameter is None or activations != ["sigmoid", "none", "none", "none"]:
            raise ValueError("`decoding.kind: flows` requires input.diameter, a sigmoid output and three flows (none)")
        return self

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        is_diameter_unused = self.input.diameter is None or not isinstance(self.decoding, Instances)
        if self.input.estimate_diameter and is_diameter_unused:
            raise ValueError("input.estimate_diameter requires `decoding.kind: instances` and input.diameter")
        if self.input.crop_zeros and not isinstance(self.decoding, Classes | Regions):
            raise ValueError("input.crop_zeros requires `decoding.kind: classes` or `decoding.kind: regions`")
        if self.confidence is not None and is_diameter_unused:
            raise ValueError("confidence requires `decoding.kind: instances` and input.diameter")
        if self.input.channel_names and len(self.input.channel_names) != self.input.channels:
            raise ValueError("input.channel_names must contain one name per channel")
        return self

    @model_validator(mode="after")
    def _check_file_names(self) -> Self:
        for file in (self.weights.file, *((self.sample.input, self.sample.expected) if self.sample else ())):
            if Path(file).name != file or file in {"", ".."} or "\0" in file:
                raise ValueError(f"{file!r} must be a plain file name inside the model folder")
        return self


def get_target(spec: ModelSpec) -> TargetName:
    """Return what the network of a model has learned."""
    if not isinstance(spec.decoding, Boundaries):
        return "instances"
    return "affinities" if spec.decoding.affinities else "boundaries"


def check_trainable(spec: ModelSpec, target: TargetName | None = None) -> None:
    """Raise BadParameter if `service.training` cannot train this model, or train it to learn a different target."""
    if (target is None or target == get_target(spec)) and not _has_trainable_outputs(spec):
        raise BadParameter(
            f"{spec.name}: only models with the sigmoid outputs foreground and distance, or boundary and affinities,"
            " can be trained."
        )
    if spec.input.channels != 1 or spec.architecture is None:
        raise BadParameter(f"{spec.name}: only networks of known architecture with one channel can be trained.")
    if spec.architecture.arguments.get("deep_supervision"):
        raise BadParameter(f"{spec.name}: networks with deep_supervision cannot be trained.")
    if spec.input.voxel_size is not None:
        raise BadParameter(f"{spec.name}: models with a fixed input.voxel_size cannot be trained yet.")


def _has_trainable_outputs(spec: ModelSpec) -> bool:
    """Return whether the network has exactly the outputs that the decoding uses, as logits."""
    decoding, names = spec.decoding, tuple[str, ...]()
    if isinstance(decoding, Instances):
        names = (decoding.foreground, decoding.distance)
    elif isinstance(decoding, Boundaries):
        names = spec.outputs if decoding.affinities else (decoding.boundary,)
    return spec.outputs == names and all(spec.get_activation(name) == "sigmoid" for name in names)
