"""Reader of ONNX files that needs no library and opens no other file.

The format is protocol buffers: a message has numbered fields, each a number, or bytes that may be a message again.
Field numbers: `onnx.proto3` of the ONNX specification (IR version 3 and later).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from service.core.errors import BrokenModel
from service.core.volume import Array

ReadPart = Callable[[str, int, int | None], bytes]
"""Name of a file in the model's folder, offset and length (None: to the end) -> bytes of that part."""

# onnx.TensorProto.DataType: the dtype, and the field of numbers that are not stored as raw bytes.
DTYPES: dict[int, tuple[str, int]] = {
    1: ("<f4", 4),
    2: ("u1", 5),
    3: ("i1", 5),
    4: ("<u2", 5),
    5: ("<i2", 5),
    6: ("<i4", 5),
    7: ("<i8", 7),
    9: ("?", 5),
    10: ("<f2", 5),
    11: ("<f8", 10),
}
FLOATING_POINT = frozenset([1, 10, 11])
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
EXTERNAL = 1

Value = int | memoryview
Message = dict[int, list[Value]]


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
    """Read a file that has all tensors inside. Raise BrokenModel, naming what is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BrokenModel(f"{path}: cannot be read: {error.strerror}") from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> Model:
    """Read the bytes of a file; errors name `path`. Raise BrokenModel."""
    try:
        return _read_model(memoryview(data))
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise BrokenModel(f"{path}: cannot be read as ONNX: {error}") from error


def embed_external_data(data: bytes, read_part: ReadPart) -> bytes:
    """Return a file with its external tensors inside, which `read_part` reads from other files."""
    changed = []
    for number, wire, value in _iter_fields(memoryview(data)):
        inner = (
            [
                (n, w, _embed_tensor(v, read_part) if n == 5 and isinstance(v, memoryview) else v)
                for n, w, v in _iter_fields(value)
            ]
            if number == 7 and isinstance(value, memoryview)
            else None
        )
        changed.append((number, wire, value if inner is None else _write_fields(inner)))
    return _write_fields(changed)


def _embed_tensor(tensor: memoryview, read_part: ReadPart) -> bytes | memoryview:
    fields = list(_iter_fields(tensor))
    message = _read_message(tensor)
    if _get_integer(message, 14) != EXTERNAL:
        return tensor
    entries = {_get_text(entry, 1): _get_text(entry, 2) for entry in map(_read_message, _get_views(message, 13))}
    length = int(entries["length"]) if "length" in entries else None
    stored = read_part(entries["location"], int(entries.get("offset", "0")), length)
    kept = [(number, wire, value) for number, wire, value in fields if number not in {9, 13, 14}]
    return _write_fields([*kept, (9, BYTES, stored)])


def _read_model(data: memoryview) -> Model:
    message = _read_message(data)
    if 7 not in message:
        raise ValueError("there is no graph in it")
    versions = {_get_text(entry, 1): _get_integer(entry, 2) for entry in map(_read_message, _get_views(message, 8))}
    graph = _read_message(_get_views(message, 7)[0])
    if 15 in graph:
        raise BrokenModel("it has sparse tensors, which cannot be honoured.")
    tensors = dict(map(_read_named_tensor, map(_read_message, _get_views(graph, 5))))
    infos = tuple(map(_read_tensor_info, map(_read_message, _get_views(graph, 11))))
    return Model(
        versions.get("", versions.get("ai.onnx", 0)),
        tuple(map(_read_node, map(_read_message, _get_views(graph, 1)))),
        tensors,
        # Until IR version 4 stored tensors were inputs too.
        tuple(info for info in infos if info.name not in tensors),
        tuple(map(_read_tensor_info, map(_read_message, _get_views(graph, 12)))),
    )


def _read_node(node: Message) -> Node:
    attributes = dict(map(_read_attribute, map(_read_message, _get_views(node, 5))))
    inputs, outputs = (tuple(str(view, "utf-8") for view in _get_views(node, number)) for number in (1, 2))
    return Node(_get_text(node, 4), _get_text(node, 7), inputs, outputs, attributes)


def _read_attribute(message: Message) -> tuple[str, Any]:
    """Return name and value; the value of a graph is None, as no supported operator has one."""
    kind = _get_integer(message, 20)
    value: Any = None
    if kind == 1:
        value = _get_floats(message, 2)[0]
    elif kind == 2:
        value = _get_integer(message, 3)
    elif kind == 3:
        value = _get_text(message, 4)
    elif kind == 4:
        value = _read_tensor(_read_message(_get_views(message, 5)[0]))
    elif kind == 6:
        value = tuple(_get_floats(message, 7))
    elif kind == 7:
        value = tuple(_get_integers(message, 8))
    return _get_text(message, 1), value


def _read_named_tensor(message: Message) -> tuple[str, Array]:
    return _get_text(message, 8), _read_tensor(message)


def _read_tensor(message: Message) -> Array:
    shape, kind = tuple(_get_integers(message, 1)), _get_integer(message, 2)
    if kind not in DTYPES:
        raise BrokenModel(f"a tensor {_get_text(message, 8)!r} of data type {kind} cannot be honoured.")
    if _get_integer(message, 14) == EXTERNAL:
        raise BrokenModel(f"the tensor {_get_text(message, 8)!r} lies in another file; import the model to take it in.")
    dtype, number = DTYPES[kind]
    if 9 in message:
        values = np.frombuffer(_get_views(message, 9)[0], dtype)
    elif dtype in {"<f4", "<f8"}:
        values = np.array(_get_floats(message, number, dtype), dtype)
    elif dtype == "<f2":
        values = np.array(_get_integers(message, number), np.uint16).view(dtype)
    else:
        values = np.array(_get_integers(message, number)).astype(dtype)
    if min(shape, default=0) < 0 or values.size != math.prod(shape):
        raise ValueError(f"the tensor {_get_text(message, 8)!r} of {shape} has {values.size} numbers")
    return values.reshape(shape)


def _read_tensor_info(message: Message) -> TensorInfo:
    described = _read_message(_get_views(message, 2)[0]) if 2 in message else {}
    tensor = _read_message(_get_views(described, 1)[0]) if 1 in described else {}
    shape = None
    if 2 in tensor:
        dims = [_read_message(view) for view in _get_views(_read_message(_get_views(tensor, 2)[0]), 1)]
        shape = tuple(_get_integer(dim, 1) if 1 in dim else None for dim in dims)
    return TensorInfo(_get_text(message, 1), _get_integer(tensor, 1), shape)


def _read_message(data: memoryview) -> Message:
    message: Message = {}
    for number, _, value in _iter_fields(data):
        message.setdefault(number, []).append(value)
    return message


def _iter_fields(data: memoryview) -> Iterator[tuple[int, int, Value]]:
    """Yield number, wire type and value of every field, in the order of the file."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        if wire == VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, wire, value
            continue
        if wire == BYTES:
            length, at = _read_varint(data, at)
        elif wire in {FIXED64, FIXED32}:
            length = 8 if wire == FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {wire}")
        if at + length > len(data):
            raise ValueError("it is cut short")
        yield key >> 3, wire, data[at : at + length]
        at += length


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a number of seven bits per byte at `at`, and return it with the position after it."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (2**64 - 1), at
    raise ValueError("a number has no end")


def _write_fields(fields: list[tuple[int, int, Any]]) -> bytes:
    parts: list[bytes | memoryview] = []
    for number, wire, value in fields:
        parts.append(_write_varint(number << 3 | wire))
        if wire == VARINT:
            parts.append(_write_varint(value))
        else:
            parts += [_write_varint(len(value)), value] if wire == BYTES else [value]
    return b"".join(parts)


def _write_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _get_views(message: Message, number: int) -> list[memoryview]:
    views = message.get(number, [])
    if not all(isinstance(view, memoryview) for view in views):
        raise ValueError(f"field {number} is a number")
    return [view for view in views if isinstance(view, memoryview)]


def _get_text(message: Message, number: int) -> str:
    views = _get_views(message, number)
    return str(views[-1], "utf-8") if views else ""


def _get_integers(message: Message, number: int) -> list[int]:
    """Return repeated numbers, stored one by one or packed, as signed integers of 64 bits."""
    numbers: list[int] = []
    for value in message.get(number, []):
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _read_varint(value, at)
            numbers.append(one)
    return [value - 2**64 if value >= 2**63 else value for value in numbers]


def _get_integer(message: Message, number: int) -> int:
    values = _get_integers(message, number)
    return values[-1] if values else 0


def _get_floats(message: Message, number: int, dtype: str = "<f4") -> list[float]:
    return [float(value) for view in _get_views(message, number) for value in np.frombuffer(view, dtype)]
