import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from service.core.types import Volume
from service.inference.preprocessing import normalize
from service.inference.preprocessing import percentiles as percentiles_module
from service.inference.preprocessing.normalize import VolumeChannel
from service.inference.preprocessing.percentiles import compute_percentiles


@settings(max_examples=50, deadline=None)
@given(
    arrays(st.sampled_from([np.bool_, np.uint8, np.int8, np.uint16, np.int16]), st.tuples(*[st.integers(1, 5)] * 3)),
    st.floats(0, 50),
    st.floats(50, 100),
)
def test_histogram_percentiles_equal_those_of_numpy(pixels, low, high):
    np.testing.assert_allclose(
        compute_percentiles(pixels, low, high),
        np.percentile(pixels.astype(np.float64), (low, high)),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint64", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize(("low", "high"), [(0, 100), (1, 99.8), (33.3, 50)])
@pytest.mark.parametrize("max_sorted", [50, 2**22], ids=["counted", "sorted"])
def test_percentiles_of_wide_dtypes_equal_those_of_numpy(dtype, low, high, max_sorted, monkeypatch):
    monkeypatch.setattr(normalize, "BLOCK_VOXELS", 50)
    monkeypatch.setattr(percentiles_module, "MAX_SORTED_VOXELS", max_sorted)
    rng, kind = np.random.default_rng(0), np.dtype(dtype).kind
    pixels = rng.normal(0, 300, (7, 5, 9)) if kind != "u" else rng.uniform(0, 300, (7, 5, 9))
    pixels = (pixels * 10.0 ** rng.integers(0, 2 if dtype == "float16" else 6, pixels.shape)).astype(dtype)
    if kind == "f":
        pixels.flat[:6] = 0.0, -0.0, np.finfo(dtype).max, np.finfo(dtype).min, np.finfo(dtype).tiny, 1
    else:
        pixels.flat[:3] = np.iinfo(dtype).max, np.iinfo(dtype).min, 0
    actual = compute_percentiles(VolumeChannel(Volume.from_array(pixels[None]), 0), low, high)
    expected = np.percentile(pixels.astype(np.longdouble), (low, high))
    # NumPy interpolates float32 in float32.
    np.testing.assert_allclose(actual, expected.astype(np.float64), rtol=1e-12 if max_sorted == 50 else 1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
def test_counting_needs_little_memory(dtype):
    """Converting all 4 million voxels to 64 bits together would leave a gap of 32 MiB in the memory of a server."""
    pixels = np.random.default_rng(0).integers(0, 100, (1, 64, 256, 256)).astype(dtype)
    volume = Volume.from_array(pixels)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        actual = compute_percentiles(VolumeChannel(volume, 0), 1, 99.8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert actual == tuple(np.percentile(pixels, (1, 99.8)))
    # The keys of signed pixels are a copy of the pixels.
    assert peak - before < 4 * 2**20 + (pixels.nbytes if dtype == "int16" else 0)
