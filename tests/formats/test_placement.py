from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.formats import placement
from service.formats.placement import Placement

SHAPE = (2, 3, 17, 23)
PIXELS = np.random.default_rng(0).integers(0, 2**16, SHAPE).astype(np.uint16)


def write_pixels(path: Path, layout: str, dtype: str) -> Placement:
    """Write `PIXELS` with the axes in the order of `layout`, after eight other bytes. Return their placement."""
    stored = np.ascontiguousarray(PIXELS.transpose(["CZYX".index(axis) for axis in layout])).astype(dtype)
    path.write_bytes(b"12345678" + stored.tobytes())
    strides = dict(zip(layout, stored.strides, strict=True))
    return Placement(np.dtype(dtype).str, 8, SHAPE, tuple(strides[axis] for axis in "CZYX"))  # type: ignore[arg-type]


def make_ranges(length: int) -> st.SearchStrategy[range]:
    return st.builds(
        lambda start, stop, step: range(min(start, stop), max(start, stop) + 1, step),
        st.integers(0, length - 1),
        st.integers(0, length - 1),
        st.integers(1, length),
    )


@given(
    layout=st.permutations("CZYX"),
    dtype=st.sampled_from(["<u2", ">u2", "<f4"]),
    is_streamed=st.booleans(),
    z=st.integers(0, 2),
    rows=make_ranges(17),
    columns=make_ranges(23),
    block_bytes=st.sampled_from([1, 8, 40, 100, 300, 10**6]),
)
def test_parts_of_planes_have_the_selected_pixels(tmp_path_factory: Any, block_bytes: int, **case: Any) -> None:
    path = tmp_path_factory.mktemp("placement") / "pixels"
    location = write_pixels(path, "".join(case["layout"]), case["dtype"])
    metadata = (None, ("", ""), ())
    with path.open("rb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "MAX_BLOCK_BYTES", block_bytes)
        if case["is_streamed"]:
            volume = location.stream_volume(file.fileno(), *metadata)
        else:
            volume = location.map_volume(placement.map_file(file.fileno()), *metadata)
        part = volume.read_pixels(case["z"], case["rows"], case["columns"])
    rows, columns = case["rows"], case["columns"]
    expected = PIXELS[0, case["z"], rows.start : rows.stop : rows.step, columns.start : columns.stop : columns.step]
    assert np.array_equal(part, expected)
    assert part.dtype.isnative


@pytest.mark.parametrize("shape", [(1, 1, 1, 10**9), (1, 1, 10**9, 1), (1, 1, 10**5, 10**4)])
def test_few_pixels_of_a_huge_plane_need_little_memory(tmp_path: Path, shape: tuple[int, int, int, int]) -> None:
    path = tmp_path / "pixels"
    with path.open("wb") as file:
        file.truncate(10**9)
    with path.open("rb") as file:
        volume = Placement.make_dense(np.dtype(np.uint8), shape).stream_volume(file.fileno(), None, ("",), ())
    rows, columns = (range(0, length, max(length // 10, 1)) for length in shape[2:])
    tracemalloc.start()
    part = volume.read_pixels(0, rows, columns)
    assert part.shape == (len(rows), len(columns))
    assert tracemalloc.get_traced_memory()[1] < 3 * placement.MAX_BLOCK_BYTES
    tracemalloc.stop()


def test_copies_of_a_volume_keep_its_file_open(tmp_path: Path) -> None:
    path = tmp_path / "pixels"
    location = write_pixels(path, "CZYX", "<u2")
    with path.open("rb") as file:
        volume = dataclasses.replace(location.stream_volume(file.fileno(), None, ("", ""), ()), notes=("copy",))
    gc.collect()
    assert np.array_equal(volume.read_all(), PIXELS)
    assert np.array_equal(volume.read_pixels(1, range(17), range(23)), PIXELS[0, 1])
