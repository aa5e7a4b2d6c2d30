"""Read OME-Zarr of both formats from folders and archives, and reject damaged and hostile stores."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs.numcodecs
from zarr.codecs import BloscCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr_files import write_zarr, zip_store

from service.core.errors import (
    AmbiguousAxes,
    BadFile,
    BadParameter,
    Cancelled,
    RequestError,
    TooLarge,
    UnsupportedMedia,
)
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox.reader import Reader
from service.formats.zarr import reader as zarr_reader
from service.formats.zarr import store as zarr_store

LIMIT = 2**28


@pytest.fixture(scope="module")
def time_series() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60_000, (2, 3, 7, 30, 50)).astype(np.uint16)


STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.4": ("0.4", {"chunks": (1, 1, 4, 16, 16)}),
    "0.4 raw, with dots": (
        "0.4",
        {"compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "."}, "chunks": (1, 2, 7, 30, 50)},
    ),
    **{
        f"0.4 {codec}": ("0.4", {"compressors": codec, "chunks": (1, 1, 4, 16, 32)})
        for codec in (
            numcodecs.Zlib(),
            numcodecs.GZip(),
            numcodecs.Zstd(),
            numcodecs.LZ4(),
            numcodecs.BZ2(),
            *(numcodecs.Blosc(name, shuffle=2) for name in ("lz4", "lz4hc", "blosclz", "zlib", "zstd")),
        )
    },
    "0.4 in Fortran order": ("0.4", {"order": "F", "chunks": (1, 1, 4, 16, 16)}),
    "0.4 big-endian": ("0.4", {"dtype": ">u2", "chunks": (2, 3, 4, 16, 16)}),
    "0.5": ("0.5", {"chunks": (1, 2, 4, 16, 16)}),
    "0.5 sharded": ("0.5", {"chunks": (1, 1, 4, 8, 16), "shards": (1, 3, 8, 32, 32)}),
    "0.5 blosc": ("0.5", {"compressors": BloscCodec(cname="lz4"), "chunks": (1, 2, 4, 16, 50)}),
    "0.5 gzip": ("0.5", {"compressors": GzipCodec(), "chunks": (2, 2, 4, 16, 50)}),
    "0.5 with checksums": (
        "0.5",
        {"compressors": [ZstdCodec(), zarr.codecs.Crc32cCodec()], "chunks": (1, 2, 4, 16, 50)},
    ),
    "0.5 transposed": ("0.5", {"filters": TransposeCodec(order=(0, 1, 4, 2, 3)), "chunks": (1, 2, 4, 16, 50)}),
    "0.5 big-endian": ("0.5", {"serializer": zarr.codecs.BytesCodec(endian="big"), "chunks": (1, 2, 4, 16, 50)}),
}


@pytest.mark.parametrize("name", STORES)
def test_pixels_written_by_zarr_python_are_read(
    name: str, time_series: np.ndarray, reader: Reader, tmp_path: Path
) -> None:
    version, options = STORES[name]
    dtype = options.pop("dtype", None) if "dtype" in (options := dict(options)) else None
    pixels = time_series.astype(dtype) if dtype else time_series
    store = write_zarr(tmp_path / "a.ome.zarr", pixels, "tczyx", version, ("DAPI", "GFP", "RFP"), **options)
    single_channel, all_channels = Selection(channel="GFP", time=1), Selection(time=0)
    for location in (store, zip_store(store)):
        volume = reader.read(location, single_channel, tmp_path / "scratch")
        assert np.array_equal(volume.read_all(), time_series[1, 1:2])
        assert volume.dtype == np.uint16
        assert np.array_equal(stack_reader.read(location, all_channels, LIMIT).read_all(), time_series[0])
        description = reader.inspect(location, Selection())
        assert description == stack_reader.inspect(location, Selection(), LIMIT)
    assert np.array_equal(
        reader.read(bytearray(zip_store(store).read_bytes()), single_channel, tmp_path / "scratch").read_all(),
        time_series[1, 1:2],
    )
    assert (volume.voxel_size, volume.channels) == (VoxelSize(0.5, 0.2, 0.2), ("GFP",))
    assert (description.container, description.axes) == (f"OME-Zarr {version}", "TCZYX")
    assert description.channels == ("DAPI", "GFP", "RFP")
    assert description.colours == ("#00ff00",) * 3
    assert "2 time points" in description.problem
    assert description.time_interval == TimeInterval(2.0, "s")


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("shards", [None, (1, 3, 8, 32, 64)])
@pytest.mark.parametrize("name", ["Zlib", "BZ2", "LZ4", "Zstd", "GZip", "Blosc"])
def test_codecs_of_format_3_may_have_the_names_of_numcodecs(
    time_series: np.ndarray, name: str, shards: Any, tmp_path: Path
) -> None:
    codec = getattr(zarr.codecs.numcodecs, name)()
    store = write_zarr(
        tmp_path / "a.zarr", time_series, "tczyx", compressors=codec, chunks=(1, 1, 4, 16, 32), shards=shards
    )

    assert f"numcodecs.{name.lower()}" in (store / "0" / "zarr.json").read_text()
    assert np.array_equal(stack_reader.read(store, Selection(time=1), LIMIT).read_all(), time_series[1])


def test_only_chunks_of_the_selection_are_read(time_series: np.ndarray, reader: Reader, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", time_series, "tczyx", chunks=(1, 1, 4, 16, 16))
    for path in [*(store / "0" / "c" / "0").rglob("*"), *(store / "0" / "c" / "1" / "2").rglob("*")]:
        if path.is_file():
            path.write_bytes(b"not a chunk")
    assert np.array_equal(reader.read(store, Selection(channel=1, time=1), tmp_path).read_all(), time_series[1, 1:2])
    with pytest.raises(BadFile, match="chunk"):
        reader.read(store, Selection(channel=2, time=1), tmp_path)


def test_cancellation_stops_reading_between_chunks(reader: Reader, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", np.ones((4, 16, 16), np.uint8), version="0.4", chunks=(1, 1, 1))
    edit_json(store, "0/.zarray", shape=[32, 128, 128])
    reader.wait_until_ready()
    start, cancelled = time.monotonic(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(reader.read, store, Selection(), tmp_path, cancelled=cancelled.is_set)
        with pytest.raises(TimeoutError):
            future.result(0.5)
        cancelled.set()
        with pytest.raises(Cancelled):
            future.result(60)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("shards", [None, (4, 16, 16)])
def test_missing_chunks_have_the_fill_value(shards: Any, reader: Reader, tmp_path: Path) -> None:
    pixels = np.full((8, 20, 30), 7, np.float32)
    pixels[2, 3, 4] = 9
    store = write_zarr(tmp_path / "a.zarr", pixels, fill_value=7, chunks=(2, 8, 8), shards=shards)
    assert len([path for path in (store / "0" / "c").rglob("*") if path.is_file()]) == 1
    assert np.array_equal(reader.read(store, Selection(), tmp_path).read_all()[0], pixels)


@pytest.mark.parametrize(("axes", "shape"), [("yx", (20, 30)), ("zyx", (1, 1, 30)), ("czyx", (2, 1, 5, 6))])
def test_dimensions_may_be_missing_or_have_length_one(axes: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    pixels = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    volume = stack_reader.read(write_zarr(tmp_path / "a.zarr", pixels, axes), Selection(), LIMIT)
    assert volume.shape[-2:] == shape[-2:]
    assert np.array_equal(volume.read_all().ravel(), pixels.ravel())


def test_request_overrides_axes_and_voxel_size(time_series: np.ndarray, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", time_series[0], "czyx", chunks=(2, 2, 16, 16))
    selection = Selection(axes="ZCYX", channel=4, voxel_size=VoxelSize(1, 2, 3))
    volume = stack_reader.read(store, selection, LIMIT)
    assert volume.voxel_size == VoxelSize(1, 2, 3)
    assert np.array_equal(volume.read_all()[0], time_series[0, :, 4])


def edit_json(store: Path, name: str, **changes: Any) -> None:
    content = json.loads((store / name).read_text())
    for keys, value in changes.items():
        *path_keys, last_key = keys.split("__")
        parent = content
        for key in path_keys:
            parent = parent[int(key) if isinstance(parent, list) else key]
        parent[last_key] = value
    (store / name).write_text(json.dumps(content))


HOSTILE_METADATA: dict[str, tuple[str, dict[str, Any], type[RequestError], str]] = {
    "huge shape": ("0/.zarray", {"shape": [2**40, 2**40, 2**40]}, TooLarge, "decodes to"),
    "shape beyond the range of integers": ("0/.zarray", {"shape": [10**400, 5, 5]}, BadFile, "is not valid"),
    "huge chunks": ("0/.zarray", {"chunks": [2**40, 16, 16]}, TooLarge, "chunk .* decodes to"),
    "tiny chunks": ("0/.zarray", {"shape": [100, 400, 400], "chunks": [1, 1, 1]}, TooLarge, "larger chunks"),
    "larger chunks": ("0/.zarray", {"chunks": [32, 32, 32]}, BadFile, "decodes to|cannot be decoded"),
    "smaller chunks": ("0/.zarray", {"chunks": [1, 8, 8]}, BadFile, "decodes to|cannot be decoded"),
    "no shape": ("0/.zarray", {"shape": None}, BadFile, "is not valid"),
    "empty shape": ("0/.zarray", {"shape": []}, BadFile, "0 dimensions"),
    "negative shape": ("0/.zarray", {"shape": [-1, 5, 5]}, BadFile, "has no pixels"),
    "shape of letters": ("0/.zarray", {"shape": "xyz"}, BadFile, "is not valid"),
    "fractional shape": ("0/.zarray", {"shape": [1.5, 5, 5]}, BadFile, "is not valid"),
    "empty chunks": ("0/.zarray", {"chunks": [0, 0, 0]}, BadFile, "has no pixels"),
    "two-dimensional chunks": ("0/.zarray", {"chunks": [8, 8]}, BadFile, "3 dimensions, and its chunks have 2"),
    "unknown codec": ("0/.zarray", {"compressor": {"id": "jpegxl"}}, BadFile, "jpegxl.*Save the image again"),
    "wrong codec": ("0/.zarray", {"compressor": {"id": "zlib"}}, BadFile, "cannot be decoded"),
    "codec without a name": ("0/.zarray", {"compressor": 7}, BadFile, "is not valid"),
    "filters": ("0/.zarray", {"filters": [{"id": "delta"}]}, BadFile, "delta"),
    "objects": ("0/.zarray", {"dtype": "|O"}, BadFile, "not supported"),
    "structures": ("0/.zarray", {"dtype": [["a", "<u2"]]}, BadFile, "not supported"),
    "long doubles": ("0/.zarray", {"dtype": "<f16"}, BadFile, "not supported"),
    "wrong dtype": ("0/.zarray", {"dtype": "<u4"}, BadFile, "decodes to|cannot be decoded"),
    "incomplete dtype": ("0/.zarray", {"dtype": "(1,2,"}, BadFile, "not supported"),
    "dtype with a huge subarray": ("0/.zarray", {"dtype": "(999999999,999999999)u1"}, BadFile, "not supported"),
    "invalid separator": ("0/.zarray", {"dimension_separator": "/../"}, BadFile, "is not valid"),
    "invalid fill value": ("0/.zarray", {"fill_value": {"a": 1}}, BadFile, "is not valid"),
    "multiple fill values": ("0/.zarray", {"shape": [99, 30, 30], "fill_value": [1, 2]}, BadFile, "is not valid"),
    "empty fill value": ("0/.zarray", {"shape": [99, 30, 30], "fill_value": []}, BadFile, "is not valid"),
    "path outside the store": (
        ".zattrs",
        {"multiscales__0__datasets__0__path": "../secret"},
        BadFile,
        "not a path inside",
    ),
    "absolute path": (".zattrs", {"multiscales__0__datasets__0__path": "/etc"}, BadFile, "not a path inside"),
    "path to a missing array": (".zattrs", {"multiscales__0__datasets__0__path": "7"}, BadFile, "no array '7'"),
    "no datasets": (".zattrs", {"multiscales__0__datasets": []}, BadFile, "is not valid"),
    "no multiscales": (".zattrs", {"multiscales": []}, BadFile, "no OME-Zarr image"),
    "multiscales as a string": (".zattrs", {"multiscales": "x"}, BadFile, "is not valid"),
    "too few axes": (".zattrs", {"multiscales__0__axes": [{"name": "x"}]}, BadFile, "1 axes, but the array has 3"),
    "unknown axes": (
        ".zattrs",
        {"multiscales__0__axes": [{"name": name} for name in ("angle", "phase", "x")]},
        AmbiguousAxes,
        "axes=",
    ),
    "scale with two numbers": (
        ".zattrs",
        {"multiscales__0__datasets__0__coordinateTransformations__0__scale": [1, 2]},
        BadFile,
        "2 scale factors",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_METADATA)
def test_hostile_metadata_is_rejected(name: str, reader: Reader, tmp_path: Path) -> None:
    file, changes, error, words = HOSTILE_METADATA[name]
    pixels = np.random.default_rng(1).integers(0, 9, (10, 30, 30)).astype(np.uint16)
    store = write_zarr(tmp_path / "a.zarr", pixels, version="0.4", chunks=(4, 16, 16))
    edit_json(store, file, **changes)
    for location in (store, zip_store(store)):
        with pytest.raises(error, match=words):
            reader.read(location, Selection(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codecs__0__configuration__chunk_shape": [3, 16, 16]}, "not a multiple"),
        ({"codecs__0__configuration__chunk_shape": [0, 16, 16]}, "not a multiple"),
        ({"chunk_grid__configuration__chunk_shape": [0, 32, 32]}, "not a multiple"),
        ({"codecs__0__configuration__index_codecs": [{"name": "zstd"}]}, "index of its shards"),
        ({"codecs__0__configuration__codecs": []}, "is not valid"),
        ({"codecs": [{"name": "bytes"}, {"name": "zstd"}, {"name": "zstd"}]}, "not supported"),
        ({"codecs": [{"name": "optional"}]}, "not supported"),
        ({"chunk_grid__name": "rectangular"}, "regular"),
        ({"chunk_key_encoding__name": "hilbert"}, "is not valid"),
        ({"data_type": "string"}, "not supported"),
        ({"data_type": {"name": "numpy.datetime64"}}, "not supported"),
    ],
)
def test_hostile_arrays_of_format_3_are_rejected(
    changes: dict[str, Any], words: str, reader: Reader, tmp_path: Path
) -> None:
    store = write_zarr(tmp_path / "a.zarr", np.ones((10, 30, 30), np.uint16), chunks=(4, 16, 16), shards=(8, 32, 32))
    edit_json(store / "0", "zarr.json", **changes)
    with pytest.raises(BadFile, match=words):
        reader.read(store, Selection(), tmp_path)


@pytest.mark.parametrize("codec", [numcodecs.Zstd(), numcodecs.GZip(), numcodecs.Zlib(), numcodecs.Blosc("zstd")])
def test_decompression_bomb_is_limited_to_the_chunk_size(codec: Any, reader: Reader, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", np.ones((4, 16, 16), np.uint16), version="0.4", compressors=codec)
    chunk = next(path for path in (store / "0").rglob("*") if path.is_file() and path.name.isdigit())
    chunk.write_bytes(codec.encode(bytes(2**23)))
    with pytest.raises(BadFile, match="cannot be decoded"):
        reader.read(store, Selection(), tmp_path)


@pytest.mark.parametrize("shards", [None, (4, 16, 32)])
def test_changed_bytes_do_not_match_the_checksum(shards: Any, reader: Reader, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 60_000, (4, 16, 32)).astype(np.uint16)
    crc = zarr.codecs.Crc32cCodec()
    store = write_zarr(tmp_path / "a.zarr", pixels, chunks=(4, 16, 16), shards=shards, compressors=[crc])
    chunk = store / "0" / "c" / "0" / "0" / "0"
    original = chunk.read_bytes()
    assert np.array_equal(reader.read(store, Selection(), tmp_path).read_all()[0], pixels)
    # Change a pixel, the checksum, and, with shards, the index at the end of the file.
    for location in (100, 2051, len(original) - 30, len(original) - 1):
        chunk.write_bytes(original[:location] + bytes([original[location] ^ 1]) + original[location + 1 :])
        for source in (store, zip_store(store)):
            with pytest.raises(BadFile, match=r"does not match its checksum \(CRC-32C\)"):
                reader.read(source, Selection(), tmp_path)


class RecordingStore(zarr_store.FolderStore):
    """Folder store that records the byte ranges that were read."""

    def __init__(self, store: Path) -> None:
        self.ranges = list[zarr_store.FileRange]()
        super().__init__(lambda key: os.open(store / key, os.O_RDONLY))

    def read(self, ranges: Sequence[zarr_store.FileRange]) -> list[bytes | None]:
        self.ranges += ranges
        return super().read(ranges)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("shards", [None, (10, 20, 40)])
@pytest.mark.parametrize(
    ("region", "chunk_count"),
    [((range(3, 9), range(12, 15), range(70)), 8), ((range(19, 20), range(50), range(19, 41)), 15)],
)
def test_only_chunks_of_a_region_are_read(
    region: zarr_reader.Region, chunk_count: int, shards: Any, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(3).integers(0, 60_000, (20, 50, 70)).astype(np.uint16)
    big_endian = zarr.codecs.BytesCodec(endian="big")
    path = write_zarr(tmp_path / "a.zarr", pixels, chunks=(5, 10, 20), shards=shards, serializer=big_endian)
    store, descriptor_count = RecordingStore(path), count_descriptors()
    stack = zarr_reader.open_stack(store, Selection(), LIMIT)
    store.ranges.clear()
    region_pixels = stack.read_region(region)
    assert count_descriptors() == descriptor_count
    z, y, x = (slice(extent.start, extent.stop) for extent in region)
    assert np.array_equal(region_pixels[0], pixels[z, y, x])
    assert region_pixels.dtype == np.uint16
    indices = [file_range for file_range in store.ranges if file_range.start is not None and file_range.start < 0]
    assert len(store.ranges) - len(indices) == chunk_count


@pytest.mark.thorough
def test_long_rows_are_decoded_chunk_by_chunk(tmp_path: Path) -> None:
    pixels = np.zeros((1, 2, 2**25 + 5), np.uint8)
    pixels[0, :, [5, 2**24, 2**25 - 1, 2**25 + 4]] = [[1, 2], [3, 4], [5, 6], [7, 8]]
    path = write_zarr(tmp_path / "a.zarr", pixels, chunks=(1, 2, 2**24))
    for scratch in (None, tmp_path / "scratch"):
        assert np.array_equal(stack_reader.read(path, Selection(), 2**27, scratch).read_all()[0], pixels)


def test_links_and_devices_in_a_store_are_not_followed(reader: Reader, tmp_path: Path) -> None:
    secret = write_zarr(tmp_path / "secret.zarr", np.ones((4, 16, 16), np.uint16), chunks=(4, 16, 16))
    for number, location in enumerate(["0", "0/c", "0/zarr.json", "0/c/0/0/0", "zarr.json"]):
        store = write_zarr(tmp_path / f"{number}.zarr", np.ones((4, 16, 16), np.uint16), chunks=(4, 16, 16))
        (store / location).rename(store / "moved")
        (store / location).symlink_to(secret / location)
        with pytest.raises(BadFile, match="cannot be opened, or is a link"):
            reader.read(store, Selection(), tmp_path)
    (store / "zarr.json").unlink()
    os.mkfifo(store / "zarr.json")
    with pytest.raises(BadFile, match="a folder or a device"):
        reader.read(store, Selection(), tmp_path)


def test_hostile_shards_are_rejected(reader: Reader, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 60_000, (8, 32, 32)).astype(np.uint16)
    store = write_zarr(tmp_path / "a.zarr", pixels, chunks=(4, 16, 16), shards=(8, 32, 32))
    shard = store / "0" / "c" / "0" / "0" / "0"
    original = shard.read_bytes()
    for content in (
        b"",
        original[: len(original) // 2],
        original[:-132] + np.full(16, 2**62, "<u8").tobytes() + bytes(4),
        original[:-132] + np.full(16, 2**64 - 2, "<u8").tobytes() + bytes(4),
    ):
        shard.write_bytes(content)
        with pytest.raises(BadFile):
            reader.read(store, Selection(), tmp_path)


def test_damaged_and_ambiguous_archives_are_rejected(reader: Reader, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", np.ones((4, 16, 16), np.uint16), version="0.4")
    original = zip_store(store).read_bytes()
    without_metadata = re.sub(rb"\.z(group|attrs|array)", rb"_z\1", original)
    for content, error in ((original[: len(original) // 2], BadFile), (without_metadata, UnsupportedMedia)):
        with pytest.raises(error):
            reader.read(bytearray(content), Selection(), tmp_path)
    with_trailing_byte = bytearray(original + b"x")
    with pytest.raises(BadFile, match="content after its central directory"):
        reader.read(with_trailing_byte, Selection(), tmp_path)
    archive_path = tmp_path / "two.zip"
    with zipfile.ZipFile(archive_path, "w") as archive:
        for name in ("a", "b"):
            archive.writestr(f"{name}.zarr/.zgroup", "{}")
    with pytest.raises(BadFile, match="2 Zarr stores"):
        reader.read(archive_path, Selection(), tmp_path)


def test_collections_plates_and_arrays_are_distinguished(tmp_path: Path) -> None:
    pixels = np.ones((4, 16, 16), np.uint16)
    root = tmp_path / "a.zarr"
    write_zarr(root / "0", pixels, version="0.4")
    (root / ".zgroup").write_text('{"zarr_format": 2}')
    (root / ".zattrs").write_text('{"bioformats2raw.layout": 3}')
    assert stack_reader.inspect(root, Selection(), LIMIT).shape == (1, 4, 16, 16)
    (root / ".zattrs").write_text('{"plate": {}}')
    with pytest.raises(BadFile, match="contains a plate"):
        stack_reader.inspect(root, Selection(), LIMIT)
    plain = write_zarr(tmp_path / "b.zarr", pixels)
    with pytest.raises(BadFile, match="single Zarr array"):
        stack_reader.inspect(plain / "0", Selection(), LIMIT)
    with pytest.raises(BadParameter, match="channel="):
        stack_reader.read(plain, Selection(channel=3), LIMIT)


def use_coordinate_systems(attributes: dict[str, Any], transformation: dict[str, Any], output: Any) -> None:
    """Convert the metadata of an image to version 0.6, in which coordinate systems replace the axes."""
    multiscale = attributes["multiscales"][0]
    axes = multiscale.pop("axes")
    world = {"name": "world", "axes": [*reversed(axes)]}
    multiscale["coordinateSystems"] = [world, {"name": "intrinsic", "axes": axes}]
    multiscale["datasets"][0]["coordinateTransformations"] = [transformation | {"input": {"path": "0"}} | output]
    multiscale["coordinateTransformations"] = [
        {"type": "scale", "scale": [10.0] * len(axes), "input": {"name": "intrinsic"}, "output": {"name": "world"}}
    ]
    attributes["version"] = "0.6"


SCALE_06 = {"type": "scale", "scale": [30, 0.5, 1, 0.2, 0.2]}
TRANSLATION_06 = {"type": "translation", "translation": [0, 1, 0, 2, 3]}


@pytest.mark.parametrize("output", [{"output": {"name": "intrinsic"}}, {"output": "intrinsic"}])
@pytest.mark.parametrize(
    "transformation", [SCALE_06, {"type": "sequence", "transformations": [SCALE_06, TRANSLATION_06]}]
)
def test_axes_of_version_06_are_those_of_the_coordinate_system(
    transformation: dict[str, Any], output: Any, time_series: np.ndarray, tmp_path: Path
) -> None:
    pixels = time_series.transpose(0, 2, 1, 3, 4)
    store = write_zarr(tmp_path / "a.zarr", pixels, "tzcyx")
    group = zarr.open_group(store)
    attributes: dict[str, Any] = dict(group.attrs["ome"])  # type: ignore[arg-type]
    use_coordinate_systems(attributes, transformation, output)
    group.attrs["ome"] = attributes

    description = stack_reader.inspect(store, Selection(), LIMIT)
    volume = stack_reader.read(store, Selection(time=1, channel=2), LIMIT)

    assert (description.container, description.axes) == ("OME-Zarr 0.6", "TZCYX")
    assert (description.voxel_size, description.time_interval) == (VoxelSize(0.5, 0.2, 0.2), TimeInterval(30, "s"))
    assert np.array_equal(volume.read_all()[0], time_series[1, 2])
    attributes["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["type"] = "mapAxis"
    group.attrs["ome"] = attributes
    with pytest.raises(BadFile, match="mapAxis"):
        stack_reader.inspect(store, Selection(), LIMIT)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_axes_are_assumed_only_for_versions_without_axes(version: str, time_series: np.ndarray, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", time_series, "tczyx", "0.4")
    multiscale: dict[str, Any] = json.loads((store / ".zattrs").read_text())["multiscales"][0]
    del multiscale["axes"]
    edit_json(store, ".zattrs", multiscales=[multiscale | {"version": version}])
    with pytest.raises(AmbiguousAxes):
        stack_reader.inspect(store, Selection(), LIMIT)
    edit_json(store, ".zattrs", multiscales=[multiscale | {"version": "0.2"}])
    assert stack_reader.inspect(store, Selection(), LIMIT).axes == "TCZYX"


@pytest.mark.parametrize(("version", "name"), [("0.4", ".zattrs"), ("0.5", "zarr.json")])
def test_metadata_of_another_version_than_the_arrays_is_read(
    version: str, name: str, time_series: np.ndarray, tmp_path: Path
) -> None:
    store = write_zarr(tmp_path / "a.zarr", time_series[0, 0], version=version)
    content = json.loads((store / name).read_text())
    if version == "0.4":
        content = {"ome": content | {"version": "0.5"}}
    else:
        content["attributes"] = content["attributes"].pop("ome")
    (store / name).write_text(json.dumps(content))
    volume = stack_reader.read(store, Selection(), LIMIT)
    assert volume.voxel_size == VoxelSize(0.5, 0.2, 0.2)
    assert np.array_equal(volume.read_all()[0], time_series[0, 0])


def test_finest_resolution_is_read_in_any_order(time_series: np.ndarray, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", time_series[0, 0], version="0.4")
    coarse = write_zarr(tmp_path / "b.zarr", time_series[0, 0, :, ::2, ::2], version="0.4")
    shutil.copytree(coarse / "0", store / "1")
    finest = json.loads((store / ".zattrs").read_text())["multiscales"][0]["datasets"][0]
    scale = [{"type": "scale", "scale": [0.5, 0.4, 0.4]}]
    datasets = [{"path": "1", "coordinateTransformations": scale}, finest]
    for order in (datasets, datasets[::-1]):
        edit_json(store, ".zattrs", multiscales__0__datasets=order)
        assert np.array_equal(stack_reader.read(store, Selection(), LIMIT).read_all()[0], time_series[0, 0])
        assert stack_reader.inspect(store, Selection(), LIMIT).voxel_size == VoxelSize(0.5, 0.2, 0.2)
    # The order of paths as text, such as 0, 10, 2.
    shutil.copytree(coarse / "0", store / "2")
    middle = [datasets[0], finest, datasets[0] | {"path": "2"}]
    edit_json(store, ".zattrs", multiscales__0__datasets=middle)
    assert stack_reader.inspect(store, Selection(), LIMIT).shape == (1, 7, 30, 50)
    # A coarser resolution that was not copied is not needed, and neither is a scale in another array.
    shutil.rmtree(store / "1")
    assert stack_reader.inspect(store, Selection(), LIMIT).shape == (1, 7, 30, 50)
    (store / "0").rename(store / "0 not copied")
    for order in (middle, middle[::-1], datasets[::-1]):
        edit_json(store, ".zattrs", multiscales__0__datasets=order)
        with pytest.raises(BadFile, match="no array '0'"):
            stack_reader.inspect(store, Selection(), LIMIT)
    (store / "0 not copied").rename(store / "0")
    for transformation in ({"type": "scale", "path": "scales"}, {"scale": [1, 1, 1]}, {"type": "sequence"}):
        datasets = [finest | {"coordinateTransformations": [transformation]}, {"path": "../outside"}]
        edit_json(store, ".zattrs", multiscales__0__datasets=datasets)
        assert stack_reader.inspect(store, Selection(), LIMIT).voxel_size is None


@pytest.mark.parametrize("is_in_dataset", [True, False])
@pytest.mark.parametrize(
    ("translation", "is_noted"), [([0, 0.0, 0], False), ([0, 0, 2.5], True), (None, True), ("invalid", True)]
)
def test_translation_is_noted(is_in_dataset: bool, translation: Any, is_noted: bool, tmp_path: Path) -> None:
    store = write_zarr(tmp_path / "a.zarr", np.ones((3, 4, 5), np.uint8), version="0.4")
    transformations = [{"type": "scale", "scale": [0.5, 0.2, 0.2]}, {"type": "translation", "translation": translation}]
    multiscale = json.loads((store / ".zattrs").read_text())["multiscales"][0]
    del multiscale["datasets"][0]["coordinateTransformations"]
    (multiscale["datasets"][0] if is_in_dataset else multiscale)["coordinateTransformations"] = transformations
    edit_json(store, ".zattrs", multiscales=[multiscale])
    description = stack_reader.inspect(store, Selection(), LIMIT)
    assert description.voxel_size == VoxelSize(0.5, 0.2, 0.2)
    assert any("translation" in note for note in description.notes) == is_noted
