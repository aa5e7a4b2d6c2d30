"""Read uploaded labels from a TIFF, or from a .npy file with or without gzip. Runs in the confined child process."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any, cast

import numpy as np

from service.core.errors import BadFile, BadParameter, RequestError, TooLarge
from service.core.quantities import Size
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.placement import Placement, VolumeLocation

_GZIP_MAGIC = b"\x1f\x8b"
_NPY_MAGIC = b"\x93NUMPY"
_LABEL_DTYPES = {"uint8", "uint16", "uint32", "int32"}
# The header of a three-dimensional array is short. `numpy.load` has the same limit.
_MAX_HEADER_BYTES = 10_000
_COPY_BLOCK_BYTES = 2**20
_SAVE_ADVICE = "Save the labels as uint16 or uint32, for example with labels.astype('uint32')."


def extract(file: int, shape: Size, make_output: Callable[[int], int]) -> VolumeLocation:
    """Locate labels with a single channel in an open file, or decode them to another file, like `stack_reader.extract`.

    `file` is a descriptor, which is closed. `shape` (Z, Y, X) is the shape of the stack to which the labels belong.
    Labels of a different shape are not decoded. Raises BadFile, BadParameter, and the same errors as
    `stack_reader.extract`.
    """
    magic = os.pread(file, len(_NPY_MAGIC), 0)
    if magic == _NPY_MAGIC or magic.startswith(_GZIP_MAGIC):
        with os.fdopen(file, "rb") as stream:
            if magic == _NPY_MAGIC:
                return _make_location(_parse_npy_header(stream, shape), is_decoded=False)
            return _decompress(stream, shape, make_output)
    return _extract_tiff(file, shape, make_output)


def _extract_tiff(file: int, shape: Size, make_output: Callable[[int], int]) -> VolumeLocation:
    limit_bytes = 4 * math.prod(shape)
    try:
        selection = _choose_axes(file, shape, limit_bytes)
        location = stack_reader.extract_any_size(file, selection, limit_bytes, make_output)
    except TooLarge as error:
        raise BadParameter(
            f"The labels are larger than the stack of shape {'x'.join(map(str, shape))} (ZYX), or have more than 32"
            f" bits per voxel. {_SAVE_ADVICE}"
        ) from error
    placement = location.placement
    if placement.shape[0] > 1:
        raise BadParameter(f"The labels have {placement.shape[0]} channels. Upload labels with a single channel.")
    _check_labels(np.dtype(placement.dtype), placement.shape[1:], shape)
    return location


def _choose_axes(file: int, shape: Size, limit_bytes: int) -> Selection:
    """Choose the axes of labels. Many programs save the planes of labels as channels or time points.

    A three-dimensional array with the shape of the stack is read as ZYX, regardless of its metadata. `file` stays open.
    """
    zyx_selection = Selection(axes="ZYX", is_labels=True)
    try:
        has_stack_shape = stack_reader.inspect(file, zyx_selection, limit_bytes, keep_open=True).shape == (1, *shape)
    except RequestError:
        has_stack_shape = False
    os.lseek(file, 0, os.SEEK_SET)
    return zyx_selection if has_stack_shape else Selection(is_labels=True)


def _make_location(placement: Placement, *, is_decoded: bool) -> VolumeLocation:
    return VolumeLocation(placement, voxel_size=None, channels=("",), notes=(), is_decoded=is_decoded)


def _parse_npy_header(stream: IO[bytes], shape: Size) -> Placement:
    """Parse the header of a .npy file and return the placement of the pixels after it. Raises BadFile, BadParameter."""
    header: tuple[tuple[int, ...], bool, np.dtype[Any]]
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(stream, _MAX_HEADER_BYTES)
        else:
            header = np.lib.format.read_array_header_2_0(stream, _MAX_HEADER_BYTES)
    except (ValueError, EOFError) as error:
        raise BadFile(f"The .npy file cannot be read: {error}") from error
    stored_shape, is_fortran_order, dtype = header
    _check_labels(dtype, stored_shape, shape)
    if is_fortran_order and min(sorted(shape)[1:]) > 1:
        raise BadFile("The .npy file is in Fortran order. Save numpy.ascontiguousarray(labels) instead.")
    return replace(Placement.make_dense(dtype, (1, *shape)), offset=stream.tell())


def _check_labels(dtype: np.dtype[Any], stored_shape: tuple[int, ...], shape: Size) -> None:
    if stored_shape != shape:
        shape_text = "x".join(map(str, stored_shape)) or "()"
        raise BadParameter(
            f"The labels have the shape {shape_text}, but the selected part of the stack has the shape"
            f" {'x'.join(map(str, shape))} (ZYX)."
            " Upload labels of the whole stack, and set region= if only a part of them was corrected."
        )
    if dtype.name not in _LABEL_DTYPES:
        raise BadFile(f"Labels of type {dtype.name} are not supported. {_SAVE_ADVICE}")


def _decompress(stream: IO[bytes], shape: Size, make_output: Callable[[int], int]) -> VolumeLocation:
    try:
        with cast("IO[bytes]", gzip.GzipFile(fileobj=stream)) as content:
            if content.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
                raise BadFile(
                    "Only .npy labels may be compressed with gzip. Upload a TIFF without gzip. Compression within the"
                    " TIFF is supported."
                )
            content.seek(0)
            placement = replace(_parse_npy_header(content, shape), offset=0)
            with os.fdopen(make_output(placement.nbytes), "r+b", buffering=0) as output:
                _copy_bytes(content, output, placement.nbytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadFile(f"The gzip stream is truncated or damaged: {error}") from error
    return _make_location(placement, is_decoded=True)


def _copy_bytes(content: IO[bytes], output: IO[bytes], nbytes: int) -> None:
    remaining_bytes = nbytes
    while remaining_bytes:
        block = content.read(min(remaining_bytes, _COPY_BLOCK_BYTES))
        if not block:
            raise EOFError(f"{remaining_bytes} bytes are missing")
        view = memoryview(block)
        while view:
            view = view[output.write(view) or 0 :]
        remaining_bytes -= len(block)
