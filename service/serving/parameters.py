"""The parameters of a request, for `/segment`, `/inspect`, jobs and the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from service.core.errors import BadParameter, validation_message
from service.core.quantities import (
    ObjectVolume,
    TimeRange,
    VoxelSize,
    is_index,
    parse_diameter,
    parse_roi_size,
    parse_skip_below,
    parse_time,
)
from service.core.types import Cancelling, Linking, Options, OutputKind, Quality, Selection, Steering, never

# What is told of the faults of a request: it may have thousands.
MAX_FAULTS = 3
MAX_NAME_LETTERS = 40


class Query(BaseModel):
    """Parameters of `/segment` and `/inspect`: which part of the file to read, what it does not say, what to do."""

    # Requests with one address share an object and its cached properties, so it is never copied with changes.
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        default=None, max_length=64, description="Name of the model; the default model if not given."
    )
    channel: str | None = Field(
        default=None,
        max_length=256,
        description="Channel to segment, by index from 0 or by name; all, for models that take as many.",
        examples=["0", "DAPI", "all"],
    )
    time: str | None = Field(
        default=None,
        max_length=32,
        description="Time point to segment, from 0. Several make one answer with an axis T: all, or a range "
        "without its end, as 2:5 for 2, 3 and 4.",
        examples=["0", "all", "2:5"],
    )
    axes: str | None = Field(
        default=None,
        max_length=16,
        description="One letter of T, Z, C, Y, X, S per stored dimension; overrides the file.",
        examples=["ZYX", "TZCYX"],
    )
    voxel_size: str | None = Field(
        default=None,
        max_length=64,
        description="Voxel size Z,Y,X in micrometres; overrides the file.",
        examples=["0.5,0.2,0.2"],
    )
    sw_batch_size: int | None = Field(default=None, ge=1, description="Windows per call of the network.")
    overlap: float | None = Field(
        default=None, ge=0, lt=1, description="Share of a window that it has in common with the next one."
    )
    diameter: str | None = Field(
        default=None,
        max_length=64,
        description="Width in the plane of objects as deep as wide, or widths along Z,Y,X, in voxels (px) or "
        "micrometres (um); the stack is resampled to the width at which the model works best. auto: the width is "
        "estimated from the stack, or by a trial of several where the model is not sure of what it finds; none: "
        "the stack is used as it is sampled. What the model's file says if not given.",
        examples=["15px", "7,15,15px", "6.5um", "auto"],
    )
    roi_size: str | None = Field(
        default=None,
        max_length=64,
        description="Window Z,Y,X in voxels, where the model takes others than its own (`input.roi_multiple`): a "
        "larger one sees more around an object and takes more memory.",
        examples=["64,64,64"],
    )
    quality: Quality | None = Field(
        default=None,
        description="best: every window is scored three times, also mirrored, and overlaps the next by half of its "
        "edge unless overlap says otherwise, for some ten times the time. fast if not given.",
    )
    skip_below: str | None = Field(
        default=None,
        max_length=64,
        description="Windows without any voxel above this grey value of the stack are not computed, and count as "
        "background. auto: above the stack's background; none: all windows are computed. What the operator has set "
        "if not given.",
        examples=["120", "auto"],
    )
    threshold: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Probability of foreground above which a voxel belongs to an object: a higher one gives "
        "smaller and fewer objects. What the model's file says if not given.",
    )
    minimum_size: str | None = Field(
        default=None,
        max_length=64,
        description="Objects of fewer voxels of the stack, or of less volume, are dropped. A part of a whole "
        "object, as the model's file says, if not given.",
        examples=["60", "12.5um3"],
    )
    border: Literal["keep", "drop"] | None = Field(
        default=None,
        description="Whether objects that touch a face of the stack, where they may be cut, are kept. What the "
        "model's file says if not given.",
    )
    fill_holes: bool | None = Field(
        default=None,
        description="Whether background that one object encloses becomes part of it. What the model's file says if "
        "not given.",
    )
    min_confidence: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Objects whose voxels have a lower mean probability of foreground are dropped. What the "
        "model's file says if not given.",
    )
    output: OutputKind | None = Field(
        default=None,
        description="labels: one number per object; classes: one per class; probabilities: float32 per output.",
    )
    strict: bool | None = Field(
        default=None,
        description="Whether labels that the model is not sure of are refused; they come with a warning if not.",
    )

    link: Linking | None = Field(
        default=None,
        description="Of several time points: give each object one number through time. overlap: as the one that it "
        "shares most voxels with; laptrack: by the least movement of all, for objects that leave their place.",
    )

    measurements: Literal["csv", "zip"] | None = Field(
        default=None, description="csv: a table of the objects instead of the labels; zip: both files in an archive."
    )

    input: str | None = Field(
        default=None,
        max_length=1024,
        description="A file of the service's host instead of a body: a folder that the operator has named, and the "
        "way from there. For `/jobs` also a folder of stacks.",
        examples=["scans/2026/stack.tif"],
    )
    glob: str | None = Field(
        default=None,
        max_length=256,
        description="Of an input that is a folder, for `/jobs`: which of its files are stacks; all TIFFs in it, "
        "not in folders below, if not given.",
        examples=["**/*.tif"],
    )
    format: Literal["tiff", "zarr"] | None = Field(
        default=None,
        description="Of an input that is a folder, for `/jobs`: whether labels are written as OME-TIFF or "
        "OME-Zarr; tiff if not given.",
    )
    stack: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{32}$",
        description="A stack that was posted to `/stacks`, by its id, instead of a body.",
        examples=["0f3c1d2ab4e94c1f8f0e6a7d5b9c3e21"],
    )
    output_to: str | None = Field(
        default=None,
        max_length=1024,
        description="Where on the service's host the result goes; the answer then only says what was written. A "
        "name that ends with .zarr, or among the labels of an image, is OME-Zarr. Of a folder of stacks, the "
        "folder for the results.",
        examples=["results/2026/stack_labels.tif", "results/2026/stack.ome.zarr/labels/nuclei"],
    )
    overwrite: bool | None = Field(
        default=None, description="With output_to: whether a file that is there already is replaced."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, given: Any) -> Any:
        """Drop the fields of a form that were left empty, which browsers send."""
        return {name: value for name, value in given.items() if value != ""} if isinstance(given, Mapping) else given

    @field_validator("time", mode="before")
    @classmethod
    def _as_text(cls, time: Any) -> Any:
        """Take a number too, as a caller in Python may give it."""
        return str(time) if isinstance(time, int) else time

    @field_validator("time", "voxel_size", "diameter", "roi_size", "skip_below", "minimum_size")
    @classmethod
    def _check_text(cls, text: str | None, field: ValidationInfo) -> str | None:
        if text is not None:
            try:
                PARSERS[str(field.field_name)](text)
            except BadParameter as error:
                raise ValueError(str(error)) from None
        return text

    @field_validator("link")
    @classmethod
    def _check_link(cls, link: Linking | None, field: ValidationInfo) -> Linking | None:
        if link is not None and not isinstance(parse_time(field.data.get("time") or "0"), TimeRange):
            raise ValueError("objects are linked through several time points, as of time=all or time=2:5")
        if link == "laptrack" and find_spec("laptrack") is None:
            raise ValueError("laptrack is not installed; add it with pip install 'stackseg[laptrack]'")
        return link

    @cached_property
    def selection(self) -> Selection:
        """The part of the file to read, and what overrides the file."""
        name = None if self.channel == "all" else self.channel
        channel = int(name) if name is not None and is_index(name) else name
        size = None if self.voxel_size is None else _voxel_size(self.voxel_size)
        time = None if self.time is None else parse_time(self.time)
        return Selection(channel, time, self.axes.upper() if self.axes else None, size)

    @cached_property
    def canonical(self) -> str:
        """All parameters but the model as JSON, equal for equal parameters."""
        return self.model_dump_json(exclude={"model"})

    @cached_property
    def options(self) -> Options:
        """The options of the segmentation."""
        diameter = None if self.diameter is None else parse_diameter(self.diameter)
        skip_below = None if self.skip_below is None else parse_skip_below(self.skip_below)
        least = None if self.minimum_size is None else ObjectVolume.parse(self.minimum_size)
        steering = Steering(self.threshold, least, self.border, self.fill_holes, self.min_confidence)
        roi_size = None if self.roi_size is None else parse_roi_size(self.roi_size)
        windows = self.sw_batch_size, self.overlap
        return Options(self.output, *windows, diameter, skip_below, steering, roi_size, bool(self.strict), self.quality)


class SegmentationRequest(NamedTuple):
    """A request whose file has arrived.

    source     the file, in `folder` unless the request names one of the host
    folder     the request's own folder
    cancelled  whether nobody wants the answer any more
    name       of the file for the record, "" where the result may answer a request with the same file of another name
    digest     of the file, None where it is not known
    """

    query: Query
    source: Path
    folder: Path
    caller: str | None = None
    cancelled: Cancelling = never
    name: str = ""
    digest: str | None = None


def describe_faults(
    faults: Sequence[Mapping[str, Any]], known: type[BaseModel] = Query, spell: Callable[[str], str] = str
) -> BadParameter:
    """Return the error for pydantic's `errors()` about parameters: sentences that name the first few of them.

    known  model of all parameters
    spell  writes the name of a parameter in the form in which the client states it
    """
    sentences = []
    for fault in faults[:MAX_FAULTS]:
        name = str(fault["loc"][-1])[:MAX_NAME_LETTERS] if fault["loc"] else "parameters"
        if fault["type"] == "extra_forbidden":
            sentences.append(f"There is no parameter {name!r}; there are {', '.join(known.model_fields)}.")
        else:
            sentences.append(f"{spell(name)}: {validation_message(fault)}.")
    if len(faults) > MAX_FAULTS:
        sentences.append(f"There are {len(faults) - MAX_FAULTS} more faults.")
    return BadParameter(" ".join(sentences), parameter=_find_parameter(faults[0]["loc"]) if faults else None)


def _find_parameter(loc: Sequence[int | str]) -> str | None:
    """Return the parameter at pydantic's or FastAPI's location of an error; None for the whole of a body."""
    names = [part for part in loc if isinstance(part, str)]
    # FastAPI states first where in the request the parameter is.
    in_request = len(names) > 1 and names[0] in {"query", "path", "header", "body"}
    return next(iter(names[in_request:]), "")[:MAX_NAME_LETTERS] or None


def _voxel_size(text: str) -> VoxelSize:
    try:
        z, y, x = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError("three positive numbers Z,Y,X in micrometres are expected, such as 0.5,0.2,0.2") from None
    try:
        return VoxelSize(z, y, x)
    except BadParameter as error:
        raise ValueError(f"{error} Z,Y,X are expected, such as 0.5,0.2,0.2") from None


# Of the parameters whose text has a form.
PARSERS: dict[str, Callable[[str], object]] = {
    "time": parse_time,
    "voxel_size": _voxel_size,
    "diameter": parse_diameter,
    "roi_size": parse_roi_size,
    "skip_below": parse_skip_below,
    "minimum_size": ObjectVolume.parse,
}
