from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.core.types import Segmentation, Volume
from service.inference.preprocessing import crop
from service.inference.preprocessing.crop import crop_zeros


def test_planes_of_zeros_at_all_faces_are_removed():
    pixels = np.zeros((2, 6, 7, 8), np.int16)
    pixels[0, 1, 2, 3] = pixels[1, 4, 3, 6] = -1
    part = crop_zeros(Volume.from_array(pixels))
    assert part is not None
    assert part.slices == (slice(1, 5), slice(2, 4), slice(3, 7))
    assert part.volume.shape == (2, 4, 2, 4)
    assert np.array_equal(part.volume.read_all(), pixels[:, 1:5, 2:4, 3:7])
    assert np.array_equal(part.volume.read(2, 4), pixels[:, 3:5, 2:4, 3:7])


def test_volumes_without_planes_of_zeros_and_empty_volumes_are_used_completely():
    pixels = np.zeros((1, 3, 3, 3), np.uint8)
    assert crop_zeros(Volume.from_array(pixels)) is None
    pixels[0, 0] = pixels[0, :, 0] = pixels[0, :, :, 0] = 1
    pixels[0, 2, 2, 2] = 1
    assert crop_zeros(Volume.from_array(pixels)) is None


@given(lower=st.tuples(*[st.integers(0, 3)] * 3), upper=st.tuples(*[st.integers(1, 3)] * 3))
def test_segmentation_is_pasted_where_the_part_was(lower, upper):
    pixels = np.zeros((1, 7, 7, 7), np.uint8)
    slices = tuple(slice(first, first + n) for first, n in zip(lower, upper, strict=True))
    pixels[(0, *slices)] = 1
    part = crop_zeros(Volume.from_array(pixels))
    if part is not None:
        segmentation = part.undo(Segmentation(part.volume.read_all()[0], "classes"), None, np.zeros)
        assert np.array_equal(segmentation.pixels, pixels[0])


def test_background_has_probability_one_in_removed_planes(bands):
    pixels = np.zeros((1, 2, 2, 4), np.uint8)
    pixels[..., 1:3] = 1
    part = crop_zeros(Volume.from_array(pixels))
    probabilities = Segmentation(np.full((3, 2, 2, 2), 0.25, np.float32), "probabilities")
    whole = part.undo(probabilities, bands, np.zeros).pixels
    assert whole.shape == (3, 2, 2, 4)
    assert whole[:, 0, 0].T.tolist() == [[1, 0, 0], [0.25] * 3, [0.25] * 3, [1, 0, 0]]


def test_volume_is_read_in_blocks(monkeypatch):
    monkeypatch.setattr(crop, "BLOCK_VOXELS", 8)
    pixels = np.zeros((1, 9, 2, 2), np.uint8)
    pixels[0, 4:7] = 1
    volume, reads = Volume.from_array(pixels), []
    recording = replace(volume, read=lambda z0, z1: reads.append(z1 - z0) or volume.read(z0, z1))
    assert crop_zeros(recording).slices[0] == slice(4, 7)
    assert max(reads) == 2
