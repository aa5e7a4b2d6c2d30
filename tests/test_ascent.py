"""The ascent in C++ gives what torch does, bit for bit."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import Array, basins_of, decode, hills
from torch import Tensor

from service.ascent import PASSES, Ascent
from service.config import Settings
from service.postprocess import InstanceDecoder, Relief
from service.repository import Instances, ModelSpec
from service.segmenter import Segmenter
from service.watershed import Basins, Watershed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel() -> Ascent:
    made = Ascent()
    made.prepare()
    assert made.suits(CPU, 1)
    return made


def numbers(basins: Basins) -> tuple[Tensor, ...]:
    return (basins.basin_of, basins.pieces, basins.peaks, basins.voxels, *basins.passes)


def compare(kernel: Ascent, heights: Array, relief: Relief, **how: Any) -> Basins:
    """Assert that both ways give the same numbers, of the same types; these."""
    with_torch, found = (basins_of(heights, relief, kernel=one, **how) for one in (None, kernel))
    for expected, made in zip(numbers(with_torch), numbers(found), strict=True):
        assert made.dtype == expected.dtype
        assert torch.equal(made, expected)
    return found


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    size=st.tuples(st.integers(1, 9), st.integers(1, 23), st.integers(1, 21)),
    sigma=st.sampled_from([0.5, 1.0, 2.5]),
    levels=st.sampled_from([0, 1, 3, 40]),
    persistence=st.sampled_from([0.0, 0.1, 2.0, np.inf]),
    squashed=st.booleans(),
    cuts=st.sets(st.integers(1, 8)),
    planes=st.integers(1, 10),
    across=st.booleans(),
)
def test_basins_are_those_of_torch(
    kernel: Ascent,
    seed: int,
    size: tuple[int, int, int],
    sigma: float,
    levels: int,
    persistence: float,
    squashed: bool,
    cuts: set[int],
    planes: int,
    across: bool,
) -> None:
    """With ties and plateaus, in slabs and blocks of any number of planes, anisotropic or not."""
    heights = hills(seed, size, sigma) if max(size) > 1 else np.ones(size, np.float32)
    if levels:
        heights = np.round(heights * levels) / levels
    inner = tuple(sorted(cut for cut in cuts if cut < size[across]))
    block = planes * (size[not across] + 2) * (size[2] + 2)
    compare(kernel, heights, Relief(persistence, squashed), cuts=inner, block=block, across=across)


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 1, 9), (7, 1, 1), (2, 3, 1), (5, 8, 13)])
@pytest.mark.parametrize("height", [1.0, 0.0, -0.0, -3.0, 1e-40, -1e30, np.inf, -np.inf])
def test_plateaus_of_every_height_and_shape(kernel: Ascent, size: tuple[int, int, int], height: float) -> None:
    basins = compare(kernel, np.full(size, height), Relief(0.1, squashed=False))
    assert basins.voxels.sum() == (height > -np.inf) * np.prod(size)


def test_single_voxels_anywhere(kernel: Ascent) -> None:
    for place in np.ndindex(3, 4, 5):
        heights = np.full((3, 4, 5), -np.inf)
        heights[place] = 0.5
        assert compare(kernel, heights, Relief(0.1, squashed=True)).voxels.tolist() == [1]


def test_thin_stretched_and_flattened_objects(kernel: Ascent) -> None:
    for stride in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (3, 3, 1)):
        heights = hills(7, (40, 40, 40), sigma=4)[tuple(slice(None, None, step) for step in stride)]
        compare(kernel, heights, Relief(0.2, squashed=False), cuts=(3,))


def test_more_passes_than_there_is_room_for_at_first(kernel: Ascent) -> None:
    heights = np.random.default_rng(2).random((24, 25, 26))
    basins = compare(kernel, heights, Relief(np.inf, squashed=False))
    assert len(basins.passes.height) > PASSES


def test_labels_are_those_of_torch(kernel: Ascent) -> None:
    heights = hills(4, (30, 45, 50), sigma=3)
    expected, count = decode(heights, 0.1, minimum_size=20)
    labels, found = decode(heights, 0.1, minimum_size=20, kernel=kernel, cuts=(11, 12))
    assert found == count > 10
    assert labels.dtype == expected.dtype
    assert np.array_equal(labels, expected)


@pytest.mark.parametrize("smoothing", [0, 2])
def test_scores_in_any_memory_layout_are_decoded_as_by_torch(
    kernel: Ascent, random_nuclei: ModelSpec, smoothing: int
) -> None:
    decoding = Instances(kind="instances", smoothing=smoothing, minimum_size=2, persistence=0.05)
    scores = torch.from_numpy(np.nan_to_num(hills(1, (2 * 12, 20, 22)), neginf=-1.0)).view(1, 2, 12, 20, 22)
    layouts = [scores, scores.contiguous(memory_format=torch.channels_last_3d), scores.mT.contiguous().mT]
    results = []
    for one in (Ascent(), kernel):
        for layout in layouts:
            decoder = InstanceDecoder(random_nuclei, decoding, (12, 20, 22), None, one)
            decoder.add(0, 0, layout[:, :, :5])
            decoder.add(5, 0, layout[:, :, 5:, :9])
            decoder.add(5, 9, layout[:, :, 5:, 9:])
            results.append(decoder.finish().pixels)
    assert results[0].max() > 3
    assert all(np.array_equal(result, results[0]) for result in results)


def test_nothing_is_read_or_written_that_is_not_there(kernel: Ascent) -> None:
    heights, inside = torch.ones(3, 4, 5), torch.ones(3, 4, 5, dtype=torch.bool)

    def made() -> Watershed:
        return Watershed((3, 4, 5), lambda peaks: peaks, CPU, kernel=kernel)

    for wrong in (heights.double(), heights[:, :3], heights[:, :, :4], heights[0]):
        with pytest.raises(ValueError, match="must be"):
            made().add(wrong, inside)
    with pytest.raises(ValueError, match="must be"):
        made().add(heights, inside[:2])
    full = made()
    full.add(heights, inside)
    with pytest.raises(ValueError, match="must be"):
        full.add(heights, inside)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_labels_of_either_width_are_the_numbers_of_the_pieces(
    kernel: Ascent, dtype: type[np.unsignedinteger[Any]]
) -> None:
    numbers = torch.randint(0, np.iinfo(np.uint16).max + 1, (50,), dtype=torch.int32)
    pieces = torch.randint(0, 50, (5, 6, 9), dtype=torch.int32)[1:-1, 1:-1, 1:-1]
    labels = np.empty((3, 4, 7), dtype)
    kernel.label(pieces, numbers, labels)
    assert np.array_equal(labels, numbers.numpy()[pieces.numpy()])
    for wrong in (np.empty((3, 4, 8), dtype), labels.astype(np.int64), labels[:, ::-1]):
        with pytest.raises(ValueError, match="labels"):
            kernel.label(pieces, numbers, wrong)


def test_pieces_without_a_number_are_background(kernel: Ascent) -> None:
    labels = np.empty((1, 1, 4), np.uint16)
    kernel.label(torch.tensor([[[-1, 0, 2, 9]]], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32), labels)
    assert labels.ravel().tolist() == [0, 5, 0, 0]


def test_without_a_compiler_torch_does_it_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    none = Ascent()
    with caplog.at_level(logging.WARNING):
        none.prepare()
        none.prepare()
    assert not none.suits(CPU, 1)
    assert sum("without the kernel" in record.message for record in caplog.records) == 1
    assert decode(hills(0, (5, 9, 9)), kernel=none)[1] > 0


def test_tensors_elsewhere_and_blocks_beyond_32_bits_are_left_to_torch(kernel: Ascent) -> None:
    assert not kernel.suits(torch.device("cuda"), 1000)
    assert not kernel.suits(CPU, 2**31)


def test_warming_up_prepares_it_where_instances_are_decoded(
    random_nuclei: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Ascent()
    monkeypatch.setattr("service.segmenter.ascent", fresh)
    settings = Settings.model_validate({"device": {"name": "cpu", "threads": 1}, "engine": {"kind": "eager"}})
    segmenter = Segmenter(random_nuclei, settings)
    assert not fresh.suits(CPU)
    segmenter.warm_up()
    assert fresh.suits(CPU)
