from typing import Any

import numpy as np
import pytest
from new_models import make_new_spec
from numpy.typing import NDArray

from service.core.errors import BadParameter
from service.core.quantities import Diameter
from service.core.types import Volume
from service.inference.preprocessing.resample import prepare
from service.training.stacks.annotated_stack import AnnotatedStack, Region
from service.training.stacks.parts import (
    StackPart,
    compute_part_targets,
    crop_to_annotated_planes,
    hold_out_parts,
    resample_stack,
    split_part,
)
from service.training.targets.instances import compute_instance_targets

SPEC = make_new_spec(input={"diameter": 16, "roi_size": [16, 16, 16]})


def make_grid(shape: tuple[int, int, int], pitch: tuple[int, int, int] = (6, 6, 6)) -> NDArray[np.uint16]:
    """Return labels of boxes on a regular grid, which are two thirds as long as the distance between them."""
    labels = np.zeros(shape, np.uint16)
    for number, corner in enumerate(
        np.ndindex(*(length // step for length, step in zip(shape, pitch, strict=True))), 1
    ):
        box = (slice(step * at, step * at + 2 * step // 3) for step, at in zip(pitch, corner, strict=True))
        labels[tuple(box)] = number
    return labels


def make_stack(shape: tuple[int, int, int], region: Region | None = None, **fields: Any) -> AnnotatedStack:
    labels = make_grid(shape)
    region = region or (slice(None), slice(None), slice(None))
    image = np.random.default_rng(0).integers(0, 999, shape, np.uint16)
    return AnnotatedStack("a", Volume.from_array(image[None]), labels[region], region, **fields)


def test_stacks_are_resampled_exactly_as_in_requests() -> None:
    # Flat objects need a large factor along z.
    diameter = Diameter((1.6, 8.0, 16.0), "px")
    stack = make_stack((6, 20, 30), extents=(1.6, 8.0, 16.0))
    part = resample_stack(stack, SPEC)
    assert part.image.shape == part.labels.shape == (60, 40, 30)
    assert np.array_equal(part.image, prepare(stack.volume, SPEC, diameter).image.to_tensor()[0, 0].numpy())
    assert np.array_equal(part.labels[5::10, ::2], stack.labels)
    region = (slice(1, 4), slice(5, 17), slice(0, 30))
    region_part = resample_stack(make_stack((6, 20, 30), region, extents=(1.6, 8.0, 16.0)), SPEC)
    assert np.array_equal(region_part.image, part.image[10:40, 10:34])
    assert np.array_equal(region_part.labels, part.labels[10:40, 10:34])
    assert resample_stack(make_stack((6, 20, 30)), SPEC).image.shape == (6, 20, 30)
    with pytest.raises(BadParameter, match=r"^a: .*differs too much"):
        resample_stack(make_stack((6, 20, 30), extents=(0.1, 8.0, 16.0)), SPEC)


def test_regions_that_become_too_large_are_refused() -> None:
    volume = Volume.from_array(np.broadcast_to(np.uint8(0), (1, 99, 999, 999)))
    labels = np.broadcast_to(np.uint8(1), (99, 999, 999))
    with pytest.raises(BadParameter, match="smaller region"):
        resample_stack(AnnotatedStack("a", volume, labels, extents=(1.0, 1.0, 1.0)), SPEC)


def test_parts_are_split_by_object_voxels_in_plane() -> None:
    labels = make_grid((12, 24, 60))
    labels[:, :, 36:] = 0
    image = labels.astype(np.float32)
    first, last = split_part(StackPart("a", image, labels, labels), 0.5)
    assert first.image.shape == first.truth.shape == (12, 24, 16)
    assert last.image.shape == (12, 24, 44)
    assert np.array_equal(np.concatenate([first.truth, last.truth], 2), labels)
    deep_part = StackPart("a", image.swapaxes(0, 2)[:, :, :], labels.swapaxes(0, 2), labels.swapaxes(0, 2))
    assert split_part(deep_part, 0.5)[0].image.shape == (16, 24, 12)


def test_held_out_parts_of_large_objects_are_compact() -> None:
    labels = make_grid((12, 60, 60))
    part = StackPart("a", labels.astype(np.float32), labels, labels)
    slabs, blocks = (hold_out_parts([part], 0.25, has_large_objects=is_large) for is_large in (False, True))
    for parts in (slabs, blocks):
        (training,), (validation,), (test,) = parts.training, parts.validation, parts.test
        sizes = [piece.truth.size / labels.size for piece in (training, validation, test)]
        assert sizes == pytest.approx([0.6, 0.2, 0.2], abs=0.06)
        assert sum(sizes) == pytest.approx(1)
    assert min(slabs.test[0].truth.shape[1:]) < 16
    assert min(blocks.test[0].truth.shape[1:]) > 20
    assert min(blocks.validation[0].truth.shape[1:]) > 20


def test_objects_do_not_end_at_planes_that_are_not_annotated() -> None:
    labels = np.zeros((9, 16, 16), np.uint16)
    labels[:, 4:12, 4:12] = 1
    unknown = np.zeros(labels.shape, np.bool_)
    unknown[[0, 1, 5, 8]] = True
    known_labels = np.where(unknown, np.uint16(0), labels)
    part = StackPart("a", labels.astype(np.float32), known_labels, known_labels, unknown, unknown)
    targets = compute_part_targets(part, compute_instance_targets)
    for run in (slice(2, 5), slice(6, 8)):
        assert np.array_equal(targets[:2, run], compute_instance_targets(labels[run]))
    assert np.array_equal(targets[2], ~unknown)
    assert np.array_equal(crop_to_annotated_planes(part).labels, known_labels[2:8])


def test_held_out_parts_are_not_used_for_training() -> None:
    large_part, small_part, empty_part = (
        StackPart("a", labels.astype(np.float32), labels, labels)
        for labels in (make_grid((12, 24, 60)), make_grid((6, 6, 60)), np.zeros((6, 6, 60), np.uint16))
    )
    parts = hold_out_parts([large_part, empty_part], 0.2)
    assert parts.has_separate_test
    pieces = [parts.training[0].truth, parts.validation[0].truth, parts.test[0].truth]
    assert np.array_equal(np.concatenate(pieces, 2), large_part.truth)
    parts = hold_out_parts([small_part], 0.2)
    assert not parts.has_separate_test
    assert np.array_equal(np.concatenate([parts.training[0].truth, parts.test[0].truth], 2), small_part.truth)
    with pytest.raises(BadParameter, match="too few objects"):
        hold_out_parts([empty_part], 0.2)
