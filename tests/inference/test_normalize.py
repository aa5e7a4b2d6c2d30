import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from service.core.errors import BadFile, BadParameter
from service.core.volume import Diameter, Segmentation, Volume, VoxelSize
from service.inference import normalize
from service.inference.normalize import FARTHEST, Image, Scaling, normalise, percentiles
from service.inference.resample import on_grid, prepare, resampled_size, working_size
from service.models.spec import PercentileNormalisation, RangeNormalisation, ZScoreNormalisation

PERCENTILE = PercentileNormalisation(kind="percentile")
DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"] + [
    f"float{bits}" for bits in (16, 32, 64)
]


def normalised(pixels, normalisation=PERCENTILE):
    out = normalise(pixels, normalisation)
    assert out.dtype == np.float32
    return out


def spec_of(bands, **changes):
    return bands.model_copy(update={"input": bands.input.model_copy(update=changes)})


def some_pixels(dtype, shape=(3, 7, 11)):
    pixels = np.random.default_rng(0).uniform(0, 120, shape)
    return pixels > 60 if dtype == "bool" else pixels.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), [(0, 100), (1, 99.8), (33.3, 50)])
def test_percentiles_are_those_of_numpy(dtype, low, high):
    pixels = some_pixels(dtype)
    if np.dtype(dtype).kind == "i":
        pixels -= 60
    expected = np.percentile(pixels.astype(np.float64), (low, high))
    np.testing.assert_allclose(percentiles(pixels, low, high), expected, rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    arrays(st.sampled_from([np.uint8, np.int8, np.uint16, np.int16]), st.tuples(*[st.integers(1, 5)] * 3)),
    st.floats(0, 50),
    st.floats(50, 100),
)
def test_histogram_percentiles_are_those_of_numpy_at_any_rank(pixels, low, high):
    np.testing.assert_allclose(
        percentiles(pixels, low, high), np.percentile(pixels.astype(np.float64), (low, high)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_percentile_normalisation_of_every_dtype(dtype):
    pixels = some_pixels(dtype)
    low, high = np.percentile(pixels.astype(np.float64), (1, 99.8))
    expected = (pixels.astype(np.float64) - low) / (high - low)
    np.testing.assert_allclose(normalised(pixels), expected, atol=2e-6)


@pytest.mark.parametrize("offset", [2**24 + 1, 2**31 - 200])
def test_integers_beyond_float32_keep_their_differences(offset):
    pixels = (np.arange(100, dtype=np.uint32) + offset).reshape(1, 10, 10)
    normalisation = RangeNormalisation(kind="range", low=offset, high=offset + 1)
    np.testing.assert_array_equal(normalised(pixels, normalisation).ravel(), np.arange(100))


def test_clipping():
    values = normalised(some_pixels("uint16"), PercentileNormalisation(kind="percentile", high=50, clip=(0, 1)))
    assert values.min() == 0
    assert values.max() == 1


def test_zscore_and_range():
    pixels = some_pixels("uint16")
    scaled = normalised(pixels, ZScoreNormalisation(kind="zscore"))
    assert abs(scaled.mean()) < 1e-6
    assert scaled.std() == pytest.approx(1, abs=1e-5)
    scaled = normalised(pixels, RangeNormalisation(kind="range", low=100, high=300))
    np.testing.assert_allclose(scaled, (pixels.astype(float) - 100) / 200, atol=1e-6)


@pytest.mark.parametrize("normalisation", [PERCENTILE, ZScoreNormalisation(kind="zscore")])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32", "float64"])
def test_constant_volumes_become_zeros(normalisation, dtype):
    assert not normalised(np.full((2, 3, 4), 7, dtype), normalisation).any()


def test_few_bright_pixels_on_a_flat_background_do_not_vanish():
    pixels = np.zeros((4, 50, 50), np.uint16)
    pixels[2, 3, 4] = 1000
    values = normalised(pixels)
    assert values[2, 3, 4] == 1
    assert np.count_nonzero(values) == 1


@pytest.mark.parametrize("normalisation", [PERCENTILE, ZScoreNormalisation(kind="zscore")])
@pytest.mark.parametrize("extreme", [3e38, 1e300])
def test_extreme_pixels_stay_finite(normalisation, extreme):
    pixels = np.random.default_rng(0).normal(0, 1e-3, (4, 30, 30))
    pixels[1, 2, 3], pixels[0, 0, 0] = extreme, -extreme
    values = normalised(pixels, normalisation)
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= FARTHEST


def test_nan_and_infinity_count_as_the_lowest_finite_value(bands):
    pixels = some_pixels("float32")[None]
    clean = pixels.copy()
    pixels[0, 0, 0, :4] = np.nan, np.inf, -np.inf, np.nan
    lowest = pixels[np.isfinite(pixels)].min()
    clean[0, 0, 0, :4] = lowest
    got = prepare(Volume.from_array(pixels), bands)
    expected = prepare(Volume.from_array(clean), bands).image.tensor()
    np.testing.assert_array_equal(got.image.tensor().numpy(), expected.numpy())
    assert got.notes == ("4 NaN or infinite pixels were taken for the lowest finite intensity.",)


def test_a_channel_of_nothing_but_nan_is_refused(bands):
    pixels = np.ones((2, 2, 3, 4), np.float32)
    pixels[1] = np.nan
    with pytest.raises(BadFile, match="Every pixel is NaN"):
        prepare(Volume.from_array(pixels), spec_of(bands, normalisation=PERCENTILE, channels=2))


def test_a_column_of_single_pixels_is_no_stack(bands):
    with pytest.raises(BadFile, match=r"40 planes are single pixels.*axes="):
        prepare(Volume.from_array(np.ones((1, 40, 1, 1), np.uint8)), bands)
    assert prepare(Volume.from_array(np.ones((1, 1, 1, 1), np.uint8)), bands).image.shape == (1, 1, 1, 1, 1)


def test_channels_are_normalised_each_on_its_own(bands):
    pixels = np.stack([some_pixels("uint16"), 7 * some_pixels("uint16") + 100])
    got = prepare(Volume.from_array(pixels), spec_of(bands, normalisation=PERCENTILE, channels=2))
    assert got.image.shape == (1, 2, 3, 7, 11)
    first, second = got.image.tensor()[0]
    np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("dtype", ["uint16", "float32", "int32"])
def test_pixels_are_normalised_where_they_are_read(bands, channels, dtype):
    pixels = np.stack([some_pixels(dtype, (5, 7, 11)) * (1 + c) for c in range(channels)]).astype(dtype)
    spec = spec_of(bands, normalisation=PERCENTILE, channels=channels)
    image = prepare(Volume.from_array(pixels), spec).image
    expected = np.stack([normalised(channel) for channel in pixels])
    part = image[0, slice(None), slice(1, 4), slice(2, 99), slice(0, 5)]
    assert part.dtype == torch.float32
    np.testing.assert_array_equal(part.numpy(), expected[:, 1:4, 2:99, 0:5])
    np.testing.assert_array_equal(image.tensor().numpy(), expected[None])


def test_read_only_pixels_and_the_volume_are_left_alone(bands):
    pixels = some_pixels("uint16")[None]
    pixels.flags.writeable = False
    image, notes = prepare(Volume.from_array(pixels), bands)
    assert image.tensor().is_contiguous()
    assert notes == ()


def test_resampling_only_where_both_voxel_sizes_are_known(bands):
    pixels = some_pixels("uint16", (4, 6, 8))[None]
    spec = spec_of(bands, voxel_size=(1.0, 0.5, 0.5))
    assert working_size(Volume.from_array(pixels), spec) == (4, 6, 8)
    assert working_size(Volume.from_array(pixels, VoxelSize(2, 0.5, 0.25)), bands) == (4, 6, 8)
    image, notes = prepare(Volume.from_array(pixels, VoxelSize(2, 0.5, 0.25)), spec)
    assert image.shape == (1, 1, 8, 6, 4)
    assert notes == ("Resampled from 4 x 6 x 8 to 8 x 6 x 4 voxels for the model's voxel size.",)


@pytest.mark.parametrize(
    ("diameter", "voxel_size", "size"),
    [
        (Diameter((8,), "px"), None, (5, 13, 18)),
        (Diameter((4, 8, 20), "px"), None, (10, 12, 7)),
        (Diameter((2.0,), "um"), VoxelSize(1, 0.25, 0.25), (5, 13, 18)),
        (Diameter((4.0, 2.0, 2.0), "um"), VoxelSize(1, 0.25, 0.25), (10, 12, 18)),
        (Diameter((10.05,), "px"), None, (4, 10, 14)),
    ],
)
def test_objects_become_as_wide_as_the_model_wants_them(bands, diameter, voxel_size, size):
    spec = spec_of(bands, diameter=10.0, voxel_size=(1.0, 1.0, 1.0), roi_size=(2, 4, 4))
    volume = Volume.from_array(some_pixels("uint16", (4, 10, 14))[None], voxel_size)
    assert working_size(volume, spec, diameter) == pytest.approx(size, abs=1)
    image, notes = prepare(volume, spec, diameter)
    assert image.shape[2:] == working_size(volume, spec, diameter)
    assert bool(notes) == (size != (4, 10, 14))
    assert all(note.endswith("for objects of 10 voxels.") for note in notes)


def test_no_axis_shrinks_below_the_window_for_a_stated_diameter(bands):
    spec = spec_of(bands, diameter=10.0, roi_size=(8, 8, 8))
    volume = Volume.from_array(np.zeros((1, 4, 12, 40), np.uint8))
    assert working_size(volume, spec, Diameter((20,), "px")) == (4, 8, 20)
    assert working_size(volume, spec, Diameter((160,), "px")) == (4, 8, 8)
    assert working_size(volume, spec, Diameter((5,), "px")) == (8, 24, 80)


@pytest.mark.parametrize(
    ("diameter", "wanted", "said"),
    [
        (Diameter((8,), "px"), None, "does not say"),
        (Diameter((2,), "um"), 10.0, "voxel_size="),
        (Diameter((1e-3,), "px"), 10.0, "too far"),
        (Diameter((8, 8, 1e6), "px"), 10.0, "too far"),
        (Diameter((1e-5,), "px"), 10.0, "too far"),
    ],
)
def test_a_diameter_that_cannot_be_is_refused(bands, diameter, wanted, said):
    with pytest.raises(BadParameter, match=said):
        working_size(Volume.from_array(some_pixels("uint16")[None]), spec_of(bands, diameter=wanted), diameter)


def test_resampled_sizes():
    one = VoxelSize(1, 1, 1)
    assert resampled_size((10, 10, 10), VoxelSize(1.005, 0.995, 1), one) == (10, 10, 10)
    assert resampled_size((1, 3, 200), VoxelSize(0.1, 0.1, 0.1), one) == (1, 1, 20)


@pytest.mark.parametrize("have", [VoxelSize(1000, 1, 1), VoxelSize(1, 1, 1e-5)])
def test_absurd_voxel_sizes_are_refused(have):
    with pytest.raises(BadParameter, match="voxel_size="):
        resampled_size((10, 10, 10), have, VoxelSize(1, 1, 1))


def test_on_grid_leaves_what_fits():
    segmentation = Segmentation(np.ones((2, 3, 4), np.uint16), "labels", count=1)
    assert on_grid(segmentation, (2, 3, 4)) is segmentation


def test_labels_come_back_by_nearest_voxel_and_gapless():
    labels = np.zeros((4, 4, 4), np.uint16)
    labels[:, :, 2:] = 5
    labels[0, 0, 0] = 2
    got = on_grid(Segmentation(labels, "labels", VoxelSize(1, 1, 1), count=5), (2, 8, 4))
    assert got.pixels.dtype == np.uint16
    assert got.count == 1
    assert got.voxel_size == VoxelSize(1, 1, 1)
    np.testing.assert_array_equal(got.pixels, np.broadcast_to([0, 0, 1, 1], (2, 8, 4)))


def test_labels_without_background_stay_without():
    got = on_grid(Segmentation(np.full((2, 2, 2), 3, np.uint16), "labels", count=3), (1, 1, 5))
    assert got.pixels.tolist() == [[[1, 1, 1, 1, 1]]]
    assert got.count == 1


def test_enlarging_and_shrinking_by_whole_factors_gives_labels_back():
    labels = np.random.default_rng(0).integers(0, 9, (3, 4, 5)).astype(np.uint16)
    labels[0, 0, :] = np.arange(5)
    labels[0, 1, :4] = np.arange(5, 9)
    large = on_grid(Segmentation(labels, "labels", count=8), (9, 4, 15))
    small = on_grid(large, (3, 4, 5))
    np.testing.assert_array_equal(small.pixels, labels)
    assert small.count == 8


def test_classes_and_probabilities_come_back():
    classes = np.array([[[0, 0, 2, 2]]], np.uint8)
    assert on_grid(Segmentation(classes, "classes"), (1, 1, 2)).pixels.tolist() == [[[0, 2]]]
    probabilities = np.array([0, 0, 1, 1], np.float32).reshape(1, 1, 1, 4)
    got = on_grid(Segmentation(probabilities, "probabilities"), (2, 1, 2)).pixels
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.broadcast_to([0, 1], (1, 2, 1, 2)))


@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint64", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize(("low", "high"), [(0, 100), (1, 99.8), (33.3, 50)])
def test_percentiles_of_large_volumes_are_counted_to_the_same_values(dtype, low, high, monkeypatch):
    monkeypatch.setattr(normalize, "BLOCK_VOXELS", 50)
    rng, kind = np.random.default_rng(0), np.dtype(dtype).kind
    pixels = rng.normal(0, 300, (7, 5, 9)) if kind != "u" else rng.uniform(0, 300, (7, 5, 9))
    pixels = (pixels * 10.0 ** rng.integers(0, 2 if dtype == "float16" else 6, pixels.shape)).astype(dtype)
    if kind == "f":
        pixels.flat[:6] = 0.0, -0.0, np.finfo(dtype).max, np.finfo(dtype).min, np.finfo(dtype).tiny, 1
    else:
        pixels.flat[:3] = np.iinfo(dtype).max, np.iinfo(dtype).min, 0
    got = percentiles(normalize.Blocks(Volume.from_array(pixels[None]), 0), low, high)
    expected = np.percentile(pixels.astype(np.longdouble), (low, high))
    np.testing.assert_allclose(got, expected.astype(np.float64), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
def test_counting_takes_next_to_nothing_beside_the_pixels(dtype):
    """Widened all at once, a stack of 4 million voxels leaves a hole of 32 MiB in a server's memory."""
    pixels = np.random.default_rng(0).integers(0, 100, (1, 64, 256, 256)).astype(dtype)
    volume = Volume.from_array(pixels)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        got = percentiles(normalize.Blocks(volume, 0), 1, 99.8)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got == tuple(np.percentile(pixels, (1, 99.8)))
    # Keys of signed pixels are a copy as large as these.
    assert most - before < 4 * 2**20 + (pixels.nbytes if dtype == "int16" else 0)


def test_statistics_do_not_depend_on_how_planes_are_taken_together(bands, monkeypatch):
    pixels = np.random.default_rng(0).normal(7, 3, (1, 9, 10, 11)).astype(np.float32)
    for normalisation in (PERCENTILE, ZScoreNormalisation(kind="zscore")):
        spec = spec_of(bands, normalisation=normalisation)
        monkeypatch.setattr(normalize, "BLOCK_VOXELS", 2**22)
        whole = prepare(Volume.from_array(pixels), spec).image.tensor()
        monkeypatch.setattr(normalize, "BLOCK_VOXELS", 250)
        np.testing.assert_allclose(prepare(Volume.from_array(pixels), spec).image.tensor(), whole, atol=1e-6)


def test_a_large_volume_is_read_a_few_planes_at_a_time(bands, monkeypatch):
    monkeypatch.setattr(normalize, "BLOCK_VOXELS", 4 * 32 * 40)
    pixels = np.random.default_rng(0).integers(0, 3000, (1, 64, 32, 40), dtype=np.uint16)
    ranges = []

    def read(z0, z1):
        ranges.append((z0, z1))
        return pixels[:, z0:z1]

    volume = Volume(pixels.shape, pixels.dtype, read)
    image = prepare(volume, spec_of(bands, normalisation=PERCENTILE)).image
    assert max(z1 - z0 for z0, z1 in ranges) == 4
    del ranges[:]
    for z0 in (0, 16, 32, 48):
        for x0 in range(0, 40, 8):
            image[0, slice(None), slice(z0, z0 + 16), slice(0, 32), slice(x0, x0 + 8)]
    assert ranges == [(0, 16), (16, 32), (32, 48), (48, 64)]


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8", "?"])
@pytest.mark.parametrize("limits", [(-1e6, 1e6), (-0.25, 0.5)])
def test_what_is_written_into_a_batch_is_what_indexing_gives(dtype: str, limits: tuple[float, float]) -> None:
    pixels = np.random.default_rng(1).integers(0, 100, (2, 5, 6, 7)).astype(dtype)
    scalings = [Scaling(30.5, 70, *limits), Scaling(0, 0)]
    box = (0, slice(None), slice(1, 4), slice(2, 6), slice(0, 7, 2))
    for stored in (pixels, np.broadcast_to(pixels[:, :1], pixels.shape), pixels[:, ::-1, :, ::-1]):
        image = Image(Volume.from_array(stored), scalings)
        for out in (torch.full((2, 3, 4, 4), torch.nan), torch.full((2, 3, 4, 4), torch.nan, dtype=torch.bfloat16)):
            image.write(box, out)
            assert torch.allclose(out.float(), image[box].to(out.dtype).float(), rtol=1e-6, atol=1e-7)


def test_not_finite_pixels_are_written_as_their_substitute() -> None:
    pixels = np.array([1, np.nan, 3, np.inf], np.float32).reshape(1, 1, 2, 2)
    out = torch.empty(1, 1, 2, 2)
    Image(Volume.from_array(pixels), [Scaling(1, 2, substitute=5)]).write((0, *[slice(None)] * 4), out)
    assert out.flatten().tolist() == [0, 2, 1, 2]


def test_planes_are_read_once_however_many_threads_cut_windows_from_them():
    """Batches that are computed at the same time are filled by several threads."""
    pixels, reads = some_pixels("uint16", (1, 8, 4, 4)), []

    def read(z0, z1):
        reads.append((z0, z1))
        time.sleep(0.05)
        return pixels[:, z0:z1]

    image = Image(Volume(pixels.shape, pixels.dtype, read), [Scaling(0, 1)])
    box = (0, slice(None), slice(2, 6), slice(0, 4), slice(0, 4))
    with ThreadPoolExecutor(4) as pool:
        windows = list(pool.map(lambda _: image[box], range(4)))
    assert reads == [(2, 6)]
    assert all(torch.equal(window, torch.from_numpy(pixels[:, 2:6].astype(np.float32))) for window in windows)
