"""Arguments of the tools for agents, and the JSON schemas that describe them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.serving.parameters import DecimalFloat, DecimalInteger, Query, describe_validation_errors

# Maximum time for which a tool waits for a job. Many MCP clients and proxies give up after 60 s.
MAX_WAIT_SECONDS = 45.0
# Maximum number of rows of an object table in one answer.
MAX_TABLE_ROWS = 500
# Limit on the index of a plane or time point, larger than that of any file.
MAX_INDEX = 2**31

JobId = Annotated[str, Field(max_length=64, description="The id of the job.")]
WaitSeconds = Annotated[
    DecimalFloat,
    Field(
        ge=0,
        le=MAX_WAIT_SECONDS,
        description="How long to wait for the job to end before its current state is returned, in seconds.",
    ),
]

# Parameters of a request that describe the stack, and those that are offered to agents. The schema is sent to the
# language model for every conversation, so it leaves out rarely used parameters. They are accepted nevertheless.
STACK_PARAMETERS = ("input", "stack", "channel", "scene", "time", "axes", "voxel_size", "allow_incomplete")
INSPECTION_PARAMETERS = (*STACK_PARAMETERS, "model", "diameter", "output")
SEGMENTATION_PARAMETERS = (
    *INSPECTION_PARAMETERS,
    *("threshold", "minimum_size", "border", "fill_holes", "min_confidence", "quality", "link", "measurements"),
    *("output_to", "overwrite", "glob", "format", "wait_seconds"),
)

A = TypeVar("A", bound=BaseModel)


class Arguments(BaseModel):
    """Arguments of a tool. Unknown arguments are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StackArguments(Query):
    """Arguments that select a stack and its parameters: those of a request to `/inspect`."""

    # Language models often write numbers such as `channel: 0` without quotes.
    model_config = ConfigDict(coerce_numbers_to_str=True)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.input is None) == (self.stack is None):
            raise ValueError(
                "pass either `input`, the path or URL of a file that the service can read, or `stack`, the id of an"
                " uploaded stack. A tool call cannot contain a file"
            )
        return self

    def make_parameters(self) -> dict[str, str]:
        """Return the arguments as parameters of a query string."""
        values = self.model_dump(mode="json", exclude_none=True, include=set(Query.model_fields))
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}


class SegmentationArguments(StackArguments):
    """Arguments of a segmentation: those of a request to `/jobs`, and how long to wait for the result."""

    wait_seconds: WaitSeconds = 20.0


class NoArguments(Arguments):
    """Arguments of a tool that needs none."""


class JobListArguments(Arguments):
    """Arguments of a list of jobs."""

    limit: Annotated[DecimalInteger, Field(ge=1, le=100, description="Maximum number of jobs.")] = 10


class JobArguments(Arguments):
    """Arguments that select a job."""

    job: JobId


class JobStateArguments(JobArguments):
    """Arguments of a request for the state of a job."""

    wait_seconds: WaitSeconds = 0.0


class TableArguments(JobArguments):
    """Arguments that select rows of the object table of a job."""

    first: Annotated[DecimalInteger, Field(ge=1, description="Number of the first row, from 1.")] = 1
    rows: Annotated[DecimalInteger, Field(ge=1, le=MAX_TABLE_ROWS, description="Maximum number of rows.")] = 50


PlaneNumber = Annotated[
    DecimalInteger | None,
    Field(
        ge=0,
        le=MAX_INDEX,
        description="Zero-based index of the plane along Z. Default: the middle plane, or another one if it is nearly "
        "empty.",
    ),
]


class ResultPreviewArguments(JobArguments):
    """Arguments that select a plane of the labels of a job."""

    plane: PlaneNumber = None
    time: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_INDEX,
            description="Zero-based index of the time point in a result with several. Default: middle.",
        ),
    ] = None


class StackPreviewArguments(StackArguments):
    """Arguments that select a plane of a stack."""

    plane: PlaneNumber = None


def parse_arguments(model: type[A], arguments: Mapping[str, Any]) -> A:
    """Validate the arguments of a tool call. Raises BadParameter."""
    try:
        return model.model_validate(arguments)
    except ValidationError as error:
        validation_errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise describe_validation_errors(validation_errors, model) from error


def describe_arguments(model: type[BaseModel], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the JSON schema of the arguments of a tool, restricted to `names`, without titles and null values."""
    schema = model.model_json_schema()
    properties = {
        name: _simplify(property_schema)
        for name, property_schema in schema.get("properties", {}).items()
        if names is None or name in names
    }
    required = [name for name in schema.get("required", []) if name in properties]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _simplify(schema: Mapping[str, Any]) -> dict[str, Any]:
    value_schema: Mapping[str, Any] = next((part for part in schema.get("anyOf", ()) if part.get("type") != "null"), {})
    merged = {**schema, **value_schema}
    if merged.get("default") is None:
        merged.pop("default", None)
    return {name: value for name, value in merged.items() if name not in {"anyOf", "title"}}
