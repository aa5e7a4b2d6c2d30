"""Values of ONNX graphs, and elementwise operators on these values.

Sizes are numbers or tuples of numbers; all other values are tensors. A tuple stands for a tensor with one axis. Sizes
are computed with Python numbers so that `torch.compile` can capture the whole graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from service.models.graphs.graph_module import multiply
from service.models.network import MAX_ELEMENTS

Value = Any
"""A tensor, a number or a tuple of numbers, or None for an omitted input."""


# Maximum number of elements in a tuple. Tuples hold sizes, axes and indices, which are few.
MAX_TUPLE_ELEMENTS = 2**16


class UnsupportedCall(ValueError):
    """A call that is not supported. The message begins with the name of the attribute or input that causes it."""


def _apply_elementwise(function: Callable[[Any, Any], Any], a: Value, b: Value) -> Value:
    """Apply a function of two numbers element by element. A number is combined with every element of a tuple."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return function(*(_to_tensor_like(value, b if value is a else a) for value in (a, b)))
    if not isinstance(a, tuple) and not isinstance(b, tuple):
        return function(a, b)
    length = max(len(value) for value in (a, b) if isinstance(value, tuple))
    return tuple(map(function, _broadcast(a, length), _broadcast(b, length)))


def _broadcast(value: Value, length: int) -> tuple[Any, ...]:
    """Return a tuple of several numbers unchanged, and repeat a single number `length` times."""
    return value if isinstance(value, tuple) and len(value) > 1 else (to_number(value),) * length


def _to_tensor_like(value: Value, reference: Value) -> Value:
    """Return a tuple as a tensor on the device of `reference`, and other values unchanged."""
    return torch.tensor(value, device=reference.device) if isinstance(value, tuple) else value


def to_tensor(value: Value) -> Tensor:
    """Return numbers as a tensor, or a tensor unchanged."""
    return value if isinstance(value, Tensor) else torch.tensor(value)


def to_number(value: Value) -> Any:
    """Return the only element of a tuple or tensor, or a number unchanged."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        (value,) = value
    return value


def to_ints(value: Value, name: str) -> tuple[int, ...]:
    """Return sizes or axes as integers. Raises UnsupportedCall, with the input name, for floating-point tensors."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            raise UnsupportedCall(f"{name}: sizes and indices computed from pixels are not supported.")
        value = value.flatten().tolist()
    return tuple(map(int, value)) if isinstance(value, tuple | list) else (int(value),)


def check_size(sizes: Iterable[int], name: str, limit: int = MAX_ELEMENTS) -> None:
    """Raise UnsupportedCall with the name of the input if a value with these sizes exceeds the limit."""
    if math.prod(sizes) > limit:
        raise UnsupportedCall(f"{name}: the result would have more than {limit} elements.")


def flatten_padding(padding: Iterable[tuple[int, int]]) -> list[int]:
    """Return the padding before and after each axis in the order of `functional.pad`, the last axis first."""
    return [voxels for pair in reversed(list(padding)) for voxels in pair]


def _divide(a: Value, b: Value) -> Value:
    """Divide `a` by `b`. Quotients of integers are rounded toward zero, as specified by ONNX."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a / b)
    if all(isinstance(v, int) or (isinstance(v, Tensor) and not v.is_floating_point()) for v in (a, b)):
        # In torch, division with rounding toward zero crashes the process for the lowest integer divided by -1.
        return (torch.as_tensor(a) - torch.fmod(torch.as_tensor(a), torch.as_tensor(b))) // b
    return a / b


def _power(a: Value, b: Value) -> Value:
    """Return `a` to the power of `b`. Raises OverflowError for integer results of more than about 1024 bits."""
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() * b > 2**10:
        raise OverflowError("a power has more than 1024 bits")
    return a**b


def _modulo(a: Value, b: Value, *, fmod: int = 0) -> Value:
    """Return the remainder, with the sign of `b`, or with the sign of `a` if `fmod` is set."""
    return torch.fmod(*map(torch.as_tensor, (a, b))) if fmod else _apply_elementwise(operator.mod, a, b)


def _make_reduction(function: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    """Return a function that reduces any number of values with the elementwise `function`."""

    def call(*values: Value) -> Value:
        return reduce(partial(_apply_elementwise, function), values)

    return call


def _select_extremum(
    tensor_function: Callable[..., Tensor], number_function: Callable[..., Any], a: Value, b: Value
) -> Value:
    """Apply `tensor_function` to both values as tensors if either is a tensor; otherwise apply `number_function`."""
    for reference in (a, b):
        if isinstance(reference, Tensor):
            return tensor_function(torch.as_tensor(a).to(reference), torch.as_tensor(b).to(reference))
    return number_function(a, b)


def _make_unary_operator(
    tensor_function: Callable[[Any], Any], number_function: Callable[[Any], Any] | None = None
) -> Callable[[Value], Value]:
    """Return an operator that applies `tensor_function` to tensors, and `number_function` to numbers and tuples."""

    def call(x: Value) -> Value:
        if isinstance(x, Tensor):
            return tensor_function(x)
        if number_function is None:
            raise UnsupportedCall("input: only tensors are supported, not shape values.")
        return tuple(map(number_function, x)) if isinstance(x, tuple) else number_function(x)

    return call


def _where(condition: Value, a: Value, b: Value) -> Value:
    """Select elements of `a` where `condition` is true, and elements of `b` elsewhere."""
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    if not isinstance(condition, tuple):
        return a if condition else b
    choices = zip(condition, _broadcast(a, len(condition)), _broadcast(b, len(condition)), strict=True)
    return tuple(first if is_first else second for is_first, first, second in choices)


def _cast(x: Value, to: int) -> Value:
    """Convert `x` to the data type `to`. Floating-point tensors keep their precision, which the engine chooses."""
    is_floating_point = to in {1, 10, 11, 16}
    if isinstance(x, Tensor):
        if is_floating_point:
            return x if x.is_floating_point() else x.float()
        return x.bool() if to == 9 else x.long()
    number_type = float if is_floating_point else bool if to == 9 else int
    return tuple(map(number_type, x)) if isinstance(x, tuple) else number_type(x)


ELEMENTWISE: dict[str, Callable[..., Value]] = {
    "Relu": _make_unary_operator(functional.relu, lambda n: max(n, 0)),
    "Sigmoid": _make_unary_operator(torch.sigmoid),
    "Tanh": _make_unary_operator(torch.tanh),
    "Exp": _make_unary_operator(torch.exp),
    "Log": _make_unary_operator(torch.log),
    "Sqrt": _make_unary_operator(torch.sqrt, math.sqrt),
    "Abs": _make_unary_operator(torch.abs, abs),
    "Neg": _make_unary_operator(torch.neg, operator.neg),
    "Erf": _make_unary_operator(torch.erf),
    "Floor": _make_unary_operator(torch.floor, math.floor),
    "Ceil": _make_unary_operator(torch.ceil, math.ceil),
    "Round": _make_unary_operator(torch.round, round),
    "Reciprocal": _make_unary_operator(torch.reciprocal, lambda n: 1 / n),
    "Softplus": _make_unary_operator(functional.softplus),
    "HardSwish": _make_unary_operator(functional.hardswish),
    "Mish": _make_unary_operator(functional.mish),
    "Not": _make_unary_operator(torch.logical_not, operator.not_),
    "Add": partial(_apply_elementwise, operator.add),
    "Sub": partial(_apply_elementwise, operator.sub),
    "Mul": partial(_apply_elementwise, multiply),
    "Div": partial(_apply_elementwise, _divide),
    "Pow": partial(_apply_elementwise, _power),
    "Mod": _modulo,
    "Max": _make_reduction(partial(_select_extremum, torch.maximum, max)),
    "Min": _make_reduction(partial(_select_extremum, torch.minimum, min)),
    "Sum": _make_reduction(operator.add),
    "Equal": partial(_apply_elementwise, operator.eq),
    "Greater": partial(_apply_elementwise, operator.gt),
    "Less": partial(_apply_elementwise, operator.lt),
    "GreaterOrEqual": partial(_apply_elementwise, operator.ge),
    "LessOrEqual": partial(_apply_elementwise, operator.le),
    "Where": _where,
    "Cast": _cast,
}
