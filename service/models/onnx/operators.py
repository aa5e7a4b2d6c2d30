"""The operators of ONNX that networks are made of, as functions of torch.

What flows between them are tensors, and what is computed with sizes: numbers, and tuples of numbers in place of
tensors with one axis. So a graph whose sizes are computed is one that `torch.compile` sees through.
Source of what they mean: the ONNX operator specification, opset 9 to 23.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Value = Any
"""A tensor, a number or a tuple of numbers; None for an input that is left out."""
Ints = Sequence[int]


class Refused(ValueError):
    """What a call asks for and is not done, beginning with the name of the attribute or input."""


def _each(function: Callable[[Any, Any], Any], a: Value, b: Value) -> Value:
    """Element by element; a number goes with every element of a tuple."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return function(*(_tensor(value, b if value is a else a) for value in (a, b)))
    if not isinstance(a, tuple) and not isinstance(b, tuple):
        return function(a, b)
    length = max(len(value) for value in (a, b) if isinstance(value, tuple))
    one, other = (
        value if isinstance(value, tuple) and len(value) > 1 else repeat(_number(value), length) for value in (a, b)
    )
    return tuple(map(function, one, other))


def _tensor(value: Value, like: Value) -> Value:
    """A tuple as a tensor on the device of `like`; tensors and numbers as they are."""
    return torch.tensor(value, device=like.device) if isinstance(value, tuple) else value


def _number(value: Value) -> Any:
    """Of a tuple or tensor with one element that element."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        (value,) = value
    return value


def _ints(value: Value, name: str) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            raise Refused(f"{name}: computed from pixels.")
        value = value.flatten().tolist()
    return tuple(map(int, value)) if isinstance(value, tuple | list) else (int(value),)


def _divided(a: Value, b: Value) -> Value:
    """Whole numbers are cut to a whole number, towards zero."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a / b)
    if all(isinstance(v, int) or (isinstance(v, Tensor) and not v.is_floating_point()) for v in (a, b)):
        return torch.div(a, b, rounding_mode="trunc")
    return a / b


def _all_of(function: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    return lambda *values: reduce(partial(_each, function), values)


def _least(a: Value, b: Value) -> Value:
    return torch.minimum(*_both(a, b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else min(a, b)


def _most(a: Value, b: Value) -> Value:
    return torch.maximum(*_both(a, b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else max(a, b)


def _both(a: Value, b: Value) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    return torch.as_tensor(a).to(like), torch.as_tensor(b).to(like)


def where(condition: Value, a: Value, b: Value) -> Value:
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    if not isinstance(condition, tuple):
        return a if condition else b
    length = len(condition)
    one, other = (
        value if isinstance(value, tuple) and len(value) > 1 else (_number(value),) * length for value in (a, b)
    )
    return tuple(first if chosen else second for chosen, first, second in zip(condition, one, other, strict=True))


def cast(x: Value, to: int) -> Value:
    """Between kinds of numbers; a network's floating point stays what the network computes in."""
    floating = to in {1, 10, 11, 16}
    if isinstance(x, Tensor):
        if floating:
            return x if x.is_floating_point() else x.float()
        return x.bool() if to == 9 else x.long()
    kind = float if floating else bool if to == 9 else int
    return tuple(map(kind, x)) if isinstance(x, tuple) else kind(x)


def shape(x: Value, start: int = 0, end: int | None = None) -> Value:
    return tuple(x.shape if isinstance(x, Tensor) else (len(x),))[start:end]


def gather(x: Value, indices: Value, axis: int = 0) -> Value:
    if not isinstance(x, Tensor):
        return tuple(x[int(i)] for i in indices) if isinstance(indices, tuple) else x[int(indices)]
    if isinstance(indices, Tensor):
        raise Refused("indices: computed from pixels.")
    if isinstance(indices, tuple):
        return x.index_select(axis, torch.tensor(indices, device=x.device) % x.shape[axis])
    return x.select(axis, int(indices))


def concat(*values: Value, axis: int) -> Value:
    if any(isinstance(value, Tensor) for value in values):
        return torch.cat(values, axis)
    return tuple(item for value in values for item in (value if isinstance(value, tuple) else (value,)))


def reshape(x: Value, shape: Value, allowzero: int = 0) -> Value:
    if not isinstance(x, Tensor):
        whole = x if isinstance(x, tuple) else (x,)
        if len(shape) < 2:
            return whole if shape else _number(x)
        x = torch.tensor(whole)
    sizes = _ints(shape, "shape")
    return x.reshape([x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(sizes)])


def unsqueeze(x: Value, axes: Value) -> Value:
    if not isinstance(x, Tensor):
        return (x,)
    places = _ints(axes, "axes")
    rank = x.dim() + len(places)
    for axis in sorted(axis % rank for axis in places):
        x = x.unsqueeze(axis)
    return x


def squeeze(x: Value, axes: Value = None) -> Value:
    if not isinstance(x, Tensor):
        return _number(x)
    return x.squeeze() if axes is None else x.squeeze(_ints(axes, "axes"))


def slices(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    first, last = _ints(starts, "starts"), _ints(ends, "ends")
    places = tuple(range(len(first))) if axes is None else _ints(axes, "axes")
    by = (1,) * len(first) if steps is None else _ints(steps, "steps")
    if not isinstance(x, Tensor):
        return x[first[0] : last[0] if last[0] > -(2**31) else None : by[0]]
    for axis, start, stop, step in zip(places, first, last, by, strict=True):
        length = x.shape[axis]
        positions = range(length)[start : stop if stop >= -length else None : step] if step < 0 else None
        if positions is None:
            whole = [slice(None)] * (axis % x.dim())
            x = x[(*whole, slice(start, stop, step))]
        else:
            x = x.index_select(axis, torch.tensor(list(positions), device=x.device))
    return x


def split(x: Tensor, split: Value = None, *, axis: int = 0, num_outputs: int = 0) -> Value:
    if split is not None:
        return torch.split(x, list(_ints(split, "split")), axis)
    if not num_outputs:
        raise Refused("split: is not stated.")
    return torch.split(x, -(-x.shape[axis] // num_outputs), axis)


def expand(x: Value, shape: Value) -> Value:
    sizes = _ints(shape, "shape")
    if not isinstance(x, Tensor):
        return tuple(_number(x) for _ in range(sizes[0])) if sizes else x
    return x.expand(torch.broadcast_shapes(x.shape, sizes))  # type: ignore[no-untyped-call]


def constant_of_shape(shape: Value, value: Any = 0.0) -> Value:
    sizes = _ints(shape, "input")
    number = value.item() if isinstance(value, np.ndarray) else value
    return (number,) * sizes[0] if len(sizes) == 1 else torch.full(sizes, number)


def span(start: Value, limit: Value, delta: Value) -> Value:
    return tuple(range(*(int(_number(value)) for value in (start, limit, delta))))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return functional.softmax(x, axis)


def softmax_flattened(x: Tensor, axis: int = 1) -> Tensor:
    """As until opset 12: over all axes from `axis` on."""
    return functional.softmax(x.flatten(axis), -1).reshape(x.shape)


def clip(x: Value, min: Value = None, max: Value = None) -> Value:  # noqa: A002
    low, high = (None if bound is None else _number(bound) for bound in (min, max))
    if low is None and high is None:
        return x
    if isinstance(x, Tensor):
        return x.clamp(low, high)
    raise Refused("input: sizes.")


def reduced(
    function: Callable[..., Tensor],
    x: Tensor,
    axes: Value = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Tensor:
    if not axes and noop_with_empty_axes:
        return x
    places = tuple(range(x.dim())) if not axes else _ints(axes, "axes")
    made: Tensor = function(x, dim=places, keepdim=bool(keepdims))
    return made


def product(x: Value, _axes: Value = None, *, keepdims: int = 1) -> Value:
    """Of sizes, along their one axis."""
    if isinstance(x, Tensor):
        raise Refused("data: pixels.")
    whole = math.prod(x)
    return (whole,) if keepdims else whole


def pad(x: Tensor, pads: Value, value: Value = None, axes: Value = None, *, mode: str = "constant") -> Tensor:
    amounts = _ints(pads, "pads")
    half = len(amounts) // 2
    places = tuple(range(half)) if axes is None else tuple(a % x.dim() for a in _ints(axes, "axes"))
    before, after = dict(zip(places, amounts[:half], strict=True)), dict(zip(places, amounts[half:], strict=True))
    ends = [(before.get(axis, 0), after.get(axis, 0)) for axis in range(x.dim())]
    if mode == "constant":
        return functional.pad(x, [n for end in reversed(ends) for n in end], value=float(_number(value) or 0))
    modes = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if any(map(any, ends[:2])) or mode not in modes:
        raise Refused(f"mode: {mode} of batch or channels.")
    return functional.pad(x, [n for end in reversed(ends[2:]) for n in end], mode=modes[mode])


def resize(x: Tensor, _roi: Value = None, scales: Value = None, sizes: Value = None, *, way: str) -> Tensor:
    """`way`: mode of torch that places samples as the file says, found while the graph was built."""
    edges: Any = None
    factors: Any = None
    if sizes is not None and sizes != ():
        edges = _ints(sizes, "sizes")[-3:]
    else:
        stated = tuple(float(scale) for scale in scales)
        if any(scale != 1 for scale in stated[:-3]):
            raise Refused("scales: of batch or channels.")
        factors = stated[-3:]
    corners = True if way == "corners" else None if way.startswith("nearest") else False
    how = "trilinear" if way in {"corners", "trilinear"} else way
    return functional.interpolate(x, edges, factors, how, align_corners=corners)


def max_pool(x: Tensor, *, ends: Ints, **settings: Any) -> Tensor:
    """`ends`: as of `functional.pad`, with what never wins."""
    pooled: Tensor = functional.max_pool3d(functional.pad(x, list(ends), value=-math.inf), **settings)
    return pooled


def average_pool(x: Tensor, **settings: Any) -> Tensor:
    return functional.avg_pool3d(x, **settings)


def global_pool(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    pooled: Tensor = function(x, dim=list(range(2, x.dim())), keepdim=True)
    return pooled


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def group_norm(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    """Scale and bias of every channel, or until opset 20 of every group."""
    if len(scale) == x.shape[1]:
        return functional.group_norm(x, num_groups, scale, bias, epsilon)
    scale, bias = (value.repeat_interleave(x.shape[1] // num_groups) for value in (scale, bias))
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


def layer_norm(x: Tensor, scale: Tensor, bias: Value = None, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, x.shape[axis % x.dim() :], scale, bias, epsilon)


def prelu(x: Tensor, slope: Value) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(x, approximate=approximate)


def gemm(a: Tensor, b: Tensor, c: Value = None, **settings: Any) -> Tensor:
    """`alpha`, `beta`, `transA`, `transB` as in the specification."""
    left, right = (x.T if settings.get(f"trans{name}") else x for x, name in ((a, "A"), (b, "B")))
    product: Tensor = settings.get("alpha", 1.0) * (left @ right)
    return product if c is None else product + settings.get("beta", 1.0) * c


def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return functional.leaky_relu(x, alpha)


def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.elu(x, alpha)


def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def transpose(x: Tensor, *, perm: Ints = ()) -> Tensor:
    return x.permute(tuple(perm) or tuple(reversed(range(x.dim()))))


def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    return x.reshape(math.prod(x.shape[:axis]), -1)


def unchanged(x: Value, *_others: Value) -> Value:
    return x


def _one(function: Callable[[Any], Any], of_number: Callable[[Any], Any] | None = None) -> Callable[[Value], Value]:
    """A function of every element; `of_number` where sizes are computed with it."""

    def call(x: Value) -> Value:
        if isinstance(x, Tensor):
            return function(x)
        if of_number is None:
            raise Refused("input: sizes.")
        return tuple(map(of_number, x)) if isinstance(x, tuple) else of_number(x)

    return call


OPERATORS: dict[str, Callable[..., Value]] = {
    "Relu": _one(functional.relu, lambda n: max(n, 0)),
    "Sigmoid": _one(torch.sigmoid),
    "Tanh": _one(torch.tanh),
    "Exp": _one(torch.exp),
    "Log": _one(torch.log),
    "Sqrt": _one(torch.sqrt, math.sqrt),
    "Abs": _one(torch.abs, abs),
    "Neg": _one(torch.neg, operator.neg),
    "Erf": _one(torch.erf),
    "Floor": _one(torch.floor, math.floor),
    "Ceil": _one(torch.ceil, math.ceil),
    "Round": _one(torch.round, round),
    "Reciprocal": _one(torch.reciprocal, lambda n: 1 / n),
    "Softplus": _one(functional.softplus),
    "HardSwish": _one(functional.hardswish),
    "Mish": _one(functional.mish),
    "Not": _one(torch.logical_not, operator.not_),
    "Identity": unchanged,
    "Dropout": unchanged,
    "LeakyRelu": leaky_relu,
    "Elu": elu,
    "HardSigmoid": hard_sigmoid,
    "PRelu": prelu,
    "Gelu": gelu,
    "Clip": clip,
    "Softmax": softmax,
    "Add": partial(_each, operator.add),
    "Sub": partial(_each, operator.sub),
    "Mul": partial(_each, operator.mul),
    "Div": partial(_each, _divided),
    "Pow": partial(_each, operator.pow),
    "Max": _all_of(_most),
    "Min": _all_of(_least),
    "Sum": _all_of(operator.add),
    "Equal": partial(_each, operator.eq),
    "Greater": partial(_each, operator.gt),
    "Less": partial(_each, operator.lt),
    "GreaterOrEqual": partial(_each, operator.ge),
    "LessOrEqual": partial(_each, operator.le),
    "Where": where,
    "MatMul": operator.matmul,
    "Gemm": gemm,
    "Cast": cast,
    "Shape": shape,
    "Gather": gather,
    "Concat": concat,
    "Reshape": reshape,
    "Flatten": flatten,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Slice": slices,
    "Split": split,
    "Expand": expand,
    "ConstantOfShape": constant_of_shape,
    "Range": span,
    "Pad": pad,
    "Resize": resize,
    "MaxPool": max_pool,
    "GlobalAveragePool": partial(global_pool, torch.mean),
    "GlobalMaxPool": partial(global_pool, torch.amax),
    "ReduceMean": partial(reduced, torch.mean),
    "ReduceSum": partial(reduced, torch.sum),
    "ReduceMax": partial(reduced, torch.amax),
    "ReduceMin": partial(reduced, torch.amin),
    "ReduceProd": product,
    "InstanceNormalization": instance_norm,
    "GroupNormalization": group_norm,
    "LayerNormalization": layer_norm,
}
"""What is honoured besides convolutions and batch normalisation, which become modules, and constants."""
