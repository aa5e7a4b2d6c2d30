"""Pieces are joined to basins and merged to objects in the same way, in any number of steps and in both languages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from landscapes import CPU, Array, SyncCounter, choose_by_size, make_hills

from service.inference.decoding.pieces import (
    Pieces,
    WatershedParameters,
    compute_keys,
    find_objects,
    join_pieces,
    merge_in_python,
    merge_kernel,
)
from service.inference.decoding.streaming import TorchWatershed, label_objects


def make_keys(rng: np.random.Generator, levels: int, count: int) -> Array:
    """Return the keys of random heights from 0 to 1, of which many are equal if there are few levels."""
    heights = rng.random(count).astype(np.float32)
    return compute_keys(torch.from_numpy(np.round(heights * levels) / levels if levels else heights)).numpy()


def make_pieces(rng: np.random.Generator, levels: int, count: int, num_passes: int) -> tuple[Pieces, Array]:
    """Return pieces in random order of their positions, and their links, which lead to higher pieces or to themselves.

    Passes are at most as high as the lower of the two ends. Some pairs have several, and some consist of one piece.
    """
    keys = np.sort(make_keys(rng, levels, count))
    link = rng.integers(np.arange(count), count) if count else np.zeros(0, np.int64)
    pairs = rng.integers(0, count, (2, num_passes))
    pass_keys = np.minimum(make_keys(rng, levels, num_passes), keys[pairs].min(0))
    sums = rng.integers(0, 9, (4, count))
    return Pieces(rng.permutation(count), keys, sums, np.concatenate((pairs, pass_keys[None]))), link


def assert_equal(found: Pieces, expected: Pieces) -> None:
    for column, expected_column in zip(found, expected, strict=True):
        assert np.array_equal(column, expected_column)


random_pieces = {
    "seed": st.integers(0, 2**32 - 1),
    "count": st.integers(0, 40),
    "passes": st.integers(0, 90),
    "levels": st.sampled_from([0, 1, 2, 5]),
    "persistence": st.sampled_from([0.0, 0.1, 0.4, 2.0]),
    "logits": st.booleans(),
}


@given(**random_pieces, num_parts=st.integers(1, 5))
def test_joining_parts_first_gives_the_same_objects(
    seed, count, passes, levels, persistence, logits, num_parts
) -> None:
    """Each part is joined by its own links, as in the regions of a block-wise run. The other links are added later."""
    rng = np.random.default_rng(seed)
    chosen = WatershedParameters(0.0, persistence, heights_are_logits=logits)
    pieces, link = make_pieces(rng, levels, count, passes if count else 0)
    expected, expected_numbers = find_objects(pieces, link, chosen)
    bounds = [0, *np.sort(rng.integers(0, count + 1, num_parts - 1)), count]
    parts, numbers, offset = [], [np.zeros(0, np.int64)], 0
    part_of_piece = np.searchsorted(bounds[1:], np.arange(count), side="right")
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        is_inner = part_of_piece[link[first:end]] == number
        inner_link = np.where(is_inner, link[first:end] - first, np.arange(end - first))
        is_inner_pass = (part_of_piece[pieces.passes[:2]] == number).all(0)
        part_passes = pieces.passes[:, is_inner_pass] - np.array([[first], [first], [0]])
        part = Pieces(*(column[..., first:end] for column in pieces[:3]), part_passes)
        joined, joined_numbers = join_pieces(part, inner_link, chosen)
        parts.append(joined)
        numbers.append(joined_numbers + offset)
        offset += len(joined.key)
    joined_piece, together = np.concatenate(numbers), Pieces.concatenate(parts)
    outer_link = np.arange(offset)
    is_outer = part_of_piece[link] != part_of_piece
    outer_link[joined_piece[is_outer]] = joined_piece[link[is_outer]]
    is_between_parts = part_of_piece[pieces.passes[0]] != part_of_piece[pieces.passes[1]]
    outer_passes = pieces.passes[:, is_between_parts].copy()
    outer_passes[:2] = joined_piece[outer_passes[:2]]
    together = together._replace(passes=np.concatenate((together.passes, outer_passes), 1))
    found, found_numbers = find_objects(together, outer_link, chosen)
    assert np.array_equal(found_numbers[joined_piece], expected_numbers)
    assert_equal(found._replace(passes=expected.passes), expected)


@given(**random_pieces)
def test_python_and_cpp_merge_the_same_basins(seed, count, passes, levels, persistence, logits) -> None:
    rng = np.random.default_rng(seed)
    chosen = WatershedParameters(0.0, persistence, heights_are_logits=logits)
    basins, _ = make_pieces(rng, levels, count, passes if count else 0)
    peaks, heights = chosen.get_distances(basins.key), np.sort(chosen.get_distances(basins.passes[2]))[::-1].copy()
    pairs = basins.passes[:2].astype(np.int64)
    links = np.arange(count), np.arange(count)
    for merge, link in zip((merge_kernel.merge, merge_in_python), links, strict=True):
        merge(peaks, pairs, heights, chosen.depth, link)
    assert np.array_equal(*links)
    assert (peaks[links[0]] >= peaks).all()


def test_objects_are_merged_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, link = make_pieces(np.random.default_rng(0), 5, 40, 90)
    parameters = WatershedParameters(0.0, 0.2, heights_are_logits=False)
    expected, _ = find_objects(pieces, link, parameters)
    monkeypatch.setattr(merge_kernel, "problem", "no library")
    found, _ = find_objects(pieces, link, parameters)
    assert 1 < len(found.key) < 40
    assert_equal(found, expected)


@pytest.mark.parametrize("parts", [1, 4, 12])
def test_adding_planes_does_not_wait_for_the_device(parts: int) -> None:
    heights = torch.from_numpy(make_hills(3, (12, 16, 16))).nan_to_num_(neginf=-9)
    parameters = WatershedParameters(0.0, 0.1, heights_are_logits=False)
    watershed = TorchWatershed((12, 16, 16), CPU, parameters)
    with SyncCounter() as added:
        for part in heights.chunk(parts):
            watershed.add(part, part)
    with SyncCounter() as counted:
        labels, _ = label_objects(watershed, parameters, choose_by_size())
    assert added.sync_count == 0
    assert counted.sync_count < 20, "independent of the number of parts"
    assert labels.max() > 1
