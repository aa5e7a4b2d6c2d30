from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from service.core.types import Array, Volume
from service.inference.cuda import device_image
from service.inference.cuda.device_image import DeviceImage, UploadedVolume, Uploader
from service.inference.preprocessing.normalize import (
    DeviceChannel,
    IntensityScaling,
    NormalizedImage,
    VolumeChannel,
    normalize_volume,
)
from service.inference.preprocessing.percentiles import compute_percentiles
from service.inference.windows.grid import Grid

CPU = torch.device("cpu")
SHAPE = (2, 11, 6, 7)
SCALINGS = [IntensityScaling(30.5, 70, -0.25, 0.5), IntensityScaling(0, 0)]


@pytest.fixture
def single_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold only one layer of windows on the device, and copy each plane separately."""
    monkeypatch.setattr(device_image, "MAX_WHOLE_IMAGE_BYTES", 0)
    monkeypatch.setattr(device_image, "MAX_TRANSFER_BYTES", 1)


def make_pixels(dtype: str) -> Array:
    return np.random.default_rng(1).integers(0, 100, SHAPE).astype(dtype)


def boxes(overlap: float, depth: int = 4) -> list[tuple[Any, ...]]:
    grid = Grid.cover((11, 6, 7), (depth, 4, 4), overlap)
    return [
        (0, slice(None), *(slice(start, start + edge) for start, edge in zip(position, grid.window_size, strict=True)))
        for position in grid.positions()
    ]


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8", "?"])
@pytest.mark.parametrize("whole", [False, True])
def test_windows_on_a_device_equal_those_on_the_host(dtype: str, whole: bool, request: pytest.FixtureRequest) -> None:
    if not whole:
        request.getfixturevalue("single_layers")
    pixels = make_pixels(dtype)
    if pixels.dtype.kind == "f":
        pixels[:, 4, 3, :3] = np.nan, np.inf, -np.inf
    pixels.flags.writeable = False
    scalings = [replace(each, substitute=44.25 if pixels.dtype.kind == "f" else None) for each in SCALINGS]
    for stored in (pixels, pixels[:, ::-1, :, ::-1]):
        source = NormalizedImage(Volume.from_array(stored), scalings)
        image = DeviceImage(source, 4, CPU)
        assert image.shape == source.shape
        for box in (*boxes(0.5), *boxes(0.25)):
            torch.testing.assert_close(image[box], source[box], rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "f4"])
@pytest.mark.usefixtures("single_layers")
def test_windows_on_a_real_device_equal_those_on_the_host(dtype: str) -> None:
    source = NormalizedImage(Volume.from_array(make_pixels(dtype)), SCALINGS)
    image = DeviceImage(source, 4, torch.device("cuda", 0))
    for box in (*boxes(0.5), *boxes(0.75)):
        torch.testing.assert_close(image[box].cpu(), source[box], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("single_layers")
@given(st.lists(st.integers(0, 7), min_size=1, max_size=8))
def test_layers_can_be_read_in_any_order(starts: list[int]) -> None:
    whole = torch.arange(11.0)[None, None, :, None, None].expand(1, 1, 11, 2, 3).contiguous()
    image = DeviceImage(whole, 4, CPU)
    for start in starts:
        box = (0, slice(None), slice(start, start + 4), slice(0, 2), slice(1, 3))
        assert torch.equal(image[box], whole[box])


@pytest.mark.usefixtures("single_layers")
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.75])
def test_each_plane_is_read_once_and_only_the_planes_of_a_window_are_held(overlap: float) -> None:
    pixels, planes_read = make_pixels("uint16"), list[int]()

    def read_planes(z0: int, z1: int) -> Array:
        planes_read.extend(range(z0, z1))
        return pixels[:, z0:z1]

    source = NormalizedImage(Volume(SHAPE, pixels.dtype, read_planes), SCALINGS)
    image = DeviceImage(source, 4, CPU)
    for box in boxes(overlap):
        window = image[box]
    assert planes_read == list(range(11))
    assert window.untyped_storage().nbytes() == 4 * 2 * 4 * 6 * 7
    with pytest.raises(IndexError, match="5 planes"):
        image[0, slice(None), slice(0, 5), slice(0, 4), slice(0, 4)]


@pytest.mark.parametrize(
    ("dtype", "expected_dtype"), [("u1", "u1"), ("i1", "i1"), ("u2", "u2"), ("i2", "i2"), ("f8", "f4")]
)
def test_pixels_are_copied_in_their_stored_dtype_or_as_float32(dtype: str, expected_dtype: str) -> None:
    sent = list[Any]()

    def send(pixels: Array) -> Tensor:
        sent.append(pixels.dtype)
        return torch.from_numpy(np.ascontiguousarray(pixels))

    source = NormalizedImage(Volume.from_array(make_pixels(dtype)[:1]), SCALINGS[:1])
    source.upload_planes(0, 11, torch.empty(1, 11, 6, 7), send)
    assert sent == [np.dtype(expected_dtype)]


class SlowCopies:
    """Copies to an asynchronous device. Each is made as late as possible: when the caller waits for it."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []

    def __call__(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        self.pending.append((source, target))
        return self.finish

    def finish(self) -> None:
        for source, target in self.pending:
            target.copy_(source)
        self.pending.clear()


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    nbytes=st.integers(12, 200),
)
def test_buffer_is_not_filled_while_it_is_being_copied(shapes: list[tuple[int, int, int]], nbytes: int) -> None:
    copies = SlowCopies()
    upload = Uploader(CPU, nbytes, copies)
    blocks = [np.random.default_rng(0).random(shape, np.float32) for shape in shapes]
    uploaded = [upload(block) for block in blocks]
    assert len(copies.pending) <= 2
    copies.finish()
    assert all(np.array_equal(tensor.numpy(), block) for tensor, block in zip(uploaded, blocks, strict=True))


@given(
    dtype=st.sampled_from(["u1", "i1", "u2", "i2"]),
    shape=st.tuples(st.integers(1, 2), *[st.integers(1, 6)] * 3),
    spread=st.integers(1, 2**16),
    low=st.floats(0, 100),
    high=st.floats(0, 100),
    seed=st.integers(0, 99),
)
def test_percentiles_counted_on_the_device_are_exact(dtype, shape, spread, low, high, seed) -> None:
    ends = np.iinfo(dtype)
    random = np.random.default_rng(seed)
    pixels = random.integers(ends.min, min(ends.min + spread, ends.max), shape, dtype, endpoint=True)
    volume = Volume.from_array(pixels)
    uploaded = UploadedVolume(volume, CPU)
    for index, channel in enumerate(pixels):
        found = compute_percentiles(DeviceChannel(volume, index, device_pixels=uploaded), low, high)
        assert found == compute_percentiles(VolumeChannel(volume, index), low, high)
        # NumPy interpolates integers in their own dtype, which overflows for int8.
        np.testing.assert_allclose(found, np.percentile(channel.astype(np.float64), (low, high)))


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("level", [None, 7], ids=["varied", "constant"])
def test_uploaded_volume_is_read_once_and_normalized_as_on_the_host(bands, level, layers, monkeypatch) -> None:
    if layers:
        monkeypatch.setattr(device_image, "MAX_TRANSFER_BYTES", 1)
    pixels, planes_read = make_pixels("uint16")[:1], list[int]()
    if level is not None:
        pixels[:] = level

    def read_planes(z0: int, z1: int) -> Array:
        planes_read.extend(range(z0, z1))
        return pixels[:, z0:z1]

    volume = Volume((1, *SHAPE[1:]), pixels.dtype, read_planes)
    assert UploadedVolume.supports(volume)
    for dtype, size in (("f4", (4, 4, 4)), ("u4", (4, 4, 4)), ("u1", (1024, 1024, 1025))):
        assert not UploadedVolume.supports(Volume((1, *size), np.dtype(dtype), read_planes))
    uploaded = UploadedVolume(volume, CPU)
    if level is None:
        source, _notes = normalize_volume(volume, bands, uploaded)
        image = DeviceImage(source, 4, CPU)
        assert planes_read == list(range(11))
    image = DeviceImage(normalize_volume(volume, bands, uploaded)[0], 4, CPU)
    expected = DeviceImage(normalize_volume(volume, bands)[0], 4, CPU)
    for box in boxes(0.5):
        assert torch.equal(image[box], expected[box])
