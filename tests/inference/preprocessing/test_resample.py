import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pixels import make_pixels, replace_input
from torch.nn import functional

from service.core.errors import BadFile, BadParameter
from service.core.quantities import Diameter, VoxelSize
from service.core.types import Objects, Segmentation, Volume
from service.inference.preprocessing.interpolation import Resampling
from service.inference.preprocessing.resample import (
    ResampledImage,
    compute_resampled_size,
    compute_working_size,
    prepare,
    resample_segmentation,
)


def test_a_column_of_single_pixels_is_rejected(bands):
    with pytest.raises(BadFile, match=r"40 planes of the stack are single pixels.*axes="):
        prepare(Volume.from_array(np.ones((1, 40, 1, 1), np.uint8)), bands)
    assert prepare(Volume.from_array(np.ones((1, 1, 1, 1), np.uint8)), bands).image.shape == (1, 1, 1, 1, 1)


def test_volumes_are_resampled_only_if_both_voxel_sizes_are_known(bands):
    pixels = make_pixels("uint16", (4, 6, 8))[None]
    spec = replace_input(bands, voxel_size=(1.0, 0.5, 0.5))
    assert compute_working_size(Volume.from_array(pixels), spec) == (4, 6, 8)
    assert compute_working_size(Volume.from_array(pixels, VoxelSize(2, 0.5, 0.25)), bands) == (4, 6, 8)
    image, notes = prepare(Volume.from_array(pixels, VoxelSize(2, 0.5, 0.25)), spec)
    assert image.shape == (1, 1, 8, 6, 4)
    assert notes == ("Resampled from 4 x 6 x 8 to 8 x 6 x 4 voxels to match the model's voxel size.",)


@pytest.mark.parametrize(
    ("diameter", "voxel_size", "size"),
    [
        (Diameter((8,), "px"), None, (5, 13, 18)),
        (Diameter((4, 8, 20), "px"), None, (10, 12, 7)),
        (Diameter((2.0,), "um"), VoxelSize(1, 0.25, 0.25), (20, 13, 18)),
        (Diameter((8,), "px"), VoxelSize(1, 0.25, 0.25), (20, 13, 18)),
        (Diameter((4.0, 2.0, 2.0), "um"), VoxelSize(1, 0.25, 0.25), (10, 12, 18)),
        (Diameter((10.05,), "px"), None, (4, 10, 14)),
    ],
)
def test_objects_are_resampled_to_the_diameter_of_the_model(bands, diameter, voxel_size, size):
    spec = replace_input(bands, diameter=10.0, voxel_size=(1.0, 1.0, 1.0), roi_size=(2, 4, 4))
    volume = Volume.from_array(make_pixels("uint16", (4, 10, 14))[None], voxel_size)
    assert compute_working_size(volume, spec, diameter) == pytest.approx(size, abs=1)
    image, notes = prepare(volume, spec, diameter)
    assert image.shape[2:] == compute_working_size(volume, spec, diameter)
    assert bool(notes) == (size != (4, 10, 14))
    assert all(note.endswith("to match an object diameter of 10 voxels.") for note in notes)


def test_no_axis_becomes_shorter_than_the_window(bands):
    spec = replace_input(bands, diameter=10.0, roi_size=(8, 8, 8))
    volume = Volume.from_array(np.zeros((1, 4, 12, 40), np.uint8))
    assert compute_working_size(volume, spec, Diameter((20,), "px")) == (4, 8, 20)
    assert compute_working_size(volume, spec, Diameter((160,), "px")) == (4, 8, 8)
    assert compute_working_size(volume, spec, Diameter((5,), "px")) == (8, 24, 80)


@pytest.mark.parametrize(
    ("diameter", "voxel_size", "words"),
    [
        (Diameter((45,), "px"), None, "45px is larger than the stack"),
        (Diameter((39,), "px"), None, ""),
        (Diameter((1.8,), "um"), VoxelSize(2, 0.1, 0.1), "20 times as far .* 6 um deep, so that they span 3 planes"),
        (Diameter((2, 1.8, 1.8), "um"), VoxelSize(2, 0.1, 0.1), ""),
        (Diameter((1.8,), "um"), VoxelSize(0.6, 0.1, 0.1), ""),
    ],
)
def test_diameter_that_is_applied_only_in_part_is_noted(bands, diameter, voxel_size, words):
    spec = replace_input(bands, diameter=10.0, roi_size=(8, 8, 8))
    volume = Volume.from_array(make_pixels("uint16", (4, 12, 40))[None], voxel_size)
    _resampling_note, *notes = prepare(volume, spec, diameter).notes
    assert [bool(re.search(words, note)) for note in notes] == [True] * bool(words)


@pytest.mark.parametrize(
    ("diameter", "model_diameter", "message"),
    [
        (Diameter((8,), "px"), None, "has no object diameter"),
        (Diameter((2,), "um"), 10.0, "voxel_size="),
        (Diameter((1e-3,), "px"), 10.0, "differs too much"),
        (Diameter((8, 8, 1e6), "px"), 10.0, "differs too much"),
        (Diameter((1e-5,), "px"), 10.0, "differs too much"),
    ],
)
def test_an_implausible_diameter_is_rejected(bands, diameter, model_diameter, message):
    with pytest.raises(BadParameter, match=message):
        compute_working_size(
            Volume.from_array(make_pixels("uint16")[None]), replace_input(bands, diameter=model_diameter), diameter
        )


def test_resampled_sizes_are_rounded_and_implausible_voxel_sizes_are_rejected():
    unit_size = VoxelSize(1, 1, 1)
    assert compute_resampled_size((10, 10, 10), VoxelSize(1.005, 0.995, 1), unit_size) == (10, 10, 10)
    assert compute_resampled_size((1, 3, 200), VoxelSize(0.1, 0.1, 0.1), unit_size) == (1, 1, 20)
    for invalid in (VoxelSize(1000, 1, 1), VoxelSize(1, 1, 1e-5)):
        with pytest.raises(BadParameter, match="voxel_size="):
            compute_resampled_size((10, 10, 10), invalid, unit_size)


SIZES = st.tuples(*[st.integers(1, 12)] * 3)


@given(source_size=SIZES, target_size=SIZES, data=st.data())
def test_interpolation_does_not_depend_on_the_division_into_boxes(source_size, target_size, data):
    image = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 2, *source_size)).astype(np.float32))
    resampling = Resampling(source_size, target_size)
    resampled = ResampledImage(image, resampling).to_tensor()
    expected = functional.interpolate(image, size=target_size, mode="trilinear", align_corners=False)
    torch.testing.assert_close(resampled, expected, rtol=0, atol=2e-5)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in target_size]
    for z in pairwise(cuts[0]):
        for y in pairwise(cuts[1]):
            for x in pairwise(cuts[2]):
                box = (range(*z), range(*y), range(*x))
                source = tuple(slice(span.start, span.stop) for span in resampling.find_source_box(box))
                part = ResampledImage(image[(slice(None), slice(None), *source)], resampling, box)
                inside = tuple(slice(*span) for span in (z, y, x))
                assert torch.equal(part.to_tensor(), resampled[(slice(None), slice(None), *inside)])
                assert part.shape == part.to_tensor().shape


def test_labels_are_resampled_to_the_nearest_voxel_and_renumbered():
    labels = np.zeros((4, 4, 4), np.uint16)
    labels[:, :, 2:] = 5
    labels[0, 0, 0] = 2
    segmentation = Segmentation(labels, "labels", VoxelSize(1, 1, 1), count=5)
    assert resample_segmentation(segmentation, (4, 4, 4)) is segmentation
    actual = resample_segmentation(segmentation, (2, 8, 4))
    assert actual.pixels.dtype == np.uint16
    assert (actual.count, actual.voxel_size) == (1, VoxelSize(1, 1, 1))
    np.testing.assert_array_equal(actual.pixels, np.broadcast_to([0, 0, 1, 1], (2, 8, 4)))
    without_background = Segmentation(np.full((2, 2, 2), 3, np.uint16), "labels", count=3)
    actual = resample_segmentation(without_background, (1, 1, 5))
    assert (actual.pixels.tolist(), actual.count) == ([[[1, 1, 1, 1, 1]]], 1)


def test_the_statistics_of_objects_that_vanish_are_removed() -> None:
    labels = np.array([1, 0, 0, 0, 2, 2, 0, 3], np.uint16).reshape(1, 1, 8)
    objects = Objects(np.array([1, 2, 1]), np.array([0.6, 0.7, 0.8], np.float32), np.ones(3, np.float32))
    actual = resample_segmentation(Segmentation(labels, "labels", count=3, objects=objects), (1, 1, 3))
    assert actual.objects is not None
    assert actual.count == len(actual.objects) == actual.pixels.max() == 1
    assert actual.objects.confidence.tolist() == pytest.approx([0.7])


def test_enlarging_and_shrinking_by_integer_factors_restores_labels():
    labels = np.random.default_rng(0).integers(0, 9, (3, 4, 5)).astype(np.uint16)
    labels[0, 0, :] = np.arange(5)
    labels[0, 1, :4] = np.arange(5, 9)
    large = resample_segmentation(Segmentation(labels, "labels", count=8), (9, 4, 15))
    small = resample_segmentation(large, (3, 4, 5))
    np.testing.assert_array_equal(small.pixels, labels)
    assert small.count == 8


def test_classes_and_probabilities_are_resampled():
    classes = np.array([[[0, 0, 2, 2]]], np.uint8)
    assert resample_segmentation(Segmentation(classes, "classes"), (1, 1, 2)).pixels.tolist() == [[[0, 2]]]
    source = np.random.default_rng(0).random((2, 5, 9, 7), np.float32)
    larger = resample_segmentation(Segmentation(source, "probabilities"), (9, 6, 14)).pixels
    expected = functional.interpolate(
        torch.from_numpy(source)[None], size=(9, 6, 14), mode="trilinear", align_corners=False
    )
    np.testing.assert_allclose(larger, expected[0].numpy(), rtol=0, atol=2e-5)
    probabilities = np.array([0, 0, 1, 1], np.float32).reshape(1, 1, 1, 4)
    actual = resample_segmentation(Segmentation(probabilities, "probabilities"), (2, 1, 2)).pixels
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.broadcast_to([0, 1], (1, 2, 1, 2)))


def test_an_image_is_resampled_by_several_threads_in_inference_mode():
    image = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 1, 40, 64, 64)).astype(np.float32))
    resampled = ResampledImage(image, Resampling((40, 64, 64), (80, 128, 128)))
    expected = resampled.to_tensor()
    with torch.inference_mode():
        assert torch.equal(resampled.to_tensor(), expected)
