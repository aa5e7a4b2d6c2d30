"""Read labels that somebody has made elsewhere: a TIFF, or NumPy's .npy, also within gzip. For the sandbox's child."""

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
from service.formats.placement import Extract, Placement

_GZIP, _NPY = b"\x1f\x8b", b"\x93NUMPY"
_TYPES = {"uint8", "uint16", "uint32", "int32"}
# A header states three numbers; numpy.load refuses longer ones than this, too.
_MAX_HEADER_BYTES = 10_000
_BLOCK_BYTES = 2**20
_SAVE = "save them as uint16 or uint32, as with labels.astype('uint32')."


def extract(file: int, shape: Size, make_output: Callable[[int], int]) -> Extract:
    """Locate labels of one channel in an open file, or decode them to another one, as `stack_reader.extract` does.

    `file` is a descriptor, which is closed. `shape` (Z, Y, X) is that of the stack which they belong to: nothing is
    decoded of labels with another one. Raises BadFile, BadParameter, and what `stack_reader.extract` raises.
    """
    start = os.pread(file, len(_NPY), 0)
    if start == _NPY or start.startswith(_GZIP):
        with os.fdopen(file, "rb") as stream:
            if start == _NPY:
                return _describe(_place(stream, shape), decoded=False)
            return _decompress(stream, shape, make_output)
    return _extract_tiff(file, shape, make_output)


def _extract_tiff(file: int, shape: Size, make_output: Callable[[int], int]) -> Extract:
    limit = 4 * math.prod(shape)
    try:
        selection = _choose_axes(file, shape, limit)
        located = stack_reader.extract_all(file, selection, limit, make_output)
    except TooLarge as error:
        raise BadParameter(
            f"The labels are larger than the stack, {'x'.join(map(str, shape))} (ZYX), or have more than 32 bits;"
            f" {_SAVE}"
        ) from error
    placement = located.placement
    if placement.shape[0] > 1:
        raise BadParameter(f"The labels have {placement.shape[0]} channels; send one.")
    _check(np.dtype(placement.dtype), placement.shape[1:], shape)
    return located


def _choose_axes(file: int, shape: Size, limit: int) -> Selection:
    """Return how to read labels, whose planes most programs save as if they were channels or time points.

    `file` stays open. What has the three dimensions of the stack is labels of its planes, whatever the file calls them.
    """
    planes = Selection(axes="ZYX")
    try:
        fits = stack_reader.inspect(file, planes, limit, keep=True).shape == (1, *shape)
    except RequestError:
        fits = False
    os.lseek(file, 0, os.SEEK_SET)
    return planes if fits else Selection()


def _describe(placement: Placement, *, decoded: bool) -> Extract:
    return Extract(placement, voxel_size=None, channels=("",), notes=(), decoded=decoded)


def _place(stream: IO[bytes], shape: Size) -> Placement:
    """Parse the header of .npy, and return the place of the pixels after it. Raises BadFile and BadParameter."""
    header: tuple[tuple[int, ...], bool, np.dtype[Any]]
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(stream, _MAX_HEADER_BYTES)
        else:
            header = np.lib.format.read_array_header_2_0(stream, _MAX_HEADER_BYTES)
    except (ValueError, EOFError) as error:
        raise BadFile(f"The .npy file cannot be read: {error}") from error
    stored, fortran_order, dtype = header
    _check(dtype, stored, shape)
    if fortran_order and min(sorted(shape)[1:]) > 1:
        raise BadFile("The .npy file is in Fortran order; save numpy.ascontiguousarray(labels).")
    return replace(Placement.dense(dtype, (1, *shape)), offset=stream.tell())


def _check(dtype: np.dtype[Any], stored: tuple[int, ...], shape: Size) -> None:
    if stored != shape:
        text = "x".join(map(str, stored)) or "a single number"
        raise BadParameter(
            f"The labels are {text} and the selected part of the stack is {'x'.join(map(str, shape))} (ZYX); send"
            " labels of the whole stack, with region= where only a part of it was corrected."
        )
    if dtype.name not in _TYPES:
        raise BadFile(f"The labels are {dtype.name}; {_SAVE}")


def _decompress(stream: IO[bytes], shape: Size, make_output: Callable[[int], int]) -> Extract:
    try:
        with cast("IO[bytes]", gzip.GzipFile(fileobj=stream)) as content:
            if content.read(len(_NPY)) != _NPY:
                raise BadFile("Within gzip labels are read as .npy alone; send a TIFF as it is, it may be compressed.")
            content.seek(0)
            placement = replace(_place(content, shape), offset=0)
            with os.fdopen(make_output(placement.nbytes), "r+b", buffering=0) as output:
                _copy(content, output, placement.nbytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadFile(f"The gzip stream is cut short or damaged: {error}") from error
    return _describe(placement, decoded=True)


def _copy(content: IO[bytes], output: IO[bytes], nbytes: int) -> None:
    left = nbytes
    while left:
        block = content.read(min(left, _BLOCK_BYTES))
        if not block:
            raise EOFError(f"{left} bytes are missing")
        view = memoryview(block)
        while view:
            view = view[output.write(view) or 0 :]
        left -= len(block)
