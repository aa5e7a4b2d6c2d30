import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pixels import DTYPES, make_pixels, replace_input

from service.core.errors import BadFile
from service.core.types import Volume
from service.inference.preprocessing import normalize, percentiles
from service.inference.preprocessing.normalize import (
    MAX_MAGNITUDE,
    IntensityScaling,
    NormalizedImage,
    fit_scaling,
)
from service.inference.preprocessing.resample import prepare
from service.models.spec_parts import PercentileNormalization, RangeNormalization, ZScoreNormalization

PERCENTILE, ZSCORE = PercentileNormalization(kind="percentile"), ZScoreNormalization(kind="zscore")


def normalize_checked(pixels, normalisation=PERCENTILE):
    out = fit_scaling(pixels, normalisation).apply(pixels)
    assert out.dtype == np.float32
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_percentile_normalization_of_every_dtype(dtype):
    pixels = make_pixels(dtype)
    low, high = np.percentile(pixels.astype(np.float64), (1, 99.8))
    expected = (pixels.astype(np.float64) - low) / (high - low)
    np.testing.assert_allclose(normalize_checked(pixels), expected, atol=2e-6)


@pytest.mark.parametrize("offset", [2**24 + 1, 2**31 - 200])
def test_integers_beyond_float32_keep_their_differences(offset):
    pixels = (np.arange(100, dtype=np.uint32) + offset).reshape(1, 10, 10)
    normalisation = RangeNormalization(kind="range", low=offset, high=offset + 1)
    np.testing.assert_array_equal(normalize_checked(pixels, normalisation).ravel(), np.arange(100))


def test_zscore_range_and_percentile_normalization():
    pixels = make_pixels("uint16")
    scaled = normalize_checked(pixels, ZSCORE)
    assert abs(scaled.mean()) < 1e-6
    assert scaled.std() == pytest.approx(1, abs=1e-5)
    scaled = normalize_checked(pixels, RangeNormalization(kind="range", low=100, high=300))
    np.testing.assert_allclose(scaled, (pixels.astype(float) - 100) / 200, atol=1e-6)
    clipped = normalize_checked(pixels, PercentileNormalization(kind="percentile", high=50, clip=(0, 1)))
    assert (clipped.min(), clipped.max()) == (0, 1)


@pytest.mark.parametrize("normalisation", [PERCENTILE, ZSCORE])
def test_constant_channels_become_zero_and_extreme_pixels_stay_finite(normalisation):
    for dtype in ("uint8", "uint16", "int32", "float32", "float64"):
        assert not normalize_checked(np.full((2, 3, 4), 7, dtype), normalisation).any()
    for extreme in (3e38, 1e300):
        pixels = np.random.default_rng(0).normal(0, 1e-3, (4, 30, 30))
        pixels[1, 2, 3], pixels[0, 0, 0] = extreme, -extreme
        values = normalize_checked(pixels, normalisation)
        assert np.isfinite(values).all()
        assert np.abs(values).max() <= MAX_MAGNITUDE


@pytest.mark.parametrize(
    ("dtype", "extreme", "is_noted"),
    [("uint16", 65_535, False), ("uint32", 2**32 - 1, True), ("float32", -1e20, True), ("float32", 1e4, False)],
)
def test_pixels_that_are_limited_to_the_maximum_magnitude_are_noted(bands, dtype, extreme, is_noted):
    pixels = make_pixels(dtype, (4, 20, 20))[None]
    pixels[0, 0, 0, 0] = extreme

    notes = prepare(Volume.from_array(pixels), replace_input(bands, normalisation=PERCENTILE)).notes

    assert any(f"pixels with the value {extreme:.3g}" in note for note in notes) == is_noted


@pytest.mark.parametrize(("offset", "is_noted"), [(0, False), (2**40, False), (2**60, True)])
def test_intensities_that_are_not_distinguished_are_noted(bands, offset, is_noted):
    pixels = np.random.default_rng(0).integers(0, 3000, (1, 8, 16, 16)) + offset
    notes = prepare(Volume.from_array(pixels), replace_input(bands, normalisation=PERCENTILE)).notes
    assert [note for note in notes if "differences below 256 are lost" in note] == list(notes)
    assert bool(notes) == is_noted


def test_few_bright_pixels_on_a_flat_background_stay_visible():
    pixels = np.zeros((4, 50, 50), np.uint16)
    pixels[2, 3, 4] = 1000
    values = normalize_checked(pixels)
    assert (values[2, 3, 4], np.count_nonzero(values)) == (1, 1)


# The last ones are values for missing data of ITK and GDAL, netCDF, and programs that round them.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "missing",
    [(np.nan, np.inf, -np.inf, np.nan), (-np.finfo(np.float32).max, np.finfo(np.float32).max, 9.96921e36, -3.4e38)],
)
def test_pixels_without_intensities_are_replaced_with_the_lowest_intensity(bands, missing, dtype):
    pixels = make_pixels(dtype)[None]
    clean = pixels.copy()
    pixels[0, 0, 0, :4] = missing
    lowest = pixels[np.abs(pixels) < 1e30].min()
    clean[0, 0, 0, :4] = lowest
    actual = prepare(Volume.from_array(pixels), bands)
    expected = prepare(Volume.from_array(clean), bands).image.to_tensor()
    np.testing.assert_array_equal(actual.image.to_tensor().numpy(), expected.numpy())
    assert [note.split(" or infinite")[0] for note in actual.notes] == ["4 pixels that are NaN"]


def test_a_channel_of_only_nan_is_rejected(bands):
    pixels = np.ones((2, 2, 3, 4), np.float32)
    pixels[1] = np.nan
    with pytest.raises(BadFile, match="All pixels are NaN"):
        prepare(Volume.from_array(pixels), replace_input(bands, normalisation=PERCENTILE, channels=2))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("dtype", ["uint16", "float32", "int32"])
def test_pixels_are_normalized_when_they_are_read(bands, channels, dtype):
    """Each channel is normalized separately. The volume may be read-only."""
    pixels = np.stack([make_pixels(dtype, (5, 7, 11)) * (1 + c) for c in range(channels)]).astype(dtype)
    pixels.flags.writeable = False
    spec = replace_input(bands, normalisation=PERCENTILE, channels=channels)
    image, notes = prepare(Volume.from_array(pixels), spec)
    expected = np.stack([normalize_checked(channel) for channel in pixels])
    assert (image.shape, notes) == ((1, *pixels.shape), ())
    part = image[0, slice(None), slice(1, 4), slice(2, 99), slice(0, 5)]
    assert part.dtype == torch.float32
    np.testing.assert_array_equal(part.numpy(), expected[:, 1:4, 2:99, 0:5])
    np.testing.assert_array_equal(image.to_tensor().numpy(), expected[None])


def test_statistics_do_not_depend_on_the_block_size(bands, monkeypatch):
    pixels = np.random.default_rng(0).normal(7, 3, (1, 9, 10, 11)).astype(np.float32)
    for normalisation in (PERCENTILE, ZSCORE):
        spec = replace_input(bands, normalisation=normalisation)
        monkeypatch.setattr(normalize, "BLOCK_VOXELS", 2**22)
        monkeypatch.setattr(percentiles, "MAX_SORTED_VOXELS", 2**22)
        whole = prepare(Volume.from_array(pixels), spec).image.to_tensor()
        monkeypatch.setattr(normalize, "BLOCK_VOXELS", 250)
        monkeypatch.setattr(percentiles, "MAX_SORTED_VOXELS", 250)
        np.testing.assert_allclose(prepare(Volume.from_array(pixels), spec).image.to_tensor(), whole, atol=1e-6)


def test_a_large_volume_is_read_a_few_planes_at_a_time(bands, monkeypatch):
    monkeypatch.setattr(normalize, "BLOCK_VOXELS", 4 * 32 * 40)
    pixels = np.random.default_rng(0).integers(0, 3000, (1, 64, 32, 40), dtype=np.uint16)
    ranges = []

    def read(z0, z1):
        ranges.append((z0, z1))
        return pixels[:, z0:z1]

    volume = Volume(pixels.shape, pixels.dtype, read)
    image = prepare(volume, replace_input(bands, normalisation=PERCENTILE)).image
    assert max(z1 - z0 for z0, z1 in ranges) == 4
    del ranges[:]
    for z0 in (0, 16, 32, 48):
        for x0 in range(0, 40, 8):
            image[0, slice(None), slice(z0, z0 + 16), slice(0, 32), slice(x0, x0 + 8)]
    assert ranges == [(0, 16), (16, 32), (32, 48), (48, 64)]


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8", "?"])
@pytest.mark.parametrize("limits", [(-1e6, 1e6), (-0.25, 0.5)])
def test_reading_into_a_batch_equals_indexing(dtype: str, limits: tuple[float, float]) -> None:
    """The cases include pixels that are not finite, with a substitute."""
    pixels = np.random.default_rng(1).integers(0, 100, (2, 5, 6, 7)).astype(dtype)
    has_nonfinite = pixels.dtype.kind == "f" and limits[0] < -1
    if has_nonfinite:
        pixels[:, 2, 3, ::3] = np.nan, np.inf, -np.inf
    scalings = [IntensityScaling(30.5, 70, *limits, 44.25 if has_nonfinite else None), IntensityScaling(0, 0)]
    box = (0, slice(None), slice(1, 4), slice(2, 6), slice(0, 7, 2))
    for stored in (pixels, np.broadcast_to(pixels[:, :1], pixels.shape), pixels[:, ::-1, :, ::-1]):
        image = NormalizedImage(Volume.from_array(stored), scalings)
        for out in (torch.full((2, 3, 4, 4), torch.nan), torch.full((2, 3, 4, 4), torch.nan, dtype=torch.bfloat16)):
            image.read_into(box, out)
            assert torch.allclose(out.float(), image[box].to(out.dtype).float(), rtol=1e-6, atol=1e-7)


def test_planes_are_read_once_for_several_threads():
    """Concurrent batches are filled by several threads."""
    pixels, reads, barrier = make_pixels("uint16", (1, 8, 4, 4)), [], threading.Barrier(4, timeout=20)

    def read(z0, z1):
        reads.append((z0, z1))
        time.sleep(0.05)
        return pixels[:, z0:z1]

    def read_window(_):
        barrier.wait()
        return image[0, slice(None), slice(2, 6), slice(0, 4), slice(0, 4)]

    image = NormalizedImage(Volume(pixels.shape, pixels.dtype, read), [IntensityScaling(0, 1)])
    with ThreadPoolExecutor(4) as pool:
        windows = list(pool.map(read_window, range(4)))
    assert reads == [(2, 6)]
    assert all(torch.equal(window, torch.from_numpy(pixels[:, 2:6].astype(np.float32))) for window in windows)


def test_channels_can_be_normalized_differently(bands):
    pixels = np.stack([make_pixels("uint16"), make_pixels("uint16")])
    fixed = RangeNormalization(kind="range", low=100, high=300)
    spec = replace_input(bands, channels=2, normalisation=(ZSCORE, fixed))
    normalized = prepare(Volume.from_array(pixels), spec).image.to_tensor()[0].numpy()
    np.testing.assert_array_equal(normalized[0], fit_scaling(pixels[0], ZSCORE).apply(pixels[0]))
    np.testing.assert_array_equal(normalized[1], fit_scaling(pixels[1], fixed).apply(pixels[1]))
