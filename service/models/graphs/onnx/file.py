"""ONNX files by the library `onnx`, an optional dependency (`stackseg[onnx]`); no other file is opened by name.

`onnx` would look for tensors in other files wherever a file says, so that such tensors never reach it.
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

ReadPart = Callable[[str, int, int | None], bytes]
"""Name of a file in the model's folder, offset and length (None: to the end) -> bytes of that part."""

# onnx.TensorProto.DataType: float, float16, double, bfloat16; and whole numbers and truths.
FLOATING_POINT = frozenset([1, 10, 11, 16])
BFLOAT16 = 16
IMAGE_RANK = 5
DATA_TYPES = FLOATING_POINT | frozenset([2, 3, 4, 5, 6, 7, 9])
# Protocol buffers cannot be larger.
MAX_BYTES = 2**31 - 1
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError)


@dataclass(frozen=True)
class Node:
    """A node of the graph. `inputs` and `outputs` are names of values, "" for an optional one that is left out."""

    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the graph. A size of `shape` is None where any size fits; `shape` is None if not stated."""

    name: str
    dtype: int
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Model:
    """Content of a file: version of the standard operators, nodes, stored tensors by name, inputs and outputs."""

    opset: int
    nodes: tuple[Node, ...]
    tensors: dict[str, Array]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...] = field(default=())


def read(path: Path) -> Model:
    """Read a file that has all tensors inside. Raise BrokenModel, naming what is refused, or that `onnx` is missing."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise BrokenModel(f"{path}: cannot be read: {error.strerror}") from error
    return parse(data, path)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file. Raise BrokenModel, before any is read, where there are more than a message has."""
    if path.stat().st_size > MAX_BYTES:
        raise BrokenModel(f"{path}: is larger than 2 GiB, which no ONNX file is.")
    return path.read_bytes()


def parse(data: bytes, path: Path) -> Model:
    """Read the bytes of a file; errors name `path`. Raise BrokenModel."""
    try:
        return _read_model(_decode(data))
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise BrokenModel(f"{path}: cannot be read as ONNX: {error}") from error


def find_image(model: Model) -> TensorInfo:
    """Return the only input, [batch, channel, z, y, x] of floating point. Raise BrokenModel for any other."""
    if len(model.inputs) != 1:
        raise BrokenModel(f"graph.input: it takes {len(model.inputs)} inputs; exactly one image can be given.")
    (image,) = model.inputs
    if image.shape is not None and len(image.shape) != IMAGE_RANK:
        raise BrokenModel(
            f"graph.input {image.name}: {len(image.shape)} axes; only batch, channel, z, y, x can be honoured."
        )
    if image.dtype not in FLOATING_POINT:
        raise BrokenModel(f"graph.input {image.name}: data type {image.dtype}; only floating point can be honoured.")
    if image.shape is not None and image.shape[0] not in {None, 1}:
        raise BrokenModel(
            f"graph.input {image.name}: a batch of {image.shape[0]}; export it with one window, or any number."
        )
    return image


def embed_external_data(data: bytes, read_part: ReadPart) -> bytes:
    """Return a file with its external tensors inside, which `read_part` reads from other files.

    Raise BrokenModel or ValueError for a file that cannot be read, or that would be larger than 2 GiB.
    """
    model = _decode(data)
    size = len(data)
    for tensor in model.graph.initializer:
        if tensor.data_location == tensor.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            length = int(entries["length"]) if "length" in entries else None
            stored = read_part(entries["location"], int(entries.get("offset", "0")), length)
            size += len(stored)
            if size > MAX_BYTES:
                raise ValueError("with its tensors inside it is larger than 2 GiB")
            tensor.raw_data = stored
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    whole: bytes = model.SerializeToString()
    return whole


def _decode(data: bytes) -> ModelProto:
    """Parse a message. Raise BrokenModel where `onnx` is not installed, ValueError for what is no message."""
    onnx = _import_onnx()
    try:
        model: ModelProto = onnx.ModelProto.FromString(data)
    except import_module("google.protobuf.message").Error as error:
        raise ValueError(str(error)) from error
    return model


def _import_onnx() -> Any:
    """Import `onnx`, which takes a while, when a file needs it. Raise BrokenModel where it is not installed."""
    try:
        return import_module("onnx")
    except ImportError as error:
        raise BrokenModel("onnx is not installed; add it with pip install 'stackseg[onnx]'.") from error


def _read_model(model: ModelProto) -> Model:
    graph: GraphProto = model.graph
    if not model.HasField("graph"):
        raise ValueError("there is no graph in it")
    if graph.sparse_initializer:
        raise BrokenModel("it has sparse tensors, which cannot be honoured.")
    versions = {entry.domain: entry.version for entry in model.opset_import}
    tensors = {tensor.name: _read_tensor(tensor) for tensor in graph.initializer}
    infos = map(_read_tensor_info, graph.input)
    return Model(
        versions.get("", versions.get("ai.onnx", 0)),
        tuple(map(_read_node, graph.node)),
        tensors,
        # Until IR version 4 stored tensors were inputs too.
        tuple(info for info in infos if info.name not in tensors),
        tuple(map(_read_tensor_info, graph.output)),
    )


def _read_node(node: NodeProto) -> Node:
    attributes = {attribute.name: _read_attribute(attribute) for attribute in node.attribute}
    return Node(node.op_type, node.domain, tuple(node.input), tuple(node.output), attributes)


def _read_attribute(attribute: AttributeProto) -> Any:
    """Return a number, a text, an array or a tuple of numbers; None for others, which no supported operator has."""
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
        raise BrokenModel(f"a tensor {tensor.name!r} of data type {tensor.data_type} cannot be honoured.")
    if tensor.data_location == tensor.EXTERNAL:
        raise BrokenModel(f"the tensor {tensor.name!r} lies in another file; import the model to take it in.")
    if min(tensor.dims, default=0) < 0:
        raise ValueError(f"the tensor {tensor.name!r} of {list(tensor.dims)} has a negative size")
    array: Array = _import_onnx().numpy_helper.to_array(tensor)
    return array.astype(np.float32) if tensor.data_type == BFLOAT16 else array


def _read_tensor_info(info: ValueInfoProto) -> TensorInfo:
    tensor = info.type.tensor_type
    shape: Sequence[Any] = tensor.shape.dim
    sizes = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in shape)
    return TensorInfo(info.name, tensor.elem_type, sizes if tensor.HasField("shape") else None)
