"""Request parameters of `/segment`, `/inspect`, jobs and the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from service.core.errors import BadParameter, get_validation_message
from service.core.quantities import (
    ObjectVolume,
    TimeRange,
    parse_diameter,
    parse_float,
    parse_index_or_name,
    parse_roi_size,
    parse_skip_below,
    parse_time,
    parse_voxel_size,
)
from service.core.types import (
    CancellationCheck,
    Linking,
    Options,
    OutputKind,
    PostprocessingOptions,
    Quality,
    Selection,
    never_cancelled,
)

# Maximum number of validation errors in an error message. A request may have thousands of errors.
MAX_REPORTED_ERRORS = 3
# Maximum length of a parameter name in an error message.
MAX_NAME_LENGTH = 40


def _check_number(value: Any) -> Any:
    """Reject truth values, and text that pydantic would accept but that is not a decimal number."""
    is_python_number = isinstance(value, str) and ("_" in value or not value.isascii())
    return parse_float(str(value)) if is_python_number or isinstance(value, bool) else value


# Numbers in JSON, or their decimal digits in a query.
DecimalInteger = Annotated[int, BeforeValidator(_check_number)]
DecimalFloat = Annotated[float, BeforeValidator(_check_number)]


class Query(BaseModel):
    """Parameters of `/segment` and `/inspect`: the part of the file to read, metadata overrides, and options."""

    # Requests with the same query string share one object and its cached properties, so never modify it.
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        default=None, max_length=64, description="Name of the model. Default: the default model of the service."
    )
    channel: str | None = Field(
        default=None,
        max_length=256,
        description="Channel to segment: its name or zero-based index. Use `all` for a model that requires "
        "several channels. Default: the only channel.",
        examples=["0", "DAPI", "all"],
    )
    scene: str | None = Field(
        default=None,
        max_length=256,
        description="Name or index of one of several images in the file. Default: the only, largest or first image.",
    )
    time: str | None = Field(
        default=None,
        max_length=32,
        description="Zero-based time point to segment. To segment several time points, use `all` or a range that "
        "excludes its end, such as `2:5` for 2, 3 and 4. The result then has a time axis T. Default: the only one.",
        examples=["0", "all", "2:5"],
    )
    axes: str | None = Field(
        default=None,
        max_length=16,
        description="Axes of the stored array, one letter per dimension: T (time), Z, C (channel), Y, X or S (color "
        "samples). Overrides the metadata of the file.",
        examples=["ZYX", "TZCYX"],
    )
    voxel_size: str | None = Field(
        default=None,
        max_length=64,
        description="Voxel size Z,Y,X in micrometers. Overrides the metadata of the file.",
        examples=["0.5,0.2,0.2"],
    )
    allow_incomplete: bool | None = Field(
        default=None,
        description="Whether to read a file that has fewer planes than its metadata declares. Default: `false`.",
    )
    sw_batch_size: DecimalInteger | None = Field(
        default=None, ge=1, description="Number of windows per batch. Default: the setting of the operator."
    )
    overlap: DecimalFloat | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Overlap between adjacent windows, as a fraction of the window size. A larger overlap gives "
        "smoother transitions between windows, but segmentation takes longer. Default: the setting of the operator.",
    )
    diameter: str | None = Field(
        default=None,
        max_length=64,
        description="Typical diameter of the objects in voxels (px) or micrometers (um): one number for the diameter "
        "in the image plane, or three numbers for Z,Y,X. The stack is resampled so that the objects have the size that "
        "the model expects. `auto`: estimate the diameter from the stack; if confidence is low, several diameters are "
        "tried. `none`: segment the stack at its original resolution. Default: the setting of the model.",
        examples=["15px", "7,15,15px", "6.5um", "auto"],
    )
    roi_size: str | None = Field(
        default=None,
        max_length=64,
        description="Window size Z,Y,X in voxels, for models that support several window sizes (`input.roi_multiple` "
        "in model.yaml). A larger window includes more context around each object, but takes more memory. Default: the "
        "window size of the model.",
        examples=["64,64,64"],
    )
    quality: Quality | None = Field(
        default=None,
        description="`best`: average the scores of each window and two mirror images of it, and use an overlap of 0.5 "
        "unless `overlap` is set. This takes about ten times as long. `fast`: run the network once on each window. "
        "Default: `fast`.",
    )
    skip_below: str | None = Field(
        default=None,
        max_length=64,
        description="Skip windows that have no voxel above this gray value, and treat them as background. `auto`: use "
        "the background level of the stack. `none`: process all windows. Default: the setting of the operator.",
        examples=["120", "auto"],
    )
    threshold: DecimalFloat | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Foreground probability above which a voxel belongs to an object. A higher threshold gives fewer "
        "and smaller objects. Default: the setting of the model.",
    )
    minimum_size: str | None = Field(
        default=None,
        max_length=64,
        description="Remove objects smaller than this number of voxels of the stack, or than this volume in cubic "
        "micrometers (um3). Default: the setting of the model.",
        examples=["60", "12.5um3"],
    )
    border: Literal["keep", "drop"] | None = Field(
        default=None,
        description="Whether to keep or drop objects that touch a face of the stack, where they may be cut off. "
        "Default: the setting of the model.",
    )
    fill_holes: bool | None = Field(
        default=None,
        description="Whether to fill holes: background that is completely enclosed by one object. Default: the setting "
        "of the model.",
    )
    min_confidence: DecimalFloat | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Remove objects whose mean foreground probability is below this value. Default: the setting of the "
        "model.",
    )
    output: OutputKind | None = Field(
        default=None,
        description="Type of the result. `labels`: a unique integer for each object. `classes`: the index of the class "
        "of each voxel. `probabilities`: float32, one channel per output of the model. Default: `labels` if the model "
        "separates objects, otherwise `classes`.",
    )
    strict: bool | None = Field(
        default=None,
        description="Whether to return an error if confidence in the labels is low. Otherwise the response includes a "
        "warning. Default: `false`.",
    )

    link: Linking | None = Field(
        default=None,
        description="How to link objects across time points, so that each object keeps its label. `overlap`: link the "
        "objects that share the most voxels. `laptrack`: minimize the total movement, for objects that do not overlap "
        "between time points. Default: objects are not linked.",
    )

    measurements: Literal["csv", "zip"] | None = Field(
        default=None,
        description="Measure the objects. `csv`: return a table of measurements instead of the labels. `zip`: return "
        "both in an archive. Default: objects are not measured.",
    )

    input: str | None = Field(
        default=None,
        max_length=1024,
        description="Path of a file on the host of the service, which is read instead of the request body. It begins "
        "with the name of a folder that the operator has configured. For `/jobs`, this may also be a folder of stacks.",
        examples=["scans/2026/stack.tif"],
    )
    glob: str | None = Field(
        default=None,
        max_length=256,
        description="For `/jobs`, if `input` is a folder: glob pattern for the stacks to segment. Default: all "
        "files and OME-Zarr images with a supported format in the folder, but not in its subfolders.",
        examples=["**/*.tif"],
    )
    format: Literal["tiff", "zarr"] | None = Field(
        default=None,
        description="For `/jobs`, if `input` is a folder: format of the labels, OME-TIFF (`tiff`) or OME-Zarr "
        "(`zarr`). Default: `tiff`.",
    )
    stack: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{32}$",
        description="ID of a stack that was uploaded to `/stacks`. It is segmented instead of the request body.",
        examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"],
    )
    output_to: str | None = Field(
        default=None,
        max_length=1024,
        description="Path on the host of the service where the result is saved. The response then contains only a "
        "summary. The result is written as OME-Zarr if the name ends with .zarr, or is inside the labels group of an "
        "OME-Zarr image. If `input` is a folder, this is the folder for the results.",
        examples=["results/2026/stack_labels.tif", "results/2026/stack.ome.zarr/labels/nuclei"],
    )
    overwrite: bool | None = Field(
        default=None, description="Whether to replace the file at `output_to` if it exists. Default: `false`."
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, values: Any) -> Any:
        """Drop empty form fields, which browsers send."""
        return {name: value for name, value in values.items() if value != ""} if isinstance(values, Mapping) else values

    @field_validator("time", mode="before")
    @classmethod
    def _convert_time_to_string(cls, time: Any) -> Any:
        """Accept an integer as well, for Python callers."""
        return str(time) if isinstance(time, int) else time

    @field_validator("time", "voxel_size", "diameter", "roi_size", "skip_below", "minimum_size")
    @classmethod
    def _check_string(cls, text: str | None, field: ValidationInfo) -> str | None:
        if text is not None:
            try:
                STRING_PARSERS[str(field.field_name)](text)
            except BadParameter as error:
                raise ValueError(str(error)) from None
        return text

    @field_validator("link")
    @classmethod
    def _check_link(cls, link: Linking | None, field: ValidationInfo) -> Linking | None:
        if link is not None and not isinstance(parse_time(field.data.get("time") or "0"), TimeRange):
            raise ValueError("linking requires several time points, such as time=all or time=2:5")
        if link == "laptrack" and find_spec("laptrack") is None:
            raise ValueError("laptrack is not installed; install it with pip install 'stackseg[laptrack]'")
        return link

    @cached_property
    def selection(self) -> Selection:
        """The part of the file to read, and overrides for its metadata."""
        channel = parse_index_or_name(None if self.channel == "all" else self.channel)
        voxel_size = None if self.voxel_size is None else parse_voxel_size(self.voxel_size)
        time = None if self.time is None else parse_time(self.time)
        axes = self.axes.upper() if self.axes else None
        return Selection(channel, time, axes, voxel_size, bool(self.allow_incomplete), parse_index_or_name(self.scene))

    @cached_property
    def canonical_json(self) -> str:
        """All parameters except the model as JSON. Equal parameters have equal JSON."""
        return self.model_dump_json(exclude={"model"})

    @cached_property
    def options(self) -> Options:
        """The options of the segmentation."""
        diameter = None if self.diameter is None else parse_diameter(self.diameter)
        skip_below = None if self.skip_below is None else parse_skip_below(self.skip_below)
        minimum_size = None if self.minimum_size is None else ObjectVolume.parse(self.minimum_size)
        postprocessing = PostprocessingOptions(
            self.threshold, minimum_size, self.border, self.fill_holes, self.min_confidence
        )
        roi_size = None if self.roi_size is None else parse_roi_size(self.roi_size)
        windows, strict, quality = (self.sw_batch_size, self.overlap), bool(self.strict), self.quality
        return Options(self.output, *windows, diameter, skip_below, postprocessing, roi_size, strict, quality)


class SegmentationRequest(NamedTuple):
    """A request whose file has been received.

    source     path of the file, in `folder` unless the request specifies a file on the host
    folder     scratch folder of the request
    cancelled  returns whether the client has disconnected or the request was canceled
    name       file name for the provenance record; "" if the result may be reused for identical files with other names
    digest     digest of the file; None if unknown
    """

    query: Query
    source: Path
    folder: Path
    caller: str | None = None
    cancelled: CancellationCheck = never_cancelled
    name: str = ""
    digest: str | None = None


def describe_validation_errors(
    errors: Sequence[Mapping[str, Any]],
    parameters_model: type[BaseModel] = Query,
    format_name: Callable[[str], str] = str,
) -> BadParameter:
    """Convert validation errors of parameters to one error, whose message describes the first few errors.

    errors            entries of `ValidationError.errors()` of pydantic
    parameters_model  model that defines all parameters
    format_name       formats the name of a parameter in the client's notation
    """
    sentences = []
    for error in errors[:MAX_REPORTED_ERRORS]:
        name = str(error["loc"][-1])[:MAX_NAME_LENGTH] if error["loc"] else "parameters"
        if error["type"] == "extra_forbidden":
            known_names = ", ".join(parameters_model.model_fields)
            known_text = f"The parameters are {known_names}." if known_names else "There are no parameters."
            sentences.append(f"Unknown parameter {name!r}. {known_text}")
        else:
            sentences.append(f"{format_name(name)}: {get_validation_message(error)}.")
    if (num_omitted := len(errors) - MAX_REPORTED_ERRORS) > 0:
        sentences.append("There is 1 more error." if num_omitted == 1 else f"There are {num_omitted} more errors.")
    return BadParameter(" ".join(sentences), parameter=_find_parameter_name(errors[0]["loc"]) if errors else None)


def _find_parameter_name(loc: Sequence[int | str]) -> str | None:
    """Return the parameter at an error location of pydantic or FastAPI; None if the error concerns the whole body."""
    names = [part for part in loc if isinstance(part, str)]
    # Locations of FastAPI begin with the part of the request that contains the parameter.
    has_request_part = len(names) > 1 and names[0] in {"query", "path", "header", "body"}
    return next(iter(names[has_request_part:]), "")[:MAX_NAME_LENGTH] or None


# Parsers that validate the parameters whose values are structured strings.
STRING_PARSERS: dict[str, Callable[[str], object]] = {
    "time": parse_time,
    "voxel_size": parse_voxel_size,
    "diameter": parse_diameter,
    "roi_size": parse_roi_size,
    "skip_below": parse_skip_below,
    "minimum_size": ObjectVolume.parse,
}
