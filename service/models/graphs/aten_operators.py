"""Functions that the calls of a `torch.export` graph refer to by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from service.core.errors import BrokenModel
from service.models.graphs.allowed_operators import ATEN_OPERATORS, TRUSTED_ONLY_OPERATORS
from service.models.graphs.graph_module import multiply

# Operators that untrusted graphs may call. The last five occur only in graphs exported by torch.export.
ALLOWED_OPERATORS = ATEN_OPERATORS - TRUSTED_ONLY_OPERATORS | {
    "sym_size",
    "lift_fresh_copy",
    "detach_",
    "alias",
    "index",
}
ALLOWED_RESULT_TYPES = frozenset(["Tensor", "List[Tensor]"])
SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "floordiv", "mod", "neg", "getitem", "eq", "ne", "ge", "gt", "le", "lt")
} | {"_operator.mul": multiply}
# Checks of sizes and data types. They return nothing, the network is checked when it is loaded, and the engine chooses
# the data type of its tensors.
ASSERTIONS = frozenset(
    f"torch.ops.aten.{name}"
    for name in (
        "_assert_tensor_metadata.default",
        "_assert_scalar.default",
        "_assert_async.msg",
        "sym_constrain_range.default",
        "sym_constrain_range_for_size.default",
    )
)
# Blocks of calls within `torch.autocast` or `torch.no_grad`. The engine chooses the data type and needs no gradients.
BLOCKS = frozenset(["torch.ops.higher_order.wrap_with_autocast", "torch.ops.higher_order.wrap_with_set_grad_enabled"])
COPY = "torch.ops.aten._to_copy.default"
CONVERSIONS = frozenset(f"torch.ops.aten.to.{name}" for name in ("dtype", "device", "dtype_layout")) | {COPY}
TYPE_AS = "torch.ops.aten.type_as.default"
ZEROS = "torch.ops.aten.zeros.default"
# Maximum number of elements of a tensor that a graph creates from a shape.
MAX_CREATED_ELEMENTS = 2**28


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` converted to `dtype`. Floating-point tensors keep the precision, which the engine chooses."""
    return x if dtype.is_floating_point and x.is_floating_point() else x.to(dtype)


def convert_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of `x` converted to `dtype`, for graphs that modify tensors."""
    return x.clone() if dtype.is_floating_point and x.is_floating_point() else x.to(dtype, copy=True)


def make_zeros(image: Tensor, size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros on the device of the image. Floating-point tensors have its precision, which the engine chooses.

    Raises BrokenModel for more than `MAX_CREATED_ELEMENTS` elements.
    """
    if math.prod(size) > MAX_CREATED_ELEMENTS:
        raise BrokenModel(f"the graph creates a tensor of shape {tuple(size)}, which is too large.")
    return image.new_zeros(size, dtype=None if dtype is None or dtype.is_floating_point else dtype)


def find_operator(target: str, arguments: Mapping[str, Any]) -> OpOverload[..., Any]:
    """Return the operator for a name such as `torch.ops.aten.relu.default`.

    Raises BrokenModel if the operator is not allowed or does not accept the arguments.
    """
    prefix, _, qualified_name = target.rpartition("torch.ops.aten.")
    name, _, overload = qualified_name.partition(".")
    if (
        prefix
        or name not in ALLOWED_OPERATORS
        or qualified_name in TRUSTED_ONLY_OPERATORS
        or not overload.isidentifier()
    ):
        raise BrokenModel(
            f"the graph calls {target}, which is not allowed; see service/models/graphs/allowed_operators.py. Graphs "
            "after run_decompositions() are not supported; save the result of torch.export.export itself."
        )
    function = getattr(getattr(torch.ops.aten, name), overload)
    if not isinstance(function, OpOverload) or not _computes_tensors(function):
        raise BrokenModel(f"the graph calls {target}, which is not an operator that computes tensors.")
    _check_arguments(function, arguments)
    return function


def _check_arguments(function: OpOverload[..., Any], arguments: Mapping[str, Any]) -> None:
    types = {parameter.name: str(parameter.type) for parameter in function._schema.arguments}
    for name, value in arguments.items():
        if name not in types or (isinstance(value, str) and "str" not in types[name]):
            raise BrokenModel(f"torch.ops.{function} has no argument {name!r}, or this argument cannot be a string.")


def _computes_tensors(function: OpOverload[..., Any]) -> bool:
    """Return whether an operator computes tensors or sizes from tensors and does not write to `out` arguments.

    Other operators work on lists and strings of unlimited size, or overwrite tensors that other calls read.
    """
    schema = function._schema
    has_tensor = any("Tensor" in str(parameter.type) for parameter in schema.arguments)
    result_types = [str(result.type) for result in schema.returns]
    has_out = any(parameter.is_out for parameter in schema.arguments)
    return (
        has_tensor
        and not has_out
        and (schema.name == "aten::sym_size" or (bool(result_types) and ALLOWED_RESULT_TYPES.issuperset(result_types)))
    )
