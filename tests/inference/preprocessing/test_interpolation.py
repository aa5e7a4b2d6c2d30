import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import zoom

from service.inference.preprocessing.interpolation import Resampling, compute_interpolation

SIZES = st.tuples(*[st.integers(1, 12)] * 3)


def make_image(size):
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def resample(image, resampling, box=None):
    """Return a box of the resampled image, or all of it."""
    box = box or tuple(map(range, resampling.target_size))
    source_box = tuple(slice(span.start, span.stop) for span in resampling.find_source_box(box))
    return resampling.interpolate(image[source_box][None], box)[0]


@given(source_size=SIZES, target_size=SIZES)
def test_cubic_splines_are_those_of_scipy(source_size, target_size):
    image = make_image(source_size)
    factors = [target / source for source, target in zip(source_size, target_size, strict=True)]
    expected = zoom(image, factors, order=3, mode="nearest", grid_mode=True)
    actual = resample(image, Resampling(source_size, target_size, ("cubic", "cubic", "cubic")))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3)


@given(source_size=SIZES, target_size=SIZES, data=st.data())
def test_cubic_interpolation_does_not_depend_on_the_division_into_boxes(source_size, target_size, data):
    image, resampling = make_image(source_size), Resampling(source_size, target_size, ("nearest", "cubic", "cubic"))
    box = tuple(range(data.draw(st.integers(0, length - 1)), length) for length in target_size)
    part = resample(image, resampling, box)
    assert np.array_equal(part, resample(image, resampling)[tuple(slice(span.start, None) for span in box)])


@pytest.mark.parametrize("kind", ["linear", "cubic", "nearest"])
@given(source_length=st.integers(1, 40), target_length=st.integers(1, 40))
def test_weights_of_each_target_voxel_add_up_to_one(kind, source_length, target_length):
    interpolation = compute_interpolation(source_length, target_length, kind)
    np.testing.assert_allclose(interpolation.weights.sum(0), 1, rtol=1e-6)
    assert (np.diff(interpolation.lower_indices) >= 0).all()
    assert interpolation.indices.min() >= 0
    assert interpolation.indices.max() < source_length


def test_nearest_planes_are_repeated():
    image = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
    resampled = resample(image, Resampling((3, 1, 1), (6, 1, 1), ("nearest", "linear", "linear")))
    assert resampled.ravel().tolist() == [0, 0, 1, 1, 2, 2]
