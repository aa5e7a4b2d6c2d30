"""Input tensors: checks of datatype, shape and size, conversion of JSON values, and the header of a TIFF."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from service.api.http.uploads import make_too_large_error
from service.api.kserve.messages import InputTensor
from service.core.errors import BadParameter
from service.formats.tiff import writer as tiff_writer

# NumPy's little-endian dtypes by datatype.
DTYPES = {
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
# Axes of tensors by number of dimensions, unless the parameter `axes` specifies others.
AXES = {2: "YX", 3: "ZYX", 4: "CZYX"}


def get_dtype(tensor: InputTensor) -> np.dtype[Any]:
    """Return the dtype of a tensor. Raises BadParameter for a datatype that is not supported."""
    if tensor.datatype not in DTYPES:
        raise BadParameter(f"datatype: {tensor.datatype[:40]!r} is not supported. Use one of {', '.join(DTYPES)}.")
    return DTYPES[tensor.datatype]


def check_size(tensor: InputTensor, limit_bytes: int) -> int:
    """Return the size of a tensor in bytes.

    Raises TooLarge if it exceeds the limit, and BadParameter unless either `data` or matching binary data is given.
    """
    nbytes = math.prod(tensor.shape) * get_dtype(tensor).itemsize
    if nbytes > limit_bytes:
        raise make_too_large_error(limit_bytes)
    binary_bytes = tensor.parameters.binary_data_size
    if (binary_bytes is None) == (tensor.data is None):
        raise BadParameter("inputs: specify either `data` or the parameter `binary_data_size`.")
    if binary_bytes not in {None, nbytes}:
        raise BadParameter(
            f"binary_data_size: {tensor.datatype} values of shape {tensor.shape} have {nbytes} bytes, not"
            f" {binary_bytes}."
        )
    return nbytes


def make_tiff_header(tensor: InputTensor) -> bytes:
    """Return the bytes that turn the values of a tensor, if they follow, into an uncompressed TIFF."""
    return tiff_writer.make_uncompressed_header(tensor.shape, get_dtype(tensor), AXES.get(len(tensor.shape)))


def convert_values(tensor: InputTensor) -> bytes:
    """Convert the JSON values of a tensor to binary data. Raises BadParameter if they do not fit shape and datatype."""
    dtype, values = get_dtype(tensor), _flatten(tensor)
    # Types are compared because the booleans of Python are integers.
    if not set(map(type, values)) <= ({int} if dtype.kind in "iu" else {int, float}):
        raise BadParameter(f"data: the values must be numbers that {tensor.datatype} can represent.")
    try:
        # NumPy checks the range of integers, but not that of floats.
        numbers = np.array(values, dtype if dtype.kind in "iu" else np.float64)
    except OverflowError:
        numbers = None
    with np.errstate(over="ignore"):
        converted = None if numbers is None else numbers.astype(dtype)
    if numbers is None or converted is None or (np.isinf(converted) & np.isfinite(numbers)).any():
        raise BadParameter(f"data: some values are outside the range of {tensor.datatype}.")
    return converted.tobytes()


def _flatten(tensor: InputTensor) -> list[Any]:
    """Return the values of a tensor as a flat list.

    NumPy is not used, because it would not let other threads run while it reads a large number of nested lists. Raises
    BadParameter unless the values are a list of the right length, or nested lists of the right lengths.
    """
    data, count = tensor.data, math.prod(tensor.shape)
    is_nested = isinstance(data, list) and bool(data) and isinstance(data[0], list)
    values: list[Any] = [data]
    for length in tensor.shape if is_nested else [count]:
        if not all(isinstance(part, list) and len(part) == length for part in values):
            raise BadParameter(
                f"data: the values do not have the shape {tensor.shape}. Send a flat list of {count} values in C order,"
                " or nested lists."
            )
        values = list(itertools.chain.from_iterable(values))
    return values
