import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

from service.inference.decoding.fill_holes import fill_holes


def by_definition(labels):
    """One component of the background after the other."""
    filled = labels.copy()
    components, count = ndimage.label(labels == 0)
    for number in range(1, count + 1):
        hole = components == number
        faces = [hole.take(end, axis) for axis in range(3) if labels.shape[axis] > 1 for end in (0, -1)]
        around = np.unique(labels[ndimage.binary_dilation(hole) & ~hole])
        if not any(face.any() for face in faces) and len(around) == 1:
            filled[hole] = around[0]
    return filled


@settings(max_examples=150, deadline=None)
@given(
    arrays(
        st.sampled_from([np.uint16, np.uint32]),
        st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 8)),
        elements=st.sampled_from([0, 0, 1, 1, 1, 1, 2]),
    )
)
def test_agrees_with_the_definition(labels):
    filled = labels.copy()
    fill_holes(filled)
    np.testing.assert_array_equal(filled, by_definition(labels))


def test_a_shell_becomes_solid_and_its_outside_stays():
    z, y, x = np.indices((20, 22, 24))
    distance = np.sqrt((z - 10) ** 2 + (y - 10) ** 2 + (x - 11) ** 2)
    labels = np.where((distance < 8) & (distance > 4), 7, 0).astype(np.uint16)
    fill_holes(labels)
    np.testing.assert_array_equal(labels, np.where(distance < 8, 7, 0))
