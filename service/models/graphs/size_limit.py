"""Limits to the sizes of tensors and of whole numbers, for what files of others compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from service.core.errors import BrokenModel

# Most elements of a value: as float32 they take 8 GiB, and a file asks for any number in a few bytes.
MAX_ELEMENTS = 2**31
# What an operator raises that does not fit its arguments, or that no shape can be told of before it runs.
_MISFIT = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, AttributeError)


def check_elements(shape: Sequence[int]) -> None:
    """Raise BrokenModel where a value of this shape has more than `MAX_ELEMENTS`."""
    if math.prod(shape) > MAX_ELEMENTS:
        raise BrokenModel(f"makes a value of {tuple(shape)}, too large for a part of a network.")


def multiply(a: Any, b: Any) -> Any:
    """Return `a * b`. Raise OverflowError for a whole number that no size can be: a few products make it endless."""
    product = a * b
    if isinstance(product, int) and product.bit_length() > 64:
        raise OverflowError("a size of more than 64 bits")
    return product


@contextmanager
def limit_sizes() -> Iterator[None]:
    """Raise BrokenModel, as long as the context lasts, for an operator of torch whose result would be too large.

    Each operator runs without numbers first, so that no memory is taken for what is refused.
    """
    with _SizeLimit():  # type: ignore[no-untyped-call]
        yield


class _SizeLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for result in _compute_without_numbers(func, args, kwargs):
            check_elements(result.shape)
        return func(*args, **kwargs)


def _compute_without_numbers(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the results of an operator as meta tensors, none where it cannot run without numbers."""
    args, kwargs = tree_map_only(Tensor, _to_meta, (args, kwargs))
    if any(each.name == "device" for each in func._schema.arguments):
        kwargs["device"] = torch.device("meta")
    try:
        return [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    except _MISFIT:
        return []


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
