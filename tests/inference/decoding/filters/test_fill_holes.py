import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

from service.inference.decoding.filters.fill_holes import fill_holes


def fill_holes_one_by_one(labels):
    """Fill holes as `fill_holes` does, one component of the background at a time."""
    filled = labels.copy()
    components, count = ndimage.label(labels == 0)
    for number in range(1, count + 1):
        hole = components == number
        faces = [hole.take(end, axis) for axis in range(3) if labels.shape[axis] > 1 for end in (0, -1)]
        neighbor_labels = np.unique(labels[ndimage.binary_dilation(hole) & ~hole])
        if not any(face.any() for face in faces) and len(neighbor_labels) == 1:
            filled[hole] = neighbor_labels[0]
    return filled


@settings(max_examples=150, deadline=None)
@given(
    arrays(
        st.sampled_from([np.uint16, np.uint32]),
        st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 8)),
        elements=st.sampled_from([0, 0, 1, 1, 1, 1, 2]),
    )
)
def test_holes_are_filled_as_in_the_reference_implementation(labels):
    filled = labels.copy()
    fill_holes(filled)
    np.testing.assert_array_equal(filled, fill_holes_one_by_one(labels))


def test_only_the_inside_of_a_shell_is_filled():
    z, y, x = np.indices((20, 22, 24))
    distance = np.sqrt((z - 10) ** 2 + (y - 10) ** 2 + (x - 11) ** 2)
    labels = np.where((distance < 8) & (distance > 4), 7, 0).astype(np.uint16)
    fill_holes(labels)
    np.testing.assert_array_equal(labels, np.where(distance < 8, 7, 0))
