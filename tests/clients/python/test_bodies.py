from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from stackseg_client import bodies
from stackseg_client.bodies import ArrayBody, make_body


def read_tiff(content: bytes, shape: tuple[int, ...]) -> NDArray[Any]:
    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        return tiff.series[0].asarray().reshape(shape)


DTYPES = st.sampled_from(["?", "u1", "<u2", ">u2", "i4", "<f4", ">f8", "f2", "u8"])


@given(st.data(), arrays.array_shapes(min_dims=2, max_dims=5, max_side=6), DTYPES, st.booleans())
def test_arrays_become_tiffs_with_the_same_pixels(
    data: st.DataObject, shape: tuple[int, ...], dtype: str, is_reversed: bool
) -> None:
    array = data.draw(arrays.arrays(dtype, shape, elements=st.integers(0, 1) if dtype == "?" else None))
    array = np.flip(array.T) if is_reversed else array
    body = ArrayBody(array)
    content = b"".join(body.read_blocks())
    assert len(content) == body.nbytes
    np.testing.assert_array_equal(read_tiff(content, array.shape), array)
    assert b"".join(body.read_blocks()) == content


def test_contiguous_arrays_are_sent_without_a_copy() -> None:
    array = np.zeros((3, 900, 800), np.uint16)
    first, *blocks, last = ArrayBody(array).read_blocks()
    assert all(np.shares_memory(np.frombuffer(block, np.uint8), array) for block in blocks)
    assert max(len(block) for block in blocks) <= bodies.BLOCK_BYTES
    assert sum(len(block) for block in blocks) == array.nbytes
    assert len(first) + len(last) < 2000


def test_chunks_of_zarr_arrays_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(40, 100, 100), chunks=(16, 100, 100), dtype="uint16")
    array[:] = np.arange(400_000, dtype=np.uint16).reshape(array.shape)
    monkeypatch.setattr(bodies, "BLOCK_BYTES", 40_000)
    body = ArrayBody(array)
    slabs = list(bodies._read_slabs(array, array.shape, "<u2"))
    assert [len(slab) for slab in slabs] == [16, 16, 8]
    np.testing.assert_array_equal(read_tiff(b"".join(body.read_blocks()), array.shape), array[:])


def test_stacks_of_more_than_4_gib_become_bigtiffs(tmp_path: Path) -> None:
    # No pixels are read.
    array = np.memmap(tmp_path / "sparse", np.uint16, "w+", shape=(2200, 1024, 1024))
    head = next(ArrayBody(array).read_blocks())
    assert bytes(head[:4]) == b"II+\0"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (np.zeros((3, 4, 5), complex), TypeError, "complex128"),
        (np.zeros((3, 4, 5), "datetime64[s]"), TypeError, "datetime64"),
        (np.zeros((3, 4, 5), np.longdouble), TypeError, "up to 64 bits"),
        (np.ma.masked_equal(np.eye(5), 0), ValueError, r"filled\(0\)"),
        ([[1, 2], [3, 4]], TypeError, r"numpy\.asarray"),
        (io.BytesIO(b"II"), TypeError, "path of an open file"),
        (np.zeros(7), ValueError, "two dimensions"),
        (np.zeros((3, 0, 5)), ValueError, "one voxel"),
        (SimpleNamespace(shape=(float("nan"), 4, 5)), ValueError, "compute_chunk_sizes"),
        (Path("/dev/null"), ValueError, "a pipe or a device"),
        (Path(), IsADirectoryError, "segment_folder"),
        (Path("missing.tif"), FileNotFoundError, "missing.tif"),
    ],
)
def test_other_sources_are_refused_by_name(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _ = make_body(source).nbytes


def test_contents_may_be_any_buffer() -> None:
    content = bytes(range(256)) * 8192
    for source in (content, bytearray(content), memoryview(content), memoryview(np.frombuffer(content, np.uint16))):
        body = make_body(source)
        assert body.nbytes == len(content)
        assert b"".join(body.read_blocks()) == content


def test_paths_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "stack.tif").write_bytes(b"II")
    assert make_body("~/stack.tif").nbytes == 2


class NamedArray:
    """An array that names its dimensions, like xarray.DataArray or zarr.Array."""

    def __init__(self, array: NDArray[Any], names: tuple[str, ...], *, is_zarr: bool = False) -> None:
        self._array, self.shape = array, array.shape
        if is_zarr:
            self.metadata = SimpleNamespace(dimension_names=names)
        else:
            self.dims = names

    def __getitem__(self, index: Any) -> NDArray[Any]:
        return self._array[index]


@pytest.mark.parametrize("is_zarr", [False, True])
@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("x", "y", "z"), "XYZ"),
        (("T", "C", "Z", "Y", "X"), "TCZYX"),
        (("time", "depth", "height", "width"), "TZYX"),
        (("plane", "row", "column"), "ZYX"),
        (("Y", "X", "S"), "YXS"),
        # The server asks for unknown axes, or notes that it reads the first one as planes.
        (("z", "z", "x"), "ZQX"),
        (("y", "x", "band"), "YXQ"),
        (("frame", "y", "x"), "QYX"),
        (("position", "z", "y", "x"), "QZYX"),
        (("a", "b", "c", "d"), None),
    ],
)
def test_arrays_that_name_their_axes_are_sent_with_them(
    names: tuple[str, ...], axes: str | None, is_zarr: bool
) -> None:
    array = np.arange(2 ** len(names), dtype=np.uint16).reshape((2,) * len(names))
    content = b"".join(ArrayBody(NamedArray(array, names, is_zarr=is_zarr)).read_blocks())
    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        assert tiff.shaped_metadata is not None
        assert tiff.shaped_metadata[0].get("axes") == axes


def find_axes(array: Any) -> str | None:
    content = b"".join(ArrayBody(array).read_blocks())
    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        assert tiff.shaped_metadata is not None
        axes: str | None = tiff.shaped_metadata[0].get("axes")
        return axes


def test_axes_are_named_by_hdf5_netcdf_and_older_zarr(tmp_path: Path) -> None:
    pixels = np.zeros((2, 4, 5), np.uint16)
    old = zarr.create_array(tmp_path / "a.zarr", data=pixels, zarr_format=2)
    assert find_axes(old) == "ZYX"
    old.attrs["_ARRAY_DIMENSIONS"] = ["time", "y", "x"]
    assert find_axes(old) == "TYX"

    class Hdf5Array(NamedArray):
        def __init__(self, labels: tuple[str, ...]) -> None:
            super().__init__(pixels, ())
            self.dims: Any = [SimpleNamespace(label=label) for label in labels]

    assert find_axes(Hdf5Array(("", "", ""))) == "ZYX"
    assert find_axes(Hdf5Array(("t", "y", "x"))) == "TYX"
    netcdf = NamedArray(pixels, ())
    del netcdf.dims
    netcdf.dimensions = ("time", "y", "x")
    assert find_axes(netcdf) == "TYX"


def test_color_images_are_recognized_by_their_shape() -> None:
    for shape, axes in {
        (40, 50, 3): "YXS",
        (40, 50, 4): "YXS",
        (3, 40, 50): "ZYX",
        (40, 50, 5): "ZYX",
        (4, 5, 3): "ZYX",
        (40, 3): "YX",
        (9, 40, 50, 3): None,
    }.items():
        assert find_axes(np.zeros(shape, np.uint8)) == axes


class MaskedArray(NamedArray):
    """An array whose blocks have masks, like those of netCDF; those of Dask lose them unless they are computed."""

    def __init__(self, *, is_lazy: bool) -> None:
        super().__init__(np.ma.masked_less(np.arange(40).reshape(2, 4, 5), 3), ())
        self.is_lazy = is_lazy

    def __getitem__(self, index: Any) -> Any:
        return LazyBlock(self._array[index]) if self.is_lazy else self._array[index]


class LazyBlock:
    def __init__(self, masked: NDArray[Any]) -> None:
        self.masked = masked

    def compute(self) -> NDArray[Any]:
        return self.masked

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.masked, dtype)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_masks_of_blocks_are_not_lost(is_lazy: bool) -> None:
    with pytest.raises(ValueError, match=r"filled\(0\)"):
        list(ArrayBody(MaskedArray(is_lazy=is_lazy)).read_blocks())


class ChangingArray:
    """A lazy array of zeros, of which all parts after the first one have another dtype or shape."""

    shape = (16, 512, 512)

    def __init__(self, dtype: str, width: int = 512) -> None:
        self._dtype, self._width = dtype, width

    def __getitem__(self, index: Any) -> NDArray[Any]:
        planes = np.zeros(self.shape, np.uint16)[index]
        return planes if index[0].start in {0, None} else planes[..., : self._width].astype(self._dtype)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (ChangingArray("u4"), "dtype uint32, which does not fit in the dtype uint16"),
        (ChangingArray("f4"), "dtype float32"),
        (ChangingArray("i2"), "dtype int16"),
        (ChangingArray("u2", 500), r"shape \(2, 512, 500\) instead of \(2, 512, 512\)"),
    ],
)
def test_parts_of_lazy_arrays_must_fit_together(array: ChangingArray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(ArrayBody(array).read_blocks())


def test_parts_of_lazy_arrays_may_have_smaller_dtypes() -> None:
    content = b"".join(ArrayBody(ChangingArray("u1")).read_blocks())
    np.testing.assert_array_equal(read_tiff(content, ChangingArray.shape), 0)


def write_image(folder: Path) -> None:
    zarr.open_group(folder, mode="w").create_array("0", data=np.arange(64).reshape(4, 4, 4), chunks=(2, 2, 2))


def list_members(folder: Path) -> dict[str, bytes]:
    with ZipFile(io.BytesIO(b"".join(make_body(folder).read_blocks()))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_linked_folders_of_ome_zarr_are_sent(tmp_path: Path) -> None:
    write_image(tmp_path / "a.zarr")
    expected = list_members(tmp_path / "a.zarr")
    assert "0/c/1/1/1" in expected
    for part in ("0/c/1", "0"):
        (tmp_path / "a.zarr" / part).rename(tmp_path / part.replace("/", "-"))
        (tmp_path / "a.zarr" / part).symlink_to(tmp_path / part.replace("/", "-"))
        assert list_members(tmp_path / "a.zarr") == expected
    (tmp_path / "link.zarr").symlink_to("a.zarr")
    assert list_members(tmp_path / "link.zarr") == expected


def test_broken_and_circular_links_in_ome_zarr_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.zarr")
    chunk = tmp_path / "a.zarr/0/c/1/1/1"
    chunk.unlink()
    chunk.symlink_to("missing")
    with pytest.raises(FileNotFoundError, match="is a link to missing"):
        make_body(tmp_path / "a.zarr")
    chunk.unlink()
    chunk.symlink_to(tmp_path / "a.zarr/0")
    with pytest.raises(ValueError, match="folder that contains it"):
        make_body(tmp_path / "a.zarr")
