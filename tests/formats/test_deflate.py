"""Streams in C++ hold what was put in, for every reader of zlib's."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.formats.deflate import MAX_LINE_BYTES, Deflation


@pytest.fixture(scope="module")
def kernel() -> Deflation:
    made = Deflation()
    made.prepare()
    return made


def inflated(kernel: Deflation, pixels: NDArray[Any]) -> NDArray[Any]:
    found = kernel.compress(pixels)
    assert found is not None
    streams, ends = found
    assert len(streams) == ends[-1]
    data = [zlib.decompress(streams[a:b].tobytes()) for a, b in pairwise([0, *ends])]
    return np.frombuffer(b"".join(data), pixels.dtype).reshape(pixels.shape)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 70)),
    dtype=st.sampled_from(["uint8", "uint16", "uint32"]),
    kinds=st.sampled_from([1, 2, 5, 300, 2**32]),
    times=st.tuples(st.sampled_from([1, 3, 200]), st.sampled_from([1, 2, 150])),
)
def test_every_plane_comes_back(
    kernel: Deflation, seed: int, shape: tuple[int, int, int], dtype: str, kinds: int, times: tuple[int, int]
) -> None:
    """Noise, lines and columns that repeat, and repetitions of every length."""
    planes = np.random.default_rng(seed).integers(0, kinds, shape, np.uint32).astype(dtype)
    planes = planes.repeat(times[0], 1).repeat(times[1], 2)[:, :300, :500]
    np.testing.assert_array_equal(inflated(kernel, planes), planes)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_the_longest_lines_come_back_and_longer_ones_are_left_to_others(kernel: Deflation, dtype: str) -> None:
    width = MAX_LINE_BYTES // np.dtype(dtype).itemsize
    line = np.random.default_rng(0).integers(0, 256, (1, 1, width)).astype(dtype)
    # The line above, and one pixel beyond it, which is as far as a repetition may lie back.
    planes = np.concatenate((line, line, np.roll(line, 1), line), axis=1)
    np.testing.assert_array_equal(inflated(kernel, planes), planes)
    assert len((kernel.compress(planes) or ((), ()))[0]) < 2 * MAX_LINE_BYTES
    assert kernel.compress(np.zeros((1, 2, width + 1), dtype)) is None


def test_labels_that_are_no_block_of_memory_come_back(kernel: Deflation) -> None:
    labels = np.arange(3 * 8 * 10, dtype=np.uint16).reshape(8, 10, 3).transpose(2, 1, 0)
    np.testing.assert_array_equal(inflated(kernel, labels), labels)


def test_objects_take_no_more_room_than_with_zlib(kernel: Deflation) -> None:
    z, y, x = np.ogrid[:16, :128, :128]
    labels = np.zeros((16, 128, 128), np.uint16)
    for number, centre in enumerate(np.random.default_rng(1).uniform(0, (16, 128, 128), (60, 3)), 1):
        labels[sum((a - c) ** 2 for a, c in zip((2 * z, y, x), centre, strict=True)) < 150] = number
    streams, _ = kernel.compress(labels) or (np.empty(0), None)
    assert 0 < len(streams) < sum(len(zlib.compress(plane.tobytes(), 1)) for plane in labels)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (4, 4), (2, 2, 4, 4)])
def test_what_is_no_stack_of_planes_is_left_to_others(kernel: Deflation, shape: tuple[int, ...]) -> None:
    assert kernel.compress(np.zeros(shape, np.uint16)) is None


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_what_is_no_label_is_left_to_others(kernel: Deflation, dtype: str) -> None:
    assert kernel.compress(np.zeros((2, 4, 4), dtype)) is None


def test_without_a_compiler_everything_is_left_to_others() -> None:
    assert Deflation().compress(np.zeros((2, 4, 4), np.uint16)) is None
