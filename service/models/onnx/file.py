"""ONNX files: what their bytes say, read without anything of `onnx` and without following what they point to.

The format is protocol buffers: messages of numbered fields, each a number, or bytes that may be a message again.
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

Read = Callable[[str, int, int | None], bytes]
"""Name of a file beside the model, offset and length of a part of it (None: to its end) -> those bytes."""

# onnx.TensorProto.DataType: the dtype, and the field that holds numbers that are not stored as raw bytes.
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
NAMES = {1: "float32", 10: "float16", 11: "float64"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
EXTERNAL = 1

Value = int | memoryview
Message = dict[int, list[Value]]


@dataclass(frozen=True)
class Call:
    """A node of the graph: names of values that go in ("" where one is left out) and come out."""

    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """An input or output. `shape`: a number, or None where the file leaves the size open; None: not stated at all."""

    name: str
    dtype: int
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Model:
    """A file. `opset`: version of the standard operators; `tensors`: what is stored, by name."""

    opset: int
    calls: tuple[Call, ...]
    tensors: dict[str, Array]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...] = field(default=())


def read(path: Path) -> Model:
    """Everything of a file with all tensors inside. Raises BrokenModel, naming what is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BrokenModel(f"{path}: cannot be read: {error.strerror}") from error
    return parse(data, path)


def parse(data: bytes, path: Path) -> Model:
    """The same of its bytes; `path` is what errors call them."""
    try:
        return _model(memoryview(data))
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise BrokenModel(f"{path}: cannot be read as ONNX: {error}") from error


def embedded(data: bytes, beside: Read) -> bytes:
    """The same model with those tensors inside that it keeps in files beside it, which `beside` reads."""
    changed = []
    for number, wire, value in _fields(memoryview(data)):
        inner = (
            [(n, w, _whole(v, beside) if n == 5 and isinstance(v, memoryview) else v) for n, w, v in _fields(value)]
            if number == 7 and isinstance(value, memoryview)
            else None
        )
        changed.append((number, wire, value if inner is None else _written(inner)))
    return _written(changed)


def _whole(tensor: memoryview, beside: Read) -> bytes | memoryview:
    fields = list(_fields(tensor))
    message = _message(tensor)
    if _integer(message, 14) != EXTERNAL:
        return tensor
    entries = {_text(entry, 1): _text(entry, 2) for entry in map(_message, _views(message, 13))}
    length = int(entries["length"]) if "length" in entries else None
    stored = beside(entries["location"], int(entries.get("offset", "0")), length)
    kept = [(number, wire, value) for number, wire, value in fields if number not in {9, 13, 14}]
    return _written([*kept, (9, BYTES, stored)])


def _model(data: memoryview) -> Model:
    message = _message(data)
    if 7 not in message:
        raise ValueError("there is no graph in it")
    versions = {_text(entry, 1): _integer(entry, 2) for entry in map(_message, _views(message, 8))}
    graph = _message(_views(message, 7)[0])
    if 15 in graph:
        raise BrokenModel("it has sparse tensors, which cannot be honoured.")
    tensors = dict(map(_named, map(_message, _views(graph, 5))))
    places = tuple(map(_place, map(_message, _views(graph, 11))))
    return Model(
        versions.get("", versions.get("ai.onnx", 0)),
        tuple(map(_call, map(_message, _views(graph, 1)))),
        tensors,
        # Until IR version 4 stored tensors were inputs too.
        tuple(place for place in places if place.name not in tensors),
        tuple(map(_place, map(_message, _views(graph, 12)))),
    )


def _call(node: Message) -> Call:
    attributes = dict(map(_attribute, map(_message, _views(node, 5))))
    inputs, outputs = (tuple(str(view, "utf-8") for view in _views(node, number)) for number in (1, 2))
    return Call(_text(node, 4), _text(node, 7), inputs, outputs, attributes)


def _attribute(message: Message) -> tuple[str, Any]:
    """Name and value. Graphs within graphs come as None: no operator that has them is on the list."""
    kind = _integer(message, 20)
    value: Any = None
    if kind == 1:
        value = _floats(message, 2)[0]
    elif kind == 2:
        value = _integer(message, 3)
    elif kind == 3:
        value = _text(message, 4)
    elif kind == 4:
        value = _tensor(_message(_views(message, 5)[0]))
    elif kind == 6:
        value = tuple(_floats(message, 7))
    elif kind == 7:
        value = tuple(_integers(message, 8))
    return _text(message, 1), value


def _named(message: Message) -> tuple[str, Array]:
    return _text(message, 8), _tensor(message)


def _tensor(message: Message) -> Array:
    shape, kind = tuple(_integers(message, 1)), _integer(message, 2)
    if kind not in DTYPES:
        raise BrokenModel(f"a tensor {_text(message, 8)!r} of data type {kind} cannot be honoured.")
    if _integer(message, 14) == EXTERNAL:
        raise BrokenModel(f"the tensor {_text(message, 8)!r} lies in another file; import the model to take it in.")
    dtype, number = DTYPES[kind]
    if 9 in message:
        values = np.frombuffer(_views(message, 9)[0], dtype)
    elif dtype in {"<f4", "<f8"}:
        values = np.array(_floats(message, number, dtype), dtype)
    elif dtype == "<f2":
        values = np.array(_integers(message, number), np.uint16).view(dtype)
    else:
        values = np.array(_integers(message, number)).astype(dtype)
    if min(shape, default=0) < 0 or values.size != math.prod(shape):
        raise ValueError(f"the tensor {_text(message, 8)!r} of {shape} has {values.size} numbers")
    return values.reshape(shape)


def _place(message: Message) -> Place:
    described = _message(_views(message, 2)[0]) if 2 in message else {}
    tensor = _message(_views(described, 1)[0]) if 1 in described else {}
    shape = None
    if 2 in tensor:
        dims = [_message(view) for view in _views(_message(_views(tensor, 2)[0]), 1)]
        shape = tuple(_integer(dim, 1) if 1 in dim else None for dim in dims)
    return Place(_text(message, 1), _integer(tensor, 1), shape)


def _message(data: memoryview) -> Message:
    message: Message = {}
    for number, _, value in _fields(data):
        message.setdefault(number, []).append(value)
    return message


def _fields(data: memoryview) -> Iterator[tuple[int, int, Value]]:
    """Number, kind and value of every field, in the order of the file."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, wire, value
            continue
        if wire == BYTES:
            length, at = _varint(data, at)
        elif wire in {FIXED64, FIXED32}:
            length = 8 if wire == FIXED64 else 4
        else:
            raise ValueError(f"a field of kind {wire}")
        if at + length > len(data):
            raise ValueError("it is cut short")
        yield key >> 3, wire, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits per byte, and where it ends."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (2**64 - 1), at
    raise ValueError("a number has no end")


def _written(fields: list[tuple[int, int, Any]]) -> bytes:
    parts: list[bytes | memoryview] = []
    for number, wire, value in fields:
        parts.append(_as_varint(number << 3 | wire))
        if wire == VARINT:
            parts.append(_as_varint(value))
        else:
            parts += [_as_varint(len(value)), value] if wire == BYTES else [value]
    return b"".join(parts)


def _as_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _views(message: Message, number: int) -> list[memoryview]:
    views = message.get(number, [])
    if not all(isinstance(view, memoryview) for view in views):
        raise ValueError(f"field {number} is a number")
    return [view for view in views if isinstance(view, memoryview)]


def _text(message: Message, number: int) -> str:
    views = _views(message, number)
    return str(views[-1], "utf-8") if views else ""


def _integers(message: Message, number: int) -> list[int]:
    """Repeated numbers, whether one by one or packed, as signed ones of 64 bits."""
    found: list[int] = []
    for value in message.get(number, []):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return [value - 2**64 if value >= 2**63 else value for value in found]


def _integer(message: Message, number: int) -> int:
    values = _integers(message, number)
    return values[-1] if values else 0


def _floats(message: Message, number: int, dtype: str = "<f4") -> list[float]:
    return [float(value) for view in _views(message, number) for value in np.frombuffer(view, dtype)]
