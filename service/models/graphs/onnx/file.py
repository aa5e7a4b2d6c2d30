"""Read ONNX files with the library `onnx`, an optional dependency (`stackseg[onnx]`).

Tensors with external data are never passed to `onnx`, because it would open any file that the model file refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from service.core.errors import BrokenModel
from service.core.types import Array

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

PartReader = Callable[[str, int, int | None], bytes]
"""Function (name, offset, length) that reads part of a file in the model's folder, to its end if length is None."""

# Codes from onnx.TensorProto.DataType. Floating-point types are float, float16, double and bfloat16. Other supported
# types are integers and booleans.
FLOATING_POINT_TYPES = frozenset([1, 10, 11, 16])
BFLOAT16 = 16
IMAGE_RANK = 5
DATA_TYPES = FLOATING_POINT_TYPES | frozenset([2, 3, 4, 5, 6, 7, 9])
# Maximum size of a protocol buffer.
MAX_BYTES = 2**31 - 1
_PARSE_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError)


@dataclass(frozen=True)
class Node:
    """A node of the graph. `inputs` and `outputs` are names of values, or "" for an omitted optional value."""

    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the graph. `shape` is None if it is not specified. A size is None if it is not fixed."""

    name: str
    dtype: int
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Model:
    """The content of a file.

    opset    version of the standard operators
    tensors  initializers by name
    """

    opset: int
    nodes: tuple[Node, ...]
    tensors: dict[str, Array]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)


def read_model(path: Path) -> Model:
    """Read a file without external data. Raises BrokenModel if it is rejected or if `onnx` is not installed."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise BrokenModel(f"{path}: the file cannot be read: {error.strerror}") from error
    return parse_model(data, path)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file. Raises BrokenModel, before reading, if the file is too large."""
    if path.stat().st_size > MAX_BYTES:
        raise BrokenModel(f"{path}: the file is larger than 2 GiB, the maximum for ONNX files.")
    return path.read_bytes()


def parse_model(data: bytes, path: Path) -> Model:
    """Parse the bytes of the file `path`. Raises BrokenModel if they are rejected."""
    try:
        return _read_model(_decode(data))
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except _PARSE_ERRORS as error:
        raise BrokenModel(f"{path}: the file cannot be read as ONNX: {error}") from error


def find_image(model: Model) -> TensorInfo:
    """Return the only input, a floating-point image [batch, channel, z, y, x]. Raises BrokenModel for other inputs."""
    if len(model.inputs) != 1:
        raise BrokenModel(f"graph.input: the network has {len(model.inputs)} inputs; exactly one image is supported.")
    (image,) = model.inputs
    if image.shape is not None and len(image.shape) != IMAGE_RANK:
        raise BrokenModel(
            f"graph.input {image.name}: the input has {len(image.shape)} axes; "
            "exactly the five axes batch, channel, z, y and x are supported."
        )
    if image.dtype not in FLOATING_POINT_TYPES:
        raise BrokenModel(
            f"graph.input {image.name}: the data type is {image.dtype}; only floating-point types are supported. "
            "Export the network with an example input of float32."
        )
    return image


def embed_external_data(data: bytes, read_part: PartReader) -> bytes:
    """Return the bytes of an ONNX file with all external data embedded. `read_part` reads this data from other files.

    Raises BrokenModel or ValueError if the file cannot be read, or if it would be larger than 2 GiB.
    """
    model = _decode(data)
    size = len(data)
    for tensor in model.graph.initializer:
        if tensor.data_location == tensor.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            length = int(entries["length"]) if "length" in entries else None
            raw_data = read_part(entries["location"], int(entries.get("offset", "0")), length)
            size += len(raw_data)
            if size > MAX_BYTES:
                raise ValueError("with its tensors embedded, the file would be larger than 2 GiB")
            tensor.raw_data = raw_data
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    content: bytes = model.SerializeToString()
    return content


def _decode(data: bytes) -> ModelProto:
    """Parse an ONNX message. Raises BrokenModel if `onnx` is not installed, or ValueError for invalid data."""
    onnx = _import_onnx()
    try:
        model: ModelProto = onnx.ModelProto.FromString(data)
    except import_module("google.protobuf.message").Error as error:
        raise ValueError(str(error)) from error
    return model


def _import_onnx() -> Any:
    """Import `onnx` only when it is needed, because the import is slow. Raises BrokenModel if it is not installed."""
    try:
        return import_module("onnx")
    except ImportError as error:
        raise BrokenModel("the package onnx is not installed; install it with pip install 'stackseg[onnx]'.") from error


def _read_model(model: ModelProto) -> Model:
    graph: GraphProto = model.graph
    if not model.HasField("graph"):
        raise ValueError("the file contains no graph")
    if graph.sparse_initializer:
        raise BrokenModel("the graph has sparse tensors, which are not supported.")
    versions = {entry.domain: entry.version for entry in model.opset_import}
    tensors = {tensor.name: _read_tensor(tensor) for tensor in graph.initializer}
    inputs = map(_read_tensor_info, graph.input)
    return Model(
        versions.get("", versions.get("ai.onnx", 0)),
        tuple(map(_read_node, graph.node)),
        tensors,
        # Before IR version 4, initializers were also listed as inputs.
        tuple(info for info in inputs if info.name not in tensors),
        tuple(map(_read_tensor_info, graph.output)),
        {entry.key: entry.value for entry in model.metadata_props},
    )


def _read_node(node: NodeProto) -> Node:
    attributes = {attribute.name: _read_attribute(attribute) for attribute in node.attribute}
    return Node(node.op_type, node.domain, tuple(node.input), tuple(node.output), attributes)


def _read_attribute(attribute: AttributeProto) -> Any:
    """Return a number, string, array or tuple of numbers, or None for types that no supported operator uses."""
    value = _import_onnx().helper.get_attribute_value(attribute)
    if attribute.type == attribute.TENSOR:
        return _read_tensor(value)
    if attribute.type == attribute.STRING:
        return str(value, "utf-8")
    if attribute.type in {attribute.INTS, attribute.FLOATS}:
        return tuple(value)
    return value if attribute.type in {attribute.INT, attribute.FLOAT} else None


def _read_tensor(tensor: TensorProto) -> Array:
    if tensor.data_type not in DATA_TYPES:
        raise BrokenModel(f"the tensor {tensor.name!r} has the data type {tensor.data_type}, which is not supported.")
    if tensor.data_location == tensor.EXTERNAL:
        raise BrokenModel(f"the tensor {tensor.name!r} is stored in another file; import the model to embed it.")
    if min(tensor.dims, default=0) < 0:
        raise ValueError(f"the tensor {tensor.name!r} of shape {list(tensor.dims)} has a negative size")
    array: Array = _import_onnx().numpy_helper.to_array(tensor)
    return array.astype(np.float32) if tensor.data_type == BFLOAT16 else array


def _read_tensor_info(info: ValueInfoProto) -> TensorInfo:
    tensor = info.type.tensor_type
    shape: Sequence[Any] = tensor.shape.dim
    sizes = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in shape)
    return TensorInfo(info.name, tensor.elem_type, sizes if tensor.HasField("shape") else None)
