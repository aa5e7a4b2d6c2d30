"""ONNX operators implemented with torch, with the inputs and attributes specified by the ONNX opsets 9 to 23.

Values are tensors of any shape, or numbers and tuples of numbers if the graph computes sizes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from service.models.graphs.graph_module import multiply
from service.models.graphs.onnx.elementwise import (
    ELEMENTWISE,
    MAX_TUPLE_ELEMENTS,
    UnsupportedCall,
    Value,
    check_size,
    flatten_padding,
    to_ints,
    to_number,
    to_tensor,
)
from service.models.network import MAX_ELEMENTS

Ints = Sequence[int]


def shape(x: Value, start: int = 0, end: int | None = None) -> Value:
    return tuple(x.shape if isinstance(x, Tensor) else (len(x),))[start:end]


def gather(x: Value, indices: Value, axis: int = 0) -> Value:
    if not isinstance(x, Tensor) and not isinstance(indices, Tensor):
        return tuple(x[int(i)] for i in indices) if isinstance(indices, tuple) else x[int(indices)]
    x = to_tensor(x)
    if isinstance(indices, Tensor) and indices.is_floating_point():
        raise UnsupportedCall("indices: indices computed from pixels are not supported.")
    if not isinstance(indices, Tensor | tuple):
        return x.select(axis, int(indices))
    positions = torch.as_tensor(indices, device=x.device) % x.shape[axis]
    axis %= x.dim()
    return x.index_select(axis, positions.flatten()).reshape(*x.shape[:axis], *positions.shape, *x.shape[axis + 1 :])


def concat(*values: Value, axis: int) -> Value:
    if any(isinstance(value, Tensor) for value in values):
        return torch.cat([to_tensor(value) for value in values], axis)
    numbers = [value if isinstance(value, tuple) else (value,) for value in values]
    check_size((sum(map(len, numbers)),), "inputs", MAX_TUPLE_ELEMENTS)
    return tuple(itertools.chain.from_iterable(numbers))


def reshape(x: Value, shape: Value, allowzero: int = 0) -> Value:
    if not isinstance(x, Tensor):
        numbers = x if isinstance(x, tuple) else (x,)
        if len(shape) < 2:
            return numbers if shape else to_number(x)
        x = torch.tensor(numbers)
    sizes = to_ints(shape, "shape")
    return x.reshape([x.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(sizes)])


def unsqueeze(x: Value, axes: Value) -> Value:
    new_axes = to_ints(axes, "axes")
    if not isinstance(x, Tensor) and not isinstance(x, tuple) and len(new_axes) == 1:
        return (x,)
    x = to_tensor(x)
    rank = x.dim() + len(new_axes)
    for axis in sorted(axis % rank for axis in new_axes):
        x = x.unsqueeze(axis)
    return x


def squeeze(x: Value, axes: Value = None) -> Value:
    if not isinstance(x, Tensor):
        return to_number(x)
    return x.squeeze() if axes is None else x.squeeze(to_ints(axes, "axes"))


def slice_axes(x: Value, starts: Value, ends: Value, axes: Value = None, steps: Value = None) -> Value:
    """Slice axes. Negative steps, which torch does not support in slices, become a selection of indices."""
    start_indices, end_indices = to_ints(starts, "starts"), to_ints(ends, "ends")
    sliced_axes = range(len(start_indices)) if axes is None else to_ints(axes, "axes")
    strides = (1,) * len(start_indices) if steps is None else to_ints(steps, "steps")
    if not isinstance(x, Tensor):
        return x[start_indices[0] : end_indices[0] if end_indices[0] > -(2**31) else None : strides[0]]
    for axis, start, stop, step in zip(sliced_axes, start_indices, end_indices, strides, strict=True):
        if step < 0:
            length = x.shape[axis]
            indices = range(length)[start : stop if stop >= -length else None : step]
            x = x.index_select(axis, torch.tensor(list(indices), dtype=torch.int64, device=x.device))
        else:
            x = x[(*[slice(None)] * (axis % x.dim()), slice(start, stop, step))]
    return x


def split(x: Tensor, split: Value = None, *, axis: int = 0, num_outputs: int = 0) -> Value:
    if split is not None:
        return torch.split(x, list(to_ints(split, "split")), axis)
    if not num_outputs:
        raise UnsupportedCall("split: neither split nor num_outputs is specified.")
    return torch.split(x, -(-x.shape[axis] // num_outputs), axis)


def expand(x: Value, shape: Value) -> Value:
    sizes = to_ints(shape, "shape")
    is_tuple = not isinstance(x, Tensor) and len(sizes) < 2
    check_size(sizes, "shape", MAX_TUPLE_ELEMENTS if is_tuple else MAX_ELEMENTS)
    if is_tuple:
        return x if not sizes or (isinstance(x, tuple) and len(x) > 1) else (to_number(x),) * sizes[0]
    x = to_tensor(x)
    return x.expand(torch.broadcast_shapes(x.shape, sizes))  # type: ignore[no-untyped-call]


def tile(x: Value, repeats: Value) -> Value:
    repeat_counts = to_ints(repeats, "repeats")
    x = to_tensor(x)
    check_size((x.numel(), *repeat_counts), "repeats")
    return x.repeat(repeat_counts)


def einsum(*operands: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *operands)


def gather_nd(x: Value, indices: Value, *, batch_dims: int = 0) -> Tensor:
    """Return the parts of `x` at the positions specified by the last axis of `indices`."""
    if batch_dims:
        raise UnsupportedCall(f"batch_dims: {batch_dims} is not supported.")
    return to_tensor(x)[_split_indices(indices)]


def scatter_nd(x: Value, indices: Value, updates: Value, *, reduction: str = "none") -> Tensor:
    """Return a copy of `x` with `updates` at the positions specified by the last axis of `indices`."""
    if reduction not in {"none", "add"}:
        raise UnsupportedCall(f"reduction: {reduction} is not supported.")
    data = to_tensor(x)
    return data.index_put(_split_indices(indices), to_tensor(updates).to(data), accumulate=reduction == "add")


def _split_indices(indices: Value) -> tuple[Tensor, ...]:
    """Return the indices along each axis. Raises UnsupportedCall for floating-point indices."""
    positions = to_tensor(indices)
    if positions.is_floating_point():
        raise UnsupportedCall("indices: indices computed from pixels are not supported.")
    return positions.unbind(-1)


def constant_of_shape(shape: Value, value: Any = 0.0) -> Value:
    sizes = to_ints(shape, "input")
    check_size(sizes, "input", MAX_TUPLE_ELEMENTS if len(sizes) == 1 else MAX_ELEMENTS)
    number = value.item() if isinstance(value, np.ndarray) else value
    return (number,) * sizes[0] if len(sizes) == 1 else torch.full(sizes, number)


def make_range(start: Value, limit: Value, delta: Value) -> Value:
    numbers = range(*(int(to_number(value)) for value in (start, limit, delta)))
    check_size((len(numbers),), "limit", MAX_TUPLE_ELEMENTS)
    return tuple(numbers)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return functional.softmax(x, axis)


def softmax_flattened(x: Tensor, axis: int = 1) -> Tensor:
    """Compute softmax over all axes starting at `axis`, as defined before opset 13."""
    return functional.softmax(x.flatten(axis), -1).reshape(x.shape)


def clip(x: Value, lowest: Value = None, highest: Value = None) -> Value:
    low, high = (None if bound is None else to_number(bound) for bound in (lowest, highest))
    if low is None and high is None:
        return x
    if isinstance(x, Tensor):
        return x.clamp(low, high)
    raise UnsupportedCall("input: only tensors are supported, not shape values.")


def reduce_axes(
    function: Callable[..., Tensor],
    x: Tensor,
    axes: Value = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Tensor:
    if not axes and noop_with_empty_axes:
        return x
    reduced_axes = to_ints(axes, "axes") if axes else tuple(range(x.dim()))
    result: Tensor = function(x, dim=reduced_axes, keepdim=bool(keepdims))
    return result


def multiply_sizes(x: Value, _axes: Value = None, *, keepdims: int = 1) -> Value:
    """Return the product of a tuple of sizes."""
    if isinstance(x, Tensor):
        raise UnsupportedCall("data: only the dimensions of a shape are supported, not other tensors.")
    product = reduce(multiply, x, 1)
    return (product,) if keepdims else product


def pad(x: Tensor, pads: Value, value: Value = None, axes: Value = None, *, mode: str = "constant") -> Tensor:
    amounts = to_ints(pads, "pads")
    axis_count = len(amounts) // 2
    padded_axes = range(axis_count) if axes is None else [axis % x.dim() for axis in to_ints(axes, "axes")]
    padding_by_axis = dict(zip(padded_axes, zip(amounts[:axis_count], amounts[axis_count:], strict=True), strict=True))
    padding = [padding_by_axis.get(axis, (0, 0)) for axis in range(x.dim())]
    if mode == "constant":
        return functional.pad(x, flatten_padding(padding), value=float(to_number(value) or 0))
    modes = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if any(map(any, padding[:2])) or mode not in modes:
        raise UnsupportedCall(f"mode: {mode} is not supported, or it is not supported for the padded axes.")
    return functional.pad(x, flatten_padding(padding[2:]), mode=modes[mode])


def resize(x: Tensor, _roi: Value = None, scales: Value = None, sizes: Value = None, *, torch_mode: str) -> Tensor:
    """Interpolate a volume. `torch_mode` is a mode of `functional.interpolate`, or "corners" for aligned corners."""
    output_size: Any = None
    factors: Any = None
    if sizes is not None and sizes != ():
        output_size = to_ints(sizes, "sizes")[-3:]
    else:
        factors = tuple(map(float, scales))
        if any(factor != 1 for factor in factors[:-3]):
            raise UnsupportedCall("scales: scaling of the batch or channel axis is not supported.")
        factors = factors[-3:]
    if torch_mode.startswith("nearest"):
        return functional.interpolate(x, output_size, factors, torch_mode)
    return functional.interpolate(x, output_size, factors, "trilinear", align_corners=torch_mode == "corners")


def pool_globally(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    pooled: Tensor = function(x, dim=list(range(2, x.dim())), keepdim=True)
    return pooled


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def group_norm(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    """Normalize groups of channels. Scale and bias are per channel, or per group before opset 21."""
    if len(scale) != x.shape[1]:
        scale, bias = (value.repeat_interleave(x.shape[1] // num_groups) for value in (scale, bias))
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


def layer_norm(x: Tensor, scale: Tensor, bias: Value = None, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, x.shape[axis % x.dim() :], scale, bias, epsilon)


def prelu(x: Tensor, slope: Value) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(x, approximate=approximate)


def gemm(  # noqa: PLR0913
    a: Tensor,
    b: Tensor,
    c: Value = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose_a: int = 0,
    transpose_b: int = 0,
) -> Tensor:
    """Return alpha * a @ b + beta * c, optionally with `a` or `b` transposed."""
    product = alpha * ((a.T if transpose_a else a) @ (b.T if transpose_b else b))
    return product if c is None else product + beta * c


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


OPERATORS: dict[str, Callable[..., Value]] = ELEMENTWISE | {
    "LeakyRelu": leaky_relu,
    "Elu": elu,
    "HardSigmoid": hard_sigmoid,
    "PRelu": prelu,
    "Gelu": gelu,
    "Clip": clip,
    "Softmax": softmax,
    "MatMul": operator.matmul,
    "Gemm": gemm,
    "Shape": shape,
    "Gather": gather,
    "Concat": concat,
    "Reshape": reshape,
    "Flatten": flatten,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Slice": slice_axes,
    "Split": split,
    "Expand": expand,
    "Tile": tile,
    "Einsum": einsum,
    "GatherND": gather_nd,
    "ScatterND": scatter_nd,
    "ConstantOfShape": constant_of_shape,
    "Range": make_range,
    "Pad": pad,
    "Resize": resize,
    "GlobalAveragePool": partial(pool_globally, torch.mean),
    "GlobalMaxPool": partial(pool_globally, torch.amax),
    "ReduceMean": partial(reduce_axes, torch.mean),
    "ReduceSum": partial(reduce_axes, torch.sum),
    "ReduceMax": partial(reduce_axes, torch.amax),
    "ReduceMin": partial(reduce_axes, torch.amin),
    "ReduceProd": multiply_sizes,
    "InstanceNormalization": instance_norm,
    "GroupNormalization": group_norm,
    "LayerNormalization": layer_norm,
}
"""Supported operators by name, except those that `network` converts to modules or constants."""

for _name, _function in OPERATORS.items():
    if isinstance(_function, partial):
        # The generated code of a graph refers to functions by name.
        _function.__dict__["__name__"] = _name
