"""Filtering objects before labels are written gives the same labels as filtering them afterwards."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from fakes import bind_to_variants
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import CPU, Array, Size, choose_by_size, make_hills

from service.core.types import Objects, Segmentation
from service.inference.decoding.filters.fill_holes import fill_holes
from service.inference.decoding.instances import (
    InstanceDecoder,
    compute_min_object_confidence,
    compute_min_object_voxels,
)
from service.inference.decoding.labels import keep_objects, look_up_labels
from service.inference.decoding.pieces import WatershedParameters
from service.inference.decoding.streaming import StreamingWatershed, TorchWatershed, label_objects
from service.inference.decoding.watershed_kernel import WatershedOptions, watershed_kernel
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

IMPLEMENTATIONS = ("kernel", "torch")
PARAMETERS = WatershedParameters(-np.inf, 0.1, heights_are_logits=False)


def make_watershed(implementation: str, heights: Array, *, along_y: bool = False) -> StreamingWatershed:
    """Return a watershed of one of the implementations, with all planes of heights [Z, Y, X]; background is -inf."""
    size: Any = heights.shape
    watershed: StreamingWatershed
    if implementation == "kernel":
        watershed = watershed_kernel.start(size, PARAMETERS, WatershedOptions(along_y))
    else:
        watershed = TorchWatershed(size, CPU, PARAMETERS, along_y=along_y)
    tensor = torch.from_numpy(heights)
    watershed.add(tensor, tensor)
    return watershed


def assert_equal(labels: Array, objects: Objects | None, expected: Segmentation) -> None:
    assert objects is not None
    assert expected.objects is not None
    assert labels.dtype == expected.pixels.dtype
    assert np.array_equal(labels, expected.pixels)
    assert len(objects) == expected.count
    for field in fields(Objects):
        assert np.array_equal(getattr(objects, field.name), getattr(expected.objects, field.name))


@settings(max_examples=60, deadline=None)
@given(
    implementation=st.sampled_from(IMPLEMENTATIONS),
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(1, 9), st.integers(2, 23), st.integers(1, 21)),
    kept_fraction=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    minimum_size=st.sampled_from([0, 2, 30]),
    drop_border=st.booleans(),
    along_y=st.booleans(),
)
def test_removed_objects_get_no_label_and_the_remaining_objects_keep_their_order(
    implementation: str,
    seed: int,
    size: Size,
    kept_fraction: float,
    minimum_size: int,
    drop_border: bool,
    along_y: bool,
) -> None:
    heights = make_hills(seed, size)
    choose = choose_by_size(minimum_size, drop_border=drop_border)
    labels, objects = label_objects(make_watershed(implementation, heights, along_y=along_y), PARAMETERS, choose)
    is_kept = np.random.default_rng(seed).random(len(objects)) < kept_fraction
    expected = keep_objects(Segmentation(labels, "labels", None, len(objects), objects=objects), is_kept)

    def select(found: Objects, touches_face: Array) -> Array:
        is_chosen = choose(found, touches_face)
        assert np.array_equal(found.voxel_counts[is_chosen], objects.voxel_counts)
        is_chosen[is_chosen] = is_kept
        return is_chosen

    watershed = make_watershed(implementation, heights, along_y=along_y)
    assert_equal(*label_objects(watershed, PARAMETERS, select), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("removed", "dtype"), [(0, np.uint32), (3385, np.uint32), (3386, np.uint16)])
def test_the_dtype_of_labels_depends_on_the_number_of_kept_objects(
    implementation: str, removed: int, dtype: type[np.unsignedinteger[Any]]
) -> None:
    heights = np.full((82, 82, 82), -np.inf, np.float32)
    heights[::2, ::2, ::2] = 1.0
    labels, objects = label_objects(
        make_watershed(implementation, heights), PARAMETERS, lambda found, _: np.arange(len(found)) >= removed
    )
    assert len(objects) == 41**3 - removed
    assert labels.dtype == dtype
    found = labels[::2, ::2, ::2].ravel()
    assert not found[:removed].any()
    assert np.array_equal(found[removed:], np.arange(1, len(objects) + 1))
    assert np.count_nonzero(labels) == len(objects)


@pytest.mark.parametrize(
    ("highest", "dtype"),
    [(1, np.uint16), (2**15 - 1, np.uint16), (2**15, np.uint16), (2**16 - 1, np.uint16), (2**16, np.uint32)],
)
def test_labels_of_every_dtype_are_looked_up(highest: int, dtype: type[np.unsignedinteger[Any]]) -> None:
    """The device looks up signed numbers, which are negative for the upper half of the labels."""
    label_of = np.arange(highest + 1).astype(dtype)[::-1].copy()
    pieces = np.random.default_rng(0).integers(0, highest + 1, (3, 500, 701))
    pieces[0, 0, :2] = 0, highest
    labels = look_up_labels(torch.from_numpy(pieces).int(), label_of)
    assert labels.dtype == dtype
    assert np.array_equal(labels, highest - pieces)


@settings(max_examples=60, deadline=None)
@given(
    implementation=st.sampled_from(IMPLEMENTATIONS),
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(6, 13), st.integers(9, 25), st.integers(9, 25)),
    diameter=st.sampled_from([None, 6.0]),
    decoding=st.fixed_dictionaries(
        {
            "minimum_size": st.sampled_from([0, 5]),
            "minimum_fraction": st.sampled_from([0.0, 0.1, 0.9]),
            "min_confidence": st.sampled_from([0.0, 0.6, 0.65]),
            "min_relative_odds": st.sampled_from([0.0, 0.8, 0.95]),
            "border": st.sampled_from(["keep", "keep", "drop"]),
            "holes": st.sampled_from(["keep", "fill"]),
        }
    ),
)
def test_the_decoder_filters_objects_like_finished_labels(
    random_nuclei: ModelSpec,
    implementation: str,
    seed: int,
    size: Size,
    diameter: float | None,
    decoding: dict[str, Any],
) -> None:
    heights = np.stack([np.nan_to_num(make_hills(seed + i, size, 1.0), neginf=-1.0) for i in range(2)])
    scores = torch.from_numpy(heights)[None]
    spec = random_nuclei.model_copy(update={"input": random_nuclei.input.model_copy(update={"diameter": diameter})})

    def decode(changes: dict[str, Any]) -> Segmentation:
        instances = Instances.model_validate({"kind": "instances", "persistence": 0.05} | changes)
        kernel = watershed_kernel if implementation == "kernel" else bind_to_variants(watershed_kernel)
        decoder = InstanceDecoder(spec, instances, size, None, kernel)
        decoder.add(0, 0, scores)
        return decoder.finish()

    without_filter = {"minimum_fraction": 0.0, "min_confidence": 0.0, "min_relative_odds": 0.0, "holes": "keep"}
    unfiltered = decode(decoding | without_filter)
    assert unfiltered.objects is not None
    criteria = Instances.model_validate({"kind": "instances", "persistence": 0.05} | decoding)
    is_kept = unfiltered.objects.confidence >= compute_min_object_confidence(criteria, unfiltered.objects)
    is_kept &= unfiltered.objects.voxel_counts >= compute_min_object_voxels(
        diameter or np.inf, criteria, unfiltered.objects, size
    )
    expected = keep_objects(unfiltered, is_kept)
    if criteria.holes == "fill":
        fill_holes(expected.pixels)
    result = decode(decoding)
    assert result.count == expected.count
    assert_equal(result.pixels, result.objects, expected)
