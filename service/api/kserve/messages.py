"""Messages of the protocol: inference requests, and descriptions of the server and its models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.core.errors import BadParameter, UnknownModel, get_validation_message
from service.core.files.bundled import get_software_version
from service.core.types import Options, OutputKind
from service.models.spec import ModelSpec
from service.serving.parameters import Query
from service.serving.runtime import Runtime

INPUT_NAME = "image"
# The datatype of inputs in the description of a model. Others are accepted, but a description has only one.
DESCRIBED_INPUT_DATATYPE = "UINT16"
# Datatypes of the outputs. Results with smaller integers are converted.
OUTPUT_DATATYPES: dict[OutputKind, str] = {"labels": "UINT32", "classes": "UINT16", "probabilities": "FP32"}
EXTENSIONS = ("binary_tensor_data", "parameters", "model_configuration", "model_repository")
# Parameters of `/segment` that a request cannot have: those that select a file or its destination, those of results
# that are not tensors, and the model, which is a part of the URL.
EXCLUDED_PARAMETERS = {
    *("input", "stack", "glob", "format", "output_to", "overwrite", "scene", "allow_incomplete"),
    *("measurements", "link", "model"),
}
PARAMETERS = [name for name in Query.model_fields if name not in EXCLUDED_PARAMETERS]
# The parameter that selects the binary format for all outputs.
BINARY_OUTPUT_PARAMETER = "binary_data_output"
MAX_DIMENSIONS = 6
# Maximum length of the name of a member in an error message.
MAX_NAME_CHARS = 100

# Text that is part of a response.
ShortText = Annotated[str, Field(max_length=256)]
Length = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
ParameterValue = bool | int | float | str


class Message(BaseModel):
    """A part of a request. Unknown members are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class InputParameters(Message):
    """Parameters of an input tensor: the size of its binary data, which follows the JSON object."""

    binary_data_size: Annotated[int, Field(strict=True, ge=0)] | None = None


class InputTensor(Message):
    """An input tensor. `data` contains its values, nested or in row-major order; None if they are binary."""

    name: ShortText
    shape: Annotated[list[Length], Field(min_length=2, max_length=MAX_DIMENSIONS)]
    datatype: ShortText
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(Message):
    """Parameters of a requested output: whether its values are binary; None: as for all outputs."""

    binary_data: bool | None = None


class RequestedOutput(Message):
    """An output that the client requests."""

    name: ShortText
    parameters: OutputParameters = OutputParameters()


class InferenceRequest(Message):
    """A request for inference. The client can choose an `id`, which the response repeats."""

    id: ShortText | None = None
    parameters: Annotated[dict[str, ParameterValue], Field(max_length=len(Query.model_fields) + 1)] = {}
    inputs: list[InputTensor]
    outputs: list[RequestedOutput] = []

    @property
    def input(self) -> InputTensor:
        """The only input. Raises BadParameter if there is not exactly one, with the name of the input of all models."""
        if [tensor.name for tensor in self.inputs] != [INPUT_NAME]:
            raise BadParameter(f"inputs: send exactly one input tensor, with the name {INPUT_NAME!r}.")
        return self.inputs[0]

    @property
    def output(self) -> OutputKind | None:
        """The requested output; None for the default of the model. Raises BadParameter for several or unknown ones."""
        kinds = get_args(OutputKind)
        names = [output.name for output in self.outputs]
        if len(names) > 1 or not set(names) <= set(kinds):
            raise BadParameter(
                f"outputs: request one of the outputs {', '.join(kinds)}. For several outputs, send several requests.",
                parameter="outputs",
            )
        return next((kind for kind in kinds if kind in names), None)

    @property
    def is_output_binary(self) -> bool:
        """Whether the values of the output are sent as binary data instead of JSON. Raises BadParameter."""
        is_binary = self.parameters.get(BINARY_OUTPUT_PARAMETER, False)
        if not isinstance(is_binary, bool):
            raise BadParameter(f"parameters: {BINARY_OUTPUT_PARAMETER} must be true or false.")
        choices = [output.parameters.binary_data for output in self.outputs]
        return next((choice for choice in choices if choice is not None), is_binary)

    @property
    def segmentation_parameters(self) -> dict[str, str]:
        """The parameters of `/segment`. Raises BadParameter for other parameters, and contradictory outputs."""
        parameters = {name: value for name, value in self.parameters.items() if name != BINARY_OUTPUT_PARAMETER}
        for name in parameters:
            if name not in PARAMETERS:
                raise BadParameter(
                    f"Unknown parameter {name[:MAX_NAME_CHARS]!r}. The parameters are {', '.join(PARAMETERS)} and"
                    f" {BINARY_OUTPUT_PARAMETER}.",
                    parameter=name[:MAX_NAME_CHARS],
                )
        if self.output is not None and parameters.setdefault("output", self.output) != self.output:
            raise BadParameter(
                f"output: the parameter differs from the requested output {self.output}. Omit the parameter.",
                parameter="output",
            )
        return {name: _format_value(value) for name, value in parameters.items()}


def _format_value(value: ParameterValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_request(content: bytes) -> InferenceRequest:
    """Parse the JSON object of a request. Raises BadParameter that names the first invalid member."""
    try:
        return InferenceRequest.model_validate_json(content)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # The location in a parameter ends with one of its types.
        loc = first_error["loc"][:2] if first_error["loc"][:1] == ("parameters",) else first_error["loc"]
        name = ".".join(map(str, loc))[:MAX_NAME_CHARS] or "request"
        is_unknown = first_error["type"] == "extra_forbidden"
        problem = "this member is not supported" if is_unknown else get_validation_message(first_error)
        if len(loc) < len(first_error["loc"]):
            problem = "expected a string such as '0.5,0.2,0.2', a number, true or false"
        raise BadParameter(f"{name}: {problem}.", parameter=name) from error


class TensorDescription(NamedTuple):
    """A tensor of a model: name, datatype, and shape with -1 for variable lengths."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def describe_server() -> dict[str, Any]:
    """Return the metadata of the server."""
    return {"name": "stackseg", "version": get_software_version(), "extensions": EXTENSIONS}


def find_spec(runtime: Runtime, name: str, version: str | None) -> ModelSpec:
    """Return the spec of a model. Raises UnknownModel if it has another version, and the errors of `get_spec`."""
    spec = runtime.models.get_spec(name)
    if version is not None and version != spec.version:
        raise UnknownModel(
            f"The service has version {spec.version} of the model {spec.name}, not {version[:MAX_NAME_CHARS]!r}. Omit"
            " the version."
        )
    return spec


def describe_model(runtime: Runtime, spec: ModelSpec) -> dict[str, Any]:
    """Return the metadata of a model."""
    return {
        "name": spec.name,
        "versions": [spec.version],
        "platform": "stackseg",
        "inputs": [_describe_input(spec)._asdict()],
        "outputs": [output._asdict() for output in _describe_outputs(runtime, spec)],
    }


def describe_configuration(runtime: Runtime, spec: ModelSpec) -> dict[str, Any]:
    """Return the parts of Triton's configuration of a model that clients use."""
    return {
        "name": spec.name,
        "platform": "stackseg",
        "backend": "stackseg",
        "max_batch_size": 0,
        "input": [_configure_tensor(_describe_input(spec))],
        "output": [_configure_tensor(output) for output in _describe_outputs(runtime, spec)],
    }


def describe_repository(runtime: Runtime) -> list[dict[str, Any]]:
    """Return the index of all models. A model that is not loaded yet is loaded for the first request."""
    return [
        {
            "name": model.name,
            "version": "" if model.spec is None else model.spec.version,
            "state": "UNAVAILABLE" if model.spec is None or model.state == "failed" else "READY",
            "reason": "The operator can find the reason in the log." if model.state == "failed" else "",
        }
        for model in runtime.models.list_states()
    ]


def _describe_input(spec: ModelSpec) -> TensorDescription:
    channels = () if spec.input.channels == 1 else (spec.input.channels,)
    return TensorDescription(INPUT_NAME, DESCRIBED_INPUT_DATATYPE, (*channels, -1, -1, -1))


def _describe_outputs(runtime: Runtime, spec: ModelSpec) -> Iterator[TensorDescription]:
    """Yield the outputs, one of which a request can select. The first one is the default."""
    estimator = runtime.get_estimator(spec)
    default = estimator.get_output_kind(Options())
    for kind in sorted(OUTPUT_DATATYPES, key=lambda kind: kind != default):
        if kind != "labels" or default == "labels":
            channels = (len(spec.probability_outputs),) if kind == "probabilities" else ()
            yield TensorDescription(kind, OUTPUT_DATATYPES[kind], (*channels, -1, -1, -1))


def _configure_tensor(tensor: TensorDescription) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": f"TYPE_{tensor.datatype}", "dims": list(tensor.shape)}
